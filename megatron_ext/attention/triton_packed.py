"""Packed attention by our own Triton kernels (CUDA): made for segments much shorter than a tile, right for all.

Other kernels give every segment tiles of its own, so that a window of 8 computes 128 x 64 scores for 8 x 8 and its
131,072 segments want as many blocks. Here a tile is of 128 queries whatever segments they belong to, each with its own
range of keys; the number of segments does not matter, nor that one is long beside many short ones.

FlexAttention with a block mask was refused: it has no backward on a CPU, so that nothing here could test it, and its
mask is built anew for each window.

A call launches 1 kernel forward and 2 backward. They move, for t queries and u keys of b bytes a number,

    forward     b * H * (2 t N + 2 u G) + 4 t N                        (queries, out; keys, values; statistics)
    backward    b * H * (6 t N + 6 u G) + 16 t N                       (each of two kernels reads its inputs once)

and 8 t more for the ranges: 128K tokens with 32 query heads and 8 key heads of 128 in bf16 are 2.7 and 8.1 GB, 0.8 and
2.4 ms at 3.35 TB/s [predicted]. The backward has no atomics: twice the same is the same to the bit.

A value that is not finite spreads over the tile, beyond its segment; a run ends there anyway.

Legend: t queries, u keys, N query heads, G key heads, H head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_ext.attention.interface import AttentionCall


@dataclass(frozen=True)
class Tile:
    """Says how many rows a program of one kernel computes with at a time, and how.

    Attributes:
        queries, keys: rows; its own and those of a turn of its loop.
        warps: threads of a program, in 32s.
        stages: how many turns ahead of the computing the loads are.
    """

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Names the tile of each kernel."""

    forward: Tile
    backward_query: Tile
    backward_key: Tile


def tiles(head_size: int) -> Tiles:
    """Choose tiles that fit into the registers and the shared memory of an H100."""
    if head_size <= 64:
        return Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3))
    if head_size <= 128:
        return Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    return Tiles(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2))


@dataclass(frozen=True, eq=False)
class Ranges:
    """Says which keys each query sees, and which queries see each tile of keys.

    Attributes:
        low_t, high_t: int32, the first and the last key row of each query; neither ever falls.
        first_query, end_query: int32, of each tile of keys the first query that sees one of them, and the one past
            the last.
    """

    low_t: Tensor
    high_t: Tensor
    first_query: Tensor
    end_query: Tensor


def ranges(call: AttentionCall, own_keys: int) -> Ranges:
    """Compute the call's ranges on its device; the host waits for nothing.

    A segment with q queries and k keys, query j: its last key is j + (k - q), its first the segment's, or `left_window`
    before the last.
    """
    assert call.borders is not None
    borders_q, borders_kv = call.borders
    t, u = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_kv[-1])
    lengths = borders_q.diff()
    shift, start = (
        torch.repeat_interleave(x, lengths, output_size=t) for x in (borders_kv[1:] - borders_q[1:], borders_kv[:-1])
    )
    high = torch.arange(t, dtype=torch.int32, device=lengths.device) + shift
    low = start if call.left_window is None else torch.maximum(start, high - call.left_window)
    first_key = torch.arange(0, u, own_keys, dtype=torch.int32, device=lengths.device)
    first_query = torch.searchsorted(high, first_key, out_int32=True)
    end_query = torch.searchsorted(low, (first_key + (own_keys - 1)).clamp(max=u - 1), right=True, out_int32=True)
    return Ranges(low, high, first_query, end_query)


def attend(query_tNH: Tensor, key_uGH: Tensor, value_uGH: Tensor, call: AttentionCall, scale: float) -> Tensor:
    """Attend as the call says; [t, N, H]. Rows and heads may lie any distance apart, a head's numbers side by side."""
    if not len(query_tNH):
        return query_tNH + 0 * (key_uGH.sum() + value_uGH.sum())
    found = call.once(ranges, tiles(query_tNH.shape[2]).backward_key.keys)
    out: Tensor = _forward(
        query_tNH, key_uGH, value_uGH, found.low_t, found.high_t, found.first_query, found.end_query, scale
    )[0]
    return out


def missing() -> str | None:
    """Say that Triton is not installed; None where it is."""
    return None if find_spec("triton") is not None else "needs Triton; pip install triton"


@torch.library.custom_op("megatron_ext::packed_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    low_t: Tensor,
    high_t: Tensor,
    first_query: Tensor,
    end_query: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute out [t, N, H] and, in powers of two, the logarithm of the sum of weights [N, t]."""
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
    first_query: Tensor,
    end_query: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values, dense."""
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
        *(query, key, value, low_t, high_t, first_query, end_query, lse, delta, out_grad, key_grad, value_grad),
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
    *tensors, ctx.scale = inputs
    query, key, value, *found = tensors
    ctx.save_for_backward(query, key, value, *output, *found)


def _gradients_of(ctx: Any, out_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(out_grad, *ctx.saved_tensors, ctx.scale), None, None, None, None, None)


_forward.register_autograd(_gradients_of, setup_context=_save)


def _dense_heads(x: Tensor) -> Tensor:
    """Return the tensor with each head's numbers side by side, itself where they are."""
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """List the distances of rows and of heads, of each tensor."""
    return [distance for x in tensors for distance in x.stride()[:2]]


def _constants(tile: Tile, share: int, head_size: int) -> dict[str, int]:
    """Name what a kernel is compiled for."""
    return {
        "SHARE": share,
        "H": head_size,
        "WIDE": _wide(head_size),
        "M": tile.queries,
        "K": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _wide(head_size: int) -> int:
    """Return the width of a tile: a power of two, and what a tensor core takes at least."""
    return max(16, 1 << (head_size - 1).bit_length())
