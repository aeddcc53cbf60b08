"""Triton kernels of `triton_packed`. Each tile of queries attends to one contiguous range of keys.

Query t sees the keys low[t] .. high[t]. Both are non-decreasing in t, so a tile of queries needs one contiguous range
of keys, and a tile of keys is seen by one contiguous range of queries; pairs of different segments are masked. There
are no atomics: each program owns the rows that it writes, and sums over the heads of a group itself. The numbers of
rows change from step to step under context parallelism, so the kernels are not specialized on them, which would
recompile them.

Legend: t queries, u keys, N query heads, G key heads, H head size; a program has M queries or K keys.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_of(head: tl.tensor, rows: tl.tensor, distance: tl.tensor, columns: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load rows of one head, `distance` elements apart, with int64 offsets; 0 outside the mask."""
    return tl.load(head + rows.to(tl.int64)[:, None] * distance + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _keys_of(
    low: tl.tensor, high: tl.tensor, first: tl.tensor, rows: tl.tensor, t: tl.tensor, M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load the key range lowest .. highest of each of M queries from `first` on, and their union begin .. end - 1."""
    real = rows < t
    lowest = tl.load(low + rows, mask=real, other=0)
    highest = tl.load(high + rows, mask=real, other=-1)
    return lowest, highest, tl.load(low + first), tl.load(high + tl.minimum(first + M, t) - 1) + 1


@triton.jit(do_not_specialize=["t"])
def forward(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    t: tl.tensor,
    scale: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    N: tl.constexpr,
    SHARE: tl.constexpr,
    H: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Compute out [t, N, H] and lse [N, t] for M queries and one head; `scale` and lse are in base 2."""
    program = tl.program_id(0)
    head = (program % N).to(tl.int64)  # adjacent programs: the heads of a group share keys in the cache
    first = (program // N) * M
    rows = first + tl.arange(0, M)
    real = rows < t
    columns = tl.arange(0, WIDE)
    inside = columns[None, :] < H
    mask = real[:, None] & inside
    q = _rows_of(query + head * query_head, rows, query_row, columns, mask)
    lowest, highest, begin, end = _keys_of(low, high, first, rows, t, M)
    most = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDE], tl.float32)
    key += (head // SHARE) * key_head
    value += (head // SHARE) * value_head
    for start in range(begin, end, K):
        keys = start + tl.arange(0, K)
        here = (keys < end)[:, None] & inside
        k = _rows_of(key, keys, key_row, columns, here)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (keys[None, :] >= lowest[:, None]) & (keys[None, :] <= highest[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == -float("inf"), 0.0, new)  # avoids inf - inf in rows that have seen no key yet
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(p, 1)
        v = _rows_of(value, keys, value_row, columns, here)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        most = new
    total = tl.where(real, total, 1.0)
    most = tl.where(real, most, 0.0)
    places = (rows.to(tl.int64)[:, None] * N + head) * H + columns[None, :]
    tl.store(out + places, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + head * t + rows, most + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["t"])
def backward_query(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    out_grad: tl.tensor,
    query_grad: tl.tensor,
    delta: tl.tensor,
    t: tl.tensor,
    scale: tl.tensor,
    scale_grad: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    grad_row: tl.tensor,
    grad_head: tl.tensor,
    N: tl.constexpr,
    SHARE: tl.constexpr,
    H: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Compute query_grad [t, N, H] and delta [N, t], the sums of out * out_grad, for M queries and one head."""
    program = tl.program_id(0)
    head = (program % N).to(tl.int64)
    first = (program // N) * M
    rows = first + tl.arange(0, M)
    real = rows < t
    columns = tl.arange(0, WIDE)
    inside = columns[None, :] < H
    mask = real[:, None] & inside
    q = _rows_of(query + head * query_head, rows, query_row, columns, mask)
    g = _rows_of(out_grad + head * grad_head, rows, grad_row, columns, mask)
    places = (rows.to(tl.int64)[:, None] * N + head) * H + columns[None, :]
    o = tl.load(out + places, mask=mask, other=0.0)
    along = head * t + rows
    d = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + along, d, mask=real)
    norm = tl.load(lse + along, mask=real, other=0.0)
    lowest, highest, begin, end = _keys_of(low, high, first, rows, t, M)
    acc = tl.zeros([M, WIDE], tl.float32)
    key += (head // SHARE) * key_head
    value += (head // SHARE) * value_head
    for start in range(begin, end, K):
        keys = start + tl.arange(0, K)
        here = (keys < end)[:, None] & inside
        k = _rows_of(key, keys, key_row, columns, here)
        v = _rows_of(value, keys, value_row, columns, here)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (keys[None, :] >= lowest[:, None]) & (keys[None, :] <= highest[:, None])
        p = tl.where(seen, tl.exp2(scores - norm[:, None]), 0.0)
        p_grad = tl.dot(g, tl.trans(v), input_precision="ieee")
        scores_grad = p * (p_grad - d[:, None])
        acc += tl.dot(scores_grad.to(k.dtype), k, input_precision="ieee")
    tl.store(query_grad + places, (acc * scale_grad).to(query_grad.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["t", "u"])
def backward_key(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    first_query: tl.tensor,
    end_query: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    out_grad: tl.tensor,
    key_grad: tl.tensor,
    value_grad: tl.tensor,
    t: tl.tensor,
    u: tl.tensor,
    scale: tl.tensor,
    scale_grad: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    grad_row: tl.tensor,
    grad_head: tl.tensor,
    G: tl.constexpr,
    SHARE: tl.constexpr,
    H: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Compute key_grad and value_grad [u, G, H] for K keys and one key head, over its SHARE query heads."""
    program = tl.program_id(0)
    group = (program % G).to(tl.int64)
    tile = program // G
    keys = tile * K + tl.arange(0, K)
    columns = tl.arange(0, WIDE)
    inside = columns[None, :] < H
    here = (keys < u)[:, None] & inside
    k = _rows_of(key + group * key_head, keys, key_row, columns, here)
    v = _rows_of(value + group * value_head, keys, value_row, columns, here)
    begin = tl.load(first_query + tile)
    end = tl.load(end_query + tile)
    tiles = (end - begin + M - 1) // M
    dk = tl.zeros([K, WIDE], tl.float32)
    dv = tl.zeros([K, WIDE], tl.float32)
    for turn in range(tiles * SHARE):  # one loop over heads and tiles, so that loads are pipelined across both
        head = group * SHARE + turn // tiles
        rows = begin + (turn % tiles) * M + tl.arange(0, M)
        real = rows < end
        mask = real[:, None] & inside
        q = _rows_of(query + head * query_head, rows, query_row, columns, mask)
        g = _rows_of(out_grad + head * grad_head, rows, grad_row, columns, mask)
        along = head * t + rows
        norm = tl.load(lse + along, mask=real, other=0.0)
        d = tl.load(delta + along, mask=real, other=0.0)
        lowest = tl.load(low + rows, mask=real, other=0)
        highest = tl.load(high + rows, mask=real, other=-1)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        seen = (keys[:, None] >= lowest[None, :]) & (keys[:, None] <= highest[None, :])
        p = tl.where(seen, tl.exp2(scores - norm[None, :]), 0.0)
        dv += tl.dot(p.to(g.dtype), g, input_precision="ieee")
        p_grad = tl.dot(v, tl.trans(g), input_precision="ieee")
        scores_grad = p * (p_grad - d[None, :])
        dk += tl.dot(scores_grad.to(q.dtype), q, input_precision="ieee")
    places = (keys.to(tl.int64)[:, None] * G + group) * H + columns[None, :]
    tl.store(key_grad + places, (dk * scale_grad).to(key_grad.dtype.element_ty), mask=here)
    tl.store(value_grad + places, dv.to(value_grad.dtype.element_ty), mask=here)
