"""Packed causal attention in plain PyTorch: exact on every device, fast enough on a CPU.

Segments of equal shape are computed together, so that a thousand short segments cost one call.
"""

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
    cu_seqlens_q, cu_seqlens_kv, left_window = call.cu_seqlens_q, call.cu_seqlens_kv, call.left_window
    lengths_q, lengths_kv = np.diff(cu_seqlens_q), np.diff(cu_seqlens_kv)
    shapes, member = np.unique(np.stack([lengths_q, lengths_kv], 1), axis=0, return_inverse=True)
    if len(shapes) == 1 and lengths_q[0]:  # all segments have one shape and are contiguous: no gather is needed
        query, key, value = (x.unflatten(0, (len(member), -1)).transpose(1, 2) for x in inputs[:3])
        return _equal_segments(query, key, value, scale, left_window, sink_N)
    outputs, order = [], []
    for number, (q, kv) in enumerate(shapes.tolist()):
        if q == 0:
            continue
        chosen = np.flatnonzero(member.reshape(-1) == number)
        rows_q, rows_kv = _rows(cu_seqlens_q[chosen], q), _rows(cu_seqlens_kv[chosen], kv)
        taken = _take(query_tNH, rows_q), _take(key_uGH, rows_kv), _take(value_uGW, rows_kv)
        outputs.append(_equal_segments(*taken, scale, left_window, sink_N))
        order.append(rows_q.reshape(-1))
    if not outputs:  # no queries: an empty output that still propagates (zero) gradients to every input
        return query_tNH[..., : value_uGW.shape[-1]] + 0 * (key_uGH.sum() + value_uGW.sum())
    back = np.argsort(np.concatenate(order), kind="stable")
    return torch.cat(outputs).index_select(0, torch.from_numpy(back).to(query_tNH.device))


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
    queries, keys = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    # Use the plain causal kernel where it is equivalent: torch's `is_causal` is aligned to the top left.
    if sink_N is None and queries == keys and (left_window is None or left_window >= keys - 1):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)
    blocks = []
    for first in range(0, queries, MASKED_QUERIES):
        own = min(MASKED_QUERIES, queries - first)
        place = first + keys - queries  # index of the block's first query among the keys
        seen = 0 if left_window is None else max(place - left_window, 0)  # the first key that any of its queries sees
        visible = torch.ones(own, place + own - seen, dtype=torch.bool, device=query.device).tril(place - seen)
        if left_window is not None:
            visible = visible.triu(place - seen - left_window)
        block_query = query[:, :, first : first + own]
        block_key, block_value = (x[:, :, seen : place + own] for x in (key, value))
        if sink_N is not None:  # one more key, with a value of 0; torch differentiates a mask of logits
            block_key, block_value = (F.pad(x, (0, 0, 0, 1)) for x in (block_key, block_value))
            hidden = query.new_zeros(visible.shape).masked_fill(~visible, -torch.inf)
            sinks = sink_N.to(query.dtype)[None, :, None, None].expand(1, -1, own, 1)
            visible = torch.cat([hidden.expand(1, len(sink_N), *visible.shape), sinks], dim=-1)
        blocks.append(
            F.scaled_dot_product_attention(
                block_query, block_key, block_value, attn_mask=visible, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(blocks, dim=2).transpose(1, 2).flatten(0, 1)
