"""draft"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np

from megatron_ext.context_parallel.assignment import Pieces
from megatron_ext.context_parallel.intervals import Int64, pairs_before
from megatron_ext.layout import PackedLayout

BULK = 32


def seen(x, reach):
    if reach is None or x <= reach + 1:
        return x * (x + 1) // 2
    return (reach + 1) * (reach + 2) // 2 + (x - reach - 1) * (reach + 1)


class Filler:
    def __init__(self, layout, cp, reach, tol):
        self.layout, self.cp, self.reach = layout, cp, reach
        n = layout.lengths
        self.C = C = layout.tokens // cp
        self.F = lambda x: seen(x, reach)
        allp = pairs_before(n, reach)
        self.rem_pairs = int(allp.sum())
        self.P = self.rem_pairs / cp
        self.cap = tol * self.P
        big = np.flatnonzero(n > max(C // BULK, 1))
        items = sorted((self.F(x) / x, x, s, 0, x) for s, x in zip(big.tolist(), n[big].tolist()))
        self.items = [i for i in items if i[1] < C]
        self.long = [i for i in items if i[1] >= C]
        small = np.flatnonzero(n <= max(C // BULK, 1))
        small = small[np.argsort(n[small], kind="stable")]
        self.small = small
        self.cumT = np.concatenate([[0], np.cumsum(n[small])]).tolist()
        self.cumF = np.concatenate([[0], np.cumsum(allp[small])]).tolist()
        self.v0, self.v1 = 0, self.cumT[-1]
        self.owner = np.full(layout.segments, -1, dtype=np.int64)
        self.cut = []  # (seg, lo, hi, rank)

    # ---- bulk
    def G(self, v):
        j = bisect_right(self.cumT, v) - 1
        return self.cumF[j] + self.F(v - self.cumT[j])

    def bulk_take(self, a, b, rank):
        """virtual [a,b) -> rank"""
        if a >= b:
            return
        j0 = bisect_right(self.cumT, a) - 1
        j1 = bisect_right(self.cumT, b) - 1
        o0, o1 = a - self.cumT[j0], b - self.cumT[j1]
        if j0 == j1:
            self.cut.append((int(self.small[j0]), o0, o1, rank))
            return
        if o0:
            self.cut.append((int(self.small[j0]), o0, self.cumT[j0 + 1] - self.cumT[j0], rank))
            j0 += 1
        if o1:
            self.cut.append((int(self.small[j1]), 0, o1, rank))
        self.owner[self.small[j0:j1]] = rank

    def bulk_fill(self, k, p, rank):
        """k tokens with about p pairs; returns pairs taken"""
        lo, hi = 0, k
        v0, v1 = self.v0, self.v1
        G = self.G
        base = G(v1) - G(v0)

        def got(k1):
            return base - (G(v1 - (k - k1)) - G(v0 + k1))

        while lo < hi:
            mid = (lo + hi) // 2
            if got(mid) > p:
                lo = mid + 1
            else:
                hi = mid
        k2 = k - lo
        # snap
        j = bisect_left(self.cumT, v1 - k2)
        best = None
        for i in (j, j - 1):
            if i >= 0 and v1 >= self.cumT[i] >= v0:
                kk = v1 - self.cumT[i]
                if kk <= k and (best is None or abs(kk - k2) < abs(best - k2)):
                    best = kk
        if best is not None:
            k2 = best
        g = got(k - k2)
        self.bulk_take(v1 - k2, v1, rank)
        self.bulk_take(v0, v0 + k - k2, rank)
        self.v1, self.v0 = v1 - k2, v0 + k - k2
        return g

    # ---- items
    def pr(self, a, b):
        return self.F(b) - self.F(a)

    def give(self, s, a, b, rank):
        if a < b:
            self.cut.append((s, a, b, rank))

    def put(self, s, a, b):
        if a < b:
            insort(self.long if b - a >= self.C else self.items, (self.pr(a, b) / (b - a), b - a, s, a, b))

    def rank(self, r):
        C, cap = self.C, self.cap
        ranks_left = self.cp - r
        goal = self.rem_pairs / ranks_left
        if ranks_left == 1:
            for _, n, s, a, b in self.items + self.long:
                self.give(s, a, b, r)
            self.bulk_take(self.v0, self.v1, r)
            return
        if not self.items and not self.long:
            got = self.bulk_fill(C, goal, r)
        else:
            if self.long and self.long[-1][0] * C <= cap:
                d, n, s, a, b = self.long.pop()
                k1 = C // 2
                if n == C: k1 = C
                k2 = C - k1
                self.give(s, a, a + k1, r)
                self.give(s, b - k2, b, r)
                self.put(s, a + k1, b - k2)
                got = self.pr(a, a + k1) + self.pr(b - k2, b)
            elif self.long:
                got = self.heavy(r, self.long)
            elif self.items[-1][0] * self.items[-1][1] + self.lightest(C - self.items[-1][1]) > cap:
                got = self.heavy(r, self.items)
            else:
                got = self.light(r, goal)
        self.rem_pairs -= got

    def lightest(self, k):
        x = min(k, self.v1 - self.v0)
        g = self.G(self.v0 + x) - self.G(self.v0)
        k -= x
        for d, m, *_ in self.items[:-1]:
            if k <= 0: break
            g += d * min(m, k)
            k -= m
        return g

    def heavy(self, r, pool):
        C, cap = self.C, self.cap
        d, n, s, a, b = pool.pop()
        # filler prefix
        sofar, tok = 0, 0
        bulk = self.v1 - self.v0
        lights = []
        tok = bulk
        order = sorted(self.items + self.long) if self.long else self.items
        for it in order:
            if tok >= C:
                break
            lights.append(it)
            tok += it[1]
        def filler(k):
            x = min(k, bulk)
            g = self.G(self.v0 + x) - self.G(self.v0)
            k -= x
            for _, m, _, la, lb in lights:
                if k <= 0:
                    break
                x = min(k, m)
                g += self.pr(la, la + x)
                k -= x
            return g + self.pr(a, a + k)
        lo, hi = 0, min(C, n)
        while lo < hi:
            mid = (lo + hi + 1) // 2
            if self.pr(b - mid, b) + filler(C - mid) <= cap:
                lo = mid
            else:
                hi = mid - 1
        k2 = lo
        got = self.pr(b - k2, b) + filler(C - k2)
        self.give(s, b - k2, b, r)
        b -= k2
        k = C - k2
        x = min(k, bulk)
        self.bulk_take(self.v0, self.v0 + x, r)
        self.v0 += x
        k -= x
        for it in lights:
            if k <= 0: break
            d_, m, s_, la, lb = it
            (self.long if m >= C else self.items).remove(it)
            x = min(k, m)
            self.give(s_, la, la + x, r)
            self.put(s_, la + x, lb)
            k -= x
        if k > 0:
            self.give(s, a, a + k, r)
            a += k
        self.put(s, a, b)
        return got

    def light(self, r, goal):
        C, cap = self.C, self.cap
        d, n, s, a, b = self.items.pop()
        self.give(s, a, b, r)
        k, got = C - n, self.pr(a, b)
        while k:
            bulk = self.v1 - self.v0
            want = (goal - got) / k
            i = bisect_left(self.items, (want,))
            lo, hi = i - 1, i
            best = None
            while lo >= 0 and self.items[lo][1] > k: lo -= 1
            while hi < len(self.items) and self.items[hi][1] > k: hi += 1
            c = []
            if lo >= 0: c.append(lo)
            if hi < len(self.items) and got + self.items[hi][0] * self.items[hi][1] <= cap: c.append(hi)
            if bulk >= k:
                top = self.G(self.v1) - self.G(self.v1 - k)
                if not c or goal - got <= top:
                    return got + self.bulk_fill(k, goal - got, r)
            elif not c and bulk:
                got += self.bulk_fill(bulk, goal - got, r)
                k -= bulk
                continue
            if not c:
                x = self.cut_one(r, k, got)
                got += x[0]
                k -= x[1]
                continue
            best = c[0]
            if len(c) == 2 or c[0] >= i:
                j = c[-1]
                d, n = self.items[j][:2]
                rest = k - n
                x = min(rest, bulk)
                light = self.G(self.v0 + x) - self.G(self.v0) + (rest - x) * self.items[0][0]
                if len(c) == 1 or got + d * n + light <= goal:
                    best = j
            d, n, s, a, b = self.items.pop(best)
            self.give(s, a, b, r)
            k -= n
            got += self.pr(a, b)
        return got

    def cut_one(self, r, k, got):
        """k tokens from one item"""
        C, cap = self.C, self.cap
        left = self.cp - r - 1
        i = bisect_left(self.items, ((self.rem_pairs / (left + 1) - got) / k,))
        low = self.rem_pairs - got - cap * left
        tokens_after = left * C
        best = None
        for j in range(max(i - 6, 0), min(i + 6, len(self.items))):
            d, n, s, a, b = self.items[j]
            if n <= k:
                key = (a + 100 * max(got + d * n - cap, 0) / self.P * C,)
                if best is None or key < best[0]:
                    best = (key, j, n, 0)
                continue
            rest = (self.rem_pairs - got - self.pr(a, b)) / max(tokens_after + k - n, 1)  # density of others

            def ok(k1, k2):
                mine = self.pr(a, a + k1) + self.pr(b - k2, b)
                over = max(got + mine - cap, 0) + max(low - mine, 0)
                m = n - k
                if left and m:
                    over += max(self.pr(a + k1, b - k2) * min(1, C / m) + max(C - m, 0) * rest - cap, 0)
                return over
            opts = []
            opts.append((k, 0, (a if a else 0) + k + (a if n > k else 0)))
            opts.append((0, k, b - k + a))
            lo, hi = 0, k
            for q in range(1, 8):
                k2 = k * q // 8
                opts.append((k - k2, k2, b - k + (a + k - k2)))
            for k1, k2, c in opts:
                key = (c + 100 * ok(k1, k2) / self.P * C, )
                if best is None or key < best[0]:
                    best = (key, j, k1, k2)
        _, j, k1, k2 = best
        d, n, s, a, b = self.items.pop(j)
        self.give(s, a, a + k1, r)
        self.give(s, b - k2, b, r)
        self.put(s, a + k1, b - k2)
        return self.pr(a, a + k1) + self.pr(b - k2, b), k1 + k2


def balanced(layout: PackedLayout, cp_size: int, reach: int | None = None, tol: float = 1.08) -> Pieces:
    f = Filler(layout, cp_size, reach, tol)
    for r in range(cp_size):
        f.rank(r)
    borders = layout.cu_seqlens.astype(np.int64)
    whole = np.flatnonzero(f.owner >= 0)
    cut = np.array(f.cut, dtype=np.int64).reshape(-1, 4)
    seg = np.concatenate([whole, cut[:, 0]])
    start = np.concatenate([borders[whole], borders[cut[:, 0]] + cut[:, 1]])
    rank = np.concatenate([f.owner[whole], cut[:, 3]])
    order = np.argsort(start, kind="stable")
    seg, start, rank = seg[order], start[order], rank[order]
    keep = np.append(True, (seg[1:] != seg[:-1]) | (rank[1:] != rank[:-1]))
    seg, start, rank = seg[keep], start[keep], rank[keep]
    return Pieces(seg, start, np.append(start[1:], layout.tokens), rank)
