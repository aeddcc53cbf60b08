"""Packed attention in Triton (CUDA), designed for segments much shorter than a tile and correct for all.

Other kernels give every segment its own tiles: with a window of 8 they compute 128 x 64 scores for 8 x 8, and 131,072
segments need as many blocks. Here a tile has 64 queries of any segments, each with its own range of keys, so the cost
does not depend on the number of segments or on their mix of lengths.

FlexAttention with a block mask was rejected: it has no backward on a CPU, so it could not be tested here, and its mask
is rebuilt for each window.

A call launches 1 kernel in forward and 2 in backward. The backward has no atomics, so it is deterministic.

A non-finite value spreads over its tile, beyond its segment; training stops on it anyway. Values are as wide as keys.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.attention.interface import AttentionCall
from megatron_ext.attention.sinks import attend_with_sink
from megatron_ext.context_parallel.exchange import QKV


class Tile(NamedTuple):
    """Tile sizes and launch parameters of one kernel."""

    queries: int  # rows per tile: of the program itself and, for the other one, of each loop iteration
    keys: int
    warps: int
    stages: int  # of the loop's loads


class Tiles(NamedTuple):
    """The tiles of the three kernels."""

    forward: Tile
    backward_query: Tile
    backward_key: Tile


def tiles(head_size: int) -> Tiles:
    """Return tiles without register spills on an H100, of which two run on an SM at once for heads up to 128.

    `python benchmarks/occupancy.py` prints their registers and shared memory.
    """
    if head_size > 128:
        return Tiles(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2))
    stages = 3 if head_size <= 64 else 2
    return Tiles(Tile(64, 64, 4, stages), Tile(64, 64, 4, stages), Tile(32, 64, 4, stages))


def ranges(call: AttentionCall, own_keys: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute the keys that each query sees and the queries that see each tile, without host synchronization.

    In a segment with q queries and k keys, the last key of query j is j + (k - q); its first key is the segment's
    first, or `left_window` before the last.

    Returns:
        low_t, high_t: int32, the first and the last key row of each query; both non-decreasing.
        tiles_of_keys: int32, for each tile of `own_keys` keys: the first query that sees any of them, the end of these
            queries, the first query that sees all of them, the end of these.
    """
    borders_q, borders_kv = call.borders
    t, u = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_kv[-1])
    lengths = borders_q.diff()
    shift, start = (
        torch.repeat_interleave(x, lengths, output_size=t) for x in (borders_kv[1:] - borders_q[1:], borders_kv[:-1])
    )
    high = torch.arange(t, dtype=torch.int32, device=lengths.device) + shift
    low = start if call.left_window is None else torch.maximum(start, high - call.left_window)
    first_key = torch.arange(0, u, own_keys, dtype=torch.int32, device=lengths.device)
    last_key = (first_key + (own_keys - 1)).clamp(max=u - 1)
    first_query, full_query = (torch.searchsorted(high, key, out_int32=True) for key in (first_key, last_key))
    end_query, full_end_query = (
        torch.searchsorted(low, key, right=True, out_int32=True) for key in (last_key, first_key)
    )
    return low, high, [first_query, end_query, full_query, full_end_query]


def attend(inputs: QKV, call: AttentionCall, scale: float) -> Tensor:
    """Return the attention output, [t, N, H].

    Rows and heads may have any stride; a copy is made unless the elements of a head are contiguous.
    """
    query_tNH, key_uGH, value_uGW, sink_N = inputs
    if not len(query_tNH):
        return query_tNH + 0 * (key_uGH.sum() + value_uGW.sum())
    seen = (*call.once(ranges, tiles(query_tNH.shape[2]).backward_key.keys), scale)
    if sink_N is None:
        out: Tensor = _forward(query_tNH, key_uGH, value_uGW, *seen)[0]
        return out

    def forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _forward(query, key, value, *seen)
        return out, lse * math.log(2)

    def backward(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *others, lse = tensors
        gradients: tuple[Tensor, Tensor, Tensor] = _backward(*others, lse / math.log(2), *seen)
        return gradients

    return attend_with_sink(query_tNH, key_uGH, value_uGW, sink_N, forward, backward)


def missing() -> str | None:
    """Return how to install Triton if it is missing; None if it is installed."""
    return None if find_spec("triton") is not None else "needs Triton; pip install triton"


@torch.library.custom_op("megatron_ext::packed_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    low_t: Tensor,
    high_t: Tensor,
    tiles_of_keys: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute out [t, N, H] and the base-2 logarithm of the sum of weights, [N, t]."""
    from megatron_ext.attention import triton_kernels

    query, key, value = (_dense_heads(x) for x in (query, key, value))
    out, lse = _outputs(query)
    t, heads, size = query.shape
    tile = tiles(size).forward
    triton_kernels.forward[(-(-t // tile.queries) * heads,)](
        *(query, key, value, low_t, high_t, out, lse, t, scale / math.log(2)),
        *_strides(query, key, value),
        N=heads,
        **_constants(tile, heads // key.shape[1], size),
    )
    return out, lse


@_forward.register_fake
def _(query: Tensor, *unused: Any) -> tuple[Tensor, Tensor]:
    return _outputs(query)


def _outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    t, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, t), dtype=torch.float32)


@torch.library.custom_op("megatron_ext::packed_attention_backward", mutates_args=())
def _backward(
    out_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    low_t: Tensor,
    high_t: Tensor,
    tiles_of_keys: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values, contiguous."""
    from megatron_ext.attention import triton_kernels

    query, key, value, out_grad = (_dense_heads(x) for x in (query, key, value, out_grad))
    (t, heads, size), (u, groups, _) = query.shape, key.shape
    gradients = _gradients(query, key, value)
    query_grad, key_grad, value_grad = gradients
    delta = torch.empty_like(lse)
    own, strides = tiles(size), _strides(query, key, value, out_grad)
    triton_kernels.backward_query[(-(-t // own.backward_query.queries) * heads,)](
        *(query, key, value, low_t, high_t, out, lse, out_grad, query_grad, delta, t, scale / math.log(2), scale),
        *strides,
        N=heads,
        **_constants(own.backward_query, heads // groups, size),
    )
    triton_kernels.backward_key[(-(-u // own.backward_key.keys) * groups,)](
        *(query, key, value, low_t, high_t, *tiles_of_keys, lse, delta, out_grad, key_grad, value_grad),
        *(t, u, scale / math.log(2), scale),
        *strides,
        G=groups,
        **_constants(own.backward_key, heads // groups, size),
    )
    return gradients


@_backward.register_fake
def _(out_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *unused: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(query, key, value)


def _gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, low_t, high_t, tiles_of_keys, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, low_t, high_t, *tiles_of_keys)


def _gradients_of(ctx: Any, out_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, a, b, c, d = ctx.saved_tensors
    return (*_backward(out_grad, *tensors, [a, b, c, d], ctx.scale), None, None, [None] * 4, None)


_forward.register_autograd(_gradients_of, setup_context=_save)


def _dense_heads(x: Tensor) -> Tensor:
    """Return the tensor with the elements of each head contiguous; the tensor itself if they are."""
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """Return the row stride and the head stride of each tensor."""
    return [distance for x in tensors for distance in x.stride()[:2]]


def _constants(tile: Tile, share: int, head_size: int) -> dict[str, int]:
    """Return the compile-time constants and launch options of a kernel."""
    # powers of two of at least 16, as tensor cores need; one part if the second would not be narrower
    whole = max(16, 1 << (head_size - 1).bit_length())
    left = whole // 2
    right = max(16, 1 << max(head_size - left - 1, 0).bit_length())
    if right >= left:
        left, right = whole, 0
    return {
        "SHARE": share,
        "H": head_size,
        "LEFT": left,
        "RIGHT": right,
        "M": tile.queries,
        "K": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
