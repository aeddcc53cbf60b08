"""A call of packed attention in several, each of some of its segments: the same output and the same gradients.

Segments know nothing of each other, so any partition of them will do:

    consecutive(call, 2)     a a b | c c c d | e           for a kernel that takes so many segments, or rows, at most
    by_length(call, 2)       c c c | a a b d e             long ones apart from short ones; rows move, and move back

What a piece needs on the device is computed there from the call's borders, once for all layers
(`AttentionCall.once`); the host waits for nothing.

Legend: t queries, u keys, N query heads, G key heads, H head size, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_ext.attention.interface import GAP, Attend, AttentionCall
from megatron_ext.attention.reorder import reordered


@dataclass(frozen=True, eq=False)
class Rows:
    """Names rows in an order, and the way back: rows[back[i]] = i."""

    rows: Tensor
    back: Tensor


@dataclass(frozen=True, eq=False)
class ByLength:
    """Parts a call in its long segments and its short ones.

    Attributes:
        calls: of the long segments and of the short ones, each in their order.
        queries, keys: the rows of the long segments, then of the short ones.
    """

    calls: tuple[AttentionCall, AttentionCall]
    queries: Rows
    keys: Rows


def consecutive(call: AttentionCall, most: int, rows: int) -> list[AttentionCall]:
    """Cut the call into calls of at most `most` segments and `rows` of `spread_rows`, in their order.

    No segment alone has more queries than `rows`.
    """
    spread_S1 = call.cu_seqlens_q + GAP * np.arange(call.segments + 1)
    calls, first = [], 0
    while first < call.segments:
        end = int(np.searchsorted(spread_S1, spread_S1[first] + rows + GAP, side="right")) - 1
        assert end > first
        calls.append(_some(call, first, min(end, first + most)))
        first += calls[-1].segments
    return calls


def by_length(call: AttentionCall, cut: int) -> ByLength:
    """Part the segments with more than `cut` keys from the others; the call has been moved to its device."""
    assert call.borders is not None
    lengths = [np.diff(cu) for cu in (call.cu_seqlens_q, call.cu_seqlens_kv)]
    order = np.argsort(lengths[1] <= cut, kind="stable")
    long = int((lengths[1] > cut).sum())
    on_device = [cu.diff() for cu in call.borders]
    order_on_device = torch.argsort((on_device[1] <= cut).to(torch.int8), stable=True)
    host = [np.append(0, np.cumsum(x[order])).astype(np.int32) for x in lengths]
    device = [pad(x[order_on_device].cumsum(0, dtype=torch.int32), (1, 0)) for x in on_device]
    ordered = replace(call, cu_seqlens_q=host[0], cu_seqlens_kv=host[1], borders=(device[0], device[1]))
    totals = int(host[0][-1]), int(host[1][-1])
    queries, keys = (
        _rows(old[:-1][order_on_device], new, total)
        for old, new, total in zip(call.borders, device, totals, strict=True)
    )
    return ByLength((_some(ordered, 0, long), _some(ordered, long, call.segments)), queries, keys)


def attend_consecutively(
    attend: Attend,
    query_tNH: Tensor,
    key_uGH: Tensor,
    value_uGH: Tensor,
    call: AttentionCall,
    scale: float,
    most: int,
    rows: int,
) -> Tensor:
    """Attend with at most `most` segments and `rows` of `spread_rows` at a time; [t, N, H]."""
    calls = call.once(consecutive, most, rows)
    return _attend_in_turn([attend] * len(calls), query_tNH, key_uGH, value_uGH, calls, scale)


def attend_by_length(
    attends: tuple[Attend, Attend],
    query_tNH: Tensor,
    key_uGH: Tensor,
    value_uGH: Tensor,
    call: AttentionCall,
    scale: float,
    cut: int,
) -> Tensor:
    """Attend with the first kernel to segments of more than `cut` keys, with the second to the others; [t, N, H]."""
    parts = call.once(by_length, cut)
    query, key, value = (
        reordered(x, rows.rows, rows.back)
        for x, rows in ((query_tNH, parts.queries), (key_uGH, parts.keys), (value_uGH, parts.keys))
    )
    out = _attend_in_turn(attends, query, key, value, parts.calls, scale)
    return reordered(out, parts.queries.back, parts.queries.rows)


def _attend_in_turn(
    attends: list[Attend] | tuple[Attend, ...],
    query_tNH: Tensor,
    key_uGH: Tensor,
    value_uGH: Tensor,
    calls: list[AttentionCall] | tuple[AttentionCall, ...],
    scale: float,
) -> Tensor:
    """Attend with each kernel to the rows of its call, which follow one another; a call without queries is left out."""
    queries = query_tNH.split([int(call.cu_seqlens_q[-1]) for call in calls])
    keys, values = (x.split([int(call.cu_seqlens_kv[-1]) for call in calls]) for x in (key_uGH, value_uGH))
    outputs = [
        attend(query, key, value, call, scale)
        for attend, query, key, value, call in zip(attends, queries, keys, values, calls, strict=True)
        if len(query)
    ]
    return torch.cat(outputs) if outputs else query_tNH + 0 * (key_uGH.sum() + value_uGH.sum())


def _some(call: AttentionCall, first: int, end: int) -> AttentionCall:
    """Make the call of segments first .. end - 1, whose rows begin at 0."""
    q, kv = (cu[first : end + 1] - cu[first] for cu in (call.cu_seqlens_q, call.cu_seqlens_kv))
    borders = call.borders
    if borders is not None:
        borders = (
            borders[0][first : end + 1] - borders[0][first],
            borders[1][first : end + 1] - borders[1][first],
        )
    return replace(call, cu_seqlens_q=q, cu_seqlens_kv=kv, borders=borders)


def _rows(starts_S: Tensor, borders: Tensor, total: int) -> Rows:
    """Name the rows of segments that begin at `starts_S`, where in the new order they begin at `borders`."""
    place = torch.arange(total, device=borders.device)
    shift = torch.repeat_interleave(starts_S - borders[:-1], borders.diff(), output_size=total)
    rows = place + shift
    return Rows(rows, torch.empty_like(rows).scatter_(0, rows, place))
