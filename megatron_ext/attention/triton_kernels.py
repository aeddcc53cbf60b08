"""Triton kernels of `triton_packed`. Each tile of queries attends to one contiguous range of keys.

Query t sees the keys low[t] .. high[t]. Both are non-decreasing in t, so a tile of queries needs one contiguous range
of keys, and a tile of keys is seen by one contiguous range of queries; pairs of different segments are masked. There
are no atomics: each program owns the rows that it writes, and sums over the heads of a group itself. The numbers of
rows change from step to step under context parallelism, so the kernels are not specialized on them, which would
recompile them.

Widths of tiles are powers of two. A head of another size is computed in two parts, LEFT and RIGHT columns wide: 80 is
64 + 16, 96 is 64 + 32, with no more products than it has numbers. RIGHT is 0 for a single part.

A program has M queries or K keys, of t and u.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def _places(rows, distance, first: tl.constexpr, WIDTH: tl.constexpr):
    """Return the int64 offsets of WIDTH columns, from `first` on, of rows that are `distance` elements apart."""
    return rows.to(tl.int64)[:, None] * distance + (first + tl.arange(0, WIDTH))[None, :]


@triton.jit
def _columns(real, first: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr):
    """Return which elements of WIDTH columns, from `first` on, belong to real rows and to the head."""
    return real[:, None] & (first + tl.arange(0, WIDTH) < H)[None, :]


@triton.jit
def _load(head, rows, distance, real, H: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Load the two parts of rows of one head; 0 where a row is not real. Without a second part, return the first."""
    left = tl.load(head + _places(rows, distance, 0, LEFT), mask=_columns(real, 0, LEFT, H), other=0.0)
    right = left
    if RIGHT:
        right = tl.load(head + _places(rows, distance, LEFT, RIGHT), mask=_columns(real, LEFT, RIGHT, H), other=0.0)
    return left, right


@triton.jit
def _store(head, rows, distance, real, left, right, H: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    number = head.dtype.element_ty
    tl.store(head + _places(rows, distance, 0, LEFT), left.to(number), mask=_columns(real, 0, LEFT, H))
    if RIGHT:
        tl.store(head + _places(rows, distance, LEFT, RIGHT), right.to(number), mask=_columns(real, LEFT, RIGHT, H))


@triton.jit
def _scores(x, x_right, y, y_right, RIGHT: tl.constexpr):
    """Return the products of all rows of x with all rows of y."""
    out = tl.dot(x, tl.trans(y), input_precision="ieee")
    if RIGHT:
        out = tl.dot(x_right, tl.trans(y_right), out, input_precision="ieee")
    return out


@triton.jit
def _add_product(acc, acc_right, weights, rows, rows_right, RIGHT: tl.constexpr):
    """Return acc + weights @ rows, in two parts."""
    weights = weights.to(rows.dtype)
    acc = tl.dot(weights, rows, acc, input_precision="ieee")
    if RIGHT:
        acc_right = tl.dot(weights, rows_right, acc_right, input_precision="ieee")
    return acc, acc_right


@triton.jit
def _keys_of(low, high, first, rows, t, M: tl.constexpr):
    """Load the key range lowest .. highest of each of M queries from `first` on.

    Also return the keys that any of them sees, begin .. end - 1, and those that all M see, full .. full_end - 1.
    """
    real = rows < t
    last = tl.minimum(first + M, t) - 1
    lowest = tl.load(low + rows, mask=real, other=0)
    highest = tl.load(high + rows, mask=real, other=-1)
    full_end = tl.where(first + M <= t, tl.load(high + first) + 1, 0)
    return lowest, highest, tl.load(low + first), tl.load(high + last) + 1, tl.load(low + last), full_end


@triton.jit
def _visible(scores, lowest, highest, keys):
    """Return scores [M, K], -inf where a query does not see a key."""
    seen = (keys >= lowest) & (keys <= highest)
    return tl.where(seen, scores, -float("inf"))


@triton.jit(do_not_specialize=["t"])
def forward(
    query, key, value, low, high, out, lse, t, scale,
    query_row, query_head, key_row, key_head, value_row, value_head,
    N: tl.constexpr, SHARE: tl.constexpr, H: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute out [t, N, H] and lse [N, t] for M queries and one head; `scale` and lse are in base 2."""
    program = tl.program_id(0)
    head = (program % N).to(tl.int64)  # adjacent programs: the heads of a group share keys in the cache
    first = (program // N) * M
    rows = first + tl.arange(0, M)
    real = rows < t
    q, q_right = _load(query + head * query_head, rows, query_row, real, H, LEFT, RIGHT)
    lowest, highest, begin, end, full, full_end = _keys_of(low, high, first, rows, t, M)
    most = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, LEFT], tl.float32)
    acc_right = tl.zeros([M, RIGHT if RIGHT else 1], tl.float32)
    key += (head // SHARE) * key_head
    value += (head // SHARE) * value_head
    for start in range(begin, end, K):
        keys = start + tl.arange(0, K)
        here = keys < end
        k, k_right = _load(key, keys, key_row, here, H, LEFT, RIGHT)
        scores = _scores(q, q_right, k, k_right, RIGHT) * scale
        if (start < full) | (start + K > full_end):
            scores = _visible(scores, lowest[:, None], highest[:, None], keys[None, :])
        new = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new == -float("inf"), 0.0, new)  # avoids inf - inf in rows that have seen no key yet
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(p, 1)
        v, v_right = _load(value, keys, value_row, here, H, LEFT, RIGHT)
        acc *= shrink[:, None]
        if RIGHT:
            acc_right *= shrink[:, None]
        acc, acc_right = _add_product(acc, acc_right, p, v, v_right, RIGHT)
        most = new
    total = tl.where(real, total, 1.0)
    most = tl.where(real, most, 0.0)
    _store(out + head * H, rows, N * H, real, acc / total[:, None], acc_right / total[:, None], H, LEFT, RIGHT)
    tl.store(lse + head * t + rows, most + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["t"])
def backward_query(
    query, key, value, low, high, out, lse, out_grad, query_grad, delta, t, scale, scale_grad,
    query_row, query_head, key_row, key_head, value_row, value_head, grad_row, grad_head,
    N: tl.constexpr, SHARE: tl.constexpr, H: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute query_grad [t, N, H] and delta [N, t], the sums of out * out_grad, for M queries and one head."""
    program = tl.program_id(0)
    head = (program % N).to(tl.int64)
    first = (program // N) * M
    rows = first + tl.arange(0, M)
    real = rows < t
    q, q_right = _load(query + head * query_head, rows, query_row, real, H, LEFT, RIGHT)
    g, g_right = _load(out_grad + head * grad_head, rows, grad_row, real, H, LEFT, RIGHT)
    o, o_right = _load(out + head * H, rows, N * H, real, H, LEFT, RIGHT)
    along = head * t + rows
    d = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if RIGHT:
        d += tl.sum(o_right.to(tl.float32) * g_right.to(tl.float32), 1)
    tl.store(delta + along, d, mask=real)
    norm = tl.load(lse + along, mask=real, other=0.0)
    lowest, highest, begin, end, full, full_end = _keys_of(low, high, first, rows, t, M)
    acc = tl.zeros([M, LEFT], tl.float32)
    acc_right = tl.zeros([M, RIGHT if RIGHT else 1], tl.float32)
    key += (head // SHARE) * key_head
    value += (head // SHARE) * value_head
    for start in range(begin, end, K):
        keys = start + tl.arange(0, K)
        here = keys < end
        k, k_right = _load(key, keys, key_row, here, H, LEFT, RIGHT)
        v, v_right = _load(value, keys, value_row, here, H, LEFT, RIGHT)
        scores = _scores(q, q_right, k, k_right, RIGHT) * scale
        if (start < full) | (start + K > full_end):
            scores = _visible(scores, lowest[:, None], highest[:, None], keys[None, :])
        p = tl.exp2(scores - norm[:, None])
        scores_grad = p * (_scores(g, g_right, v, v_right, RIGHT) - d[:, None])
        acc, acc_right = _add_product(acc, acc_right, scores_grad, k, k_right, RIGHT)
    _store(query_grad + head * H, rows, N * H, real, acc * scale_grad, acc_right * scale_grad, H, LEFT, RIGHT)


@triton.jit(do_not_specialize=["t", "u"])
def backward_key(
    query, key, value, low, high, first_query, end_query, full_query, full_end_query, lse, delta, out_grad,
    key_grad, value_grad, t, u, scale, scale_grad,
    query_row, query_head, key_row, key_head, value_row, value_head, grad_row, grad_head,
    G: tl.constexpr, SHARE: tl.constexpr, H: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute key_grad and value_grad [u, G, H] for K keys and one key head, over its SHARE query heads."""
    program = tl.program_id(0)
    group = (program % G).to(tl.int64)
    tile = program // G
    keys = tile * K + tl.arange(0, K)
    here = keys < u
    k, k_right = _load(key + group * key_head, keys, key_row, here, H, LEFT, RIGHT)
    v, v_right = _load(value + group * value_head, keys, value_row, here, H, LEFT, RIGHT)
    begin = tl.load(first_query + tile)
    end = tl.load(end_query + tile)
    full = tl.load(full_query + tile)
    full_end = tl.load(full_end_query + tile)
    tiles = (end - begin + M - 1) // M
    dk = tl.zeros([K, LEFT], tl.float32)
    dk_right = tl.zeros([K, RIGHT if RIGHT else 1], tl.float32)
    dv = tl.zeros([K, LEFT], tl.float32)
    dv_right = tl.zeros([K, RIGHT if RIGHT else 1], tl.float32)
    for turn in range(tiles * SHARE):  # one loop over heads and tiles, so that loads are pipelined across both
        head = group * SHARE + turn // tiles
        start = begin + (turn % tiles) * M
        rows = start + tl.arange(0, M)
        real = rows < end
        q, q_right = _load(query + head * query_head, rows, query_row, real, H, LEFT, RIGHT)
        g, g_right = _load(out_grad + head * grad_head, rows, grad_row, real, H, LEFT, RIGHT)
        along = head * t + rows
        norm = tl.load(lse + along, mask=real, other=0.0)
        d = tl.load(delta + along, mask=real, other=0.0)
        scores = _scores(k, k_right, q, q_right, RIGHT) * scale
        if (start < full) | (start + M > full_end):
            lowest = tl.load(low + rows, mask=real, other=0)
            highest = tl.load(high + rows, mask=real, other=-1)
            scores = _visible(scores, lowest[None, :], highest[None, :], keys[:, None])
        p = tl.exp2(scores - norm[None, :])
        dv, dv_right = _add_product(dv, dv_right, p, g, g_right, RIGHT)
        scores_grad = p * (_scores(v, v_right, g, g_right, RIGHT) - d[None, :])
        dk, dk_right = _add_product(dk, dk_right, scores_grad, q, q_right, RIGHT)
    _store(key_grad + group * H, keys, G * H, here, dk * scale_grad, dk_right * scale_grad, H, LEFT, RIGHT)
    _store(value_grad + group * H, keys, G * H, here, dv, dv_right, H, LEFT, RIGHT)
