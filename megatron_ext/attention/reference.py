"""Packed causal attention in plain PyTorch: exact on every device, fast enough on a CPU.

Segments of equal shape are computed together, so that a thousand short segments cost one call.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.arrays import Int32, Int64
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.context_parallel.exchange import QKV

MASKED_QUERIES = 128  # queries per block where a mask is needed; keys that no query of the block sees are skipped


def attend(inputs: QKV, call: AttentionCall, scale: float) -> Tensor:
    """Return the attention output, [t, N, W], in the queries' dtype; segments may be empty."""
    query_tNH, key_uGH, value_uGW, sink_N = inputs
    lengths = np.stack([np.diff(call.cu_seqlens_q), np.diff(call.cu_seqlens_kv)], axis=1)
    shapes, shape_of_segment = np.unique(lengths, axis=0, return_inverse=True)
    if len(shapes) == 1 and shapes[0, 0]:  # all segments have one shape and are contiguous: no gather is needed
        query, key, value = (x.unflatten(0, (call.segments, -1)).transpose(1, 2) for x in inputs[:3])
        return _equal_segments(query, key, value, scale, call.left_window, sink_N)
    outputs = []
    output_rows = []
    for number, (queries, keys) in enumerate(shapes.tolist()):
        if queries == 0:
            continue
        segments = np.flatnonzero(shape_of_segment.reshape(-1) == number)
        rows_q = _rows(call.cu_seqlens_q[segments], queries)
        rows_kv = _rows(call.cu_seqlens_kv[segments], keys)
        tensors = _take(query_tNH, rows_q), _take(key_uGH, rows_kv), _take(value_uGW, rows_kv)
        outputs.append(_equal_segments(*tensors, scale, call.left_window, sink_N))
        output_rows.append(rows_q.reshape(-1))
    if not outputs:  # no queries: an empty output that still propagates (zero) gradients to every input
        return query_tNH[..., : value_uGW.shape[-1]] + 0 * (key_uGH.sum() + value_uGW.sum())
    order = np.argsort(np.concatenate(output_rows), kind="stable")
    return torch.cat(outputs).index_select(0, torch.from_numpy(order).to(query_tNH.device))


def _rows(starts_n: Int32, length: int) -> Int64:
    return starts_n.astype(np.int64)[:, None] + np.arange(length)


def _take(x_tNH: Tensor, rows: Int64) -> Tensor:
    """Gather the rows of each segment; [n, heads, length, H]."""
    index = torch.from_numpy(rows.reshape(-1)).to(x_tNH.device)
    return x_tNH.index_select(0, index).unflatten(0, rows.shape).transpose(1, 2)


def _equal_segments(
    query: Tensor, key: Tensor, value: Tensor, scale: float, left_window: int | None, sink_N: Tensor | None
) -> Tensor:
    """Compute attention within n segments of one shape, [n, heads, length, H] each; return [n * queries, N, H]."""
    queries = query.shape[2]
    keys = key.shape[2]
    if left_window is None:
        left_window = keys
    attention = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    # Use the plain causal kernel where it is equivalent: torch's `is_causal` is aligned to the top left.
    if sink_N is None and queries == keys and left_window >= keys - 1:
        return attention(query, key, value, is_causal=True).transpose(1, 2).flatten(0, 1)
    blocks = []
    for first in range(0, queries, MASKED_QUERIES):
        last = min(first + MASKED_QUERIES, queries)
        place = first + keys - queries  # index of the block's first query among the keys
        first_key = max(place - left_window, 0)  # the first key that any query of the block sees
        last_key = last + keys - queries
        block_key = key[:, :, first_key:last_key]
        block_value = value[:, :, first_key:last_key]
        mask = query.new_ones((last - first, last_key - first_key), dtype=torch.bool)
        mask = mask.tril(place - first_key).triu(place - first_key - left_window)
        if sink_N is not None:  # one more key, with a value of 0; torch differentiates a mask of logits
            block_key = F.pad(block_key, (0, 0, 0, 1))
            block_value = F.pad(block_value, (0, 0, 0, 1))
            logits = query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
            sinks = sink_N.to(query.dtype)[None, :, None, None].expand(1, -1, len(mask), 1)
            mask = torch.cat([logits.expand(1, len(sink_N), *mask.shape), sinks], dim=-1)
        blocks.append(attention(query[:, :, first:last], block_key, block_value, attn_mask=mask))
    return torch.cat(blocks, dim=2).transpose(1, 2).flatten(0, 1)
