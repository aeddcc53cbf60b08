"""Plan context parallelism in which ranks exchange only the keys that are needed.

Any assignment of tokens to ranks is valid, because every layer but attention works token by token. A rank
holds *pieces* of segments; a piece [a, b) of a segment that starts at s needs the keys and values of [s, b),
and its own queries see the last of them (bottom-right causal). Segments of 4, 7 and 1 tokens on two ranks:

    token      0  1  2  3  4  5  6  7  8  9 10 11
    segment    0  0  0  0  1  1  1  1  1  1  1  2      cu_seqlens = [0, 4, 11, 12]
    rank       0  0  0  0  0  0  1  1  1  1  1  1      policy "contiguous"

    rank 0     pieces [0,4) [4,6)            local rows 0..5 = tokens 0 1 2 3 4 5
               cu_seqlens_q  = [0, 4, 6]     fetches nothing
               cu_seqlens_kv = [0, 4, 6]     kv_rows = 0 1 2 3 | 4 5
    rank 1     pieces [6,11) [11,12)         local rows 0..5 = tokens 6 7 8 9 10 11
               cu_seqlens_q  = [0, 5, 6]     fetches tokens 4 5 from rank 0: local rows 6 7
               cu_seqlens_kv = [0, 7, 8]     kv_rows = 6 7 0 1 2 3 4 | 5

With a sliding window of `left_window` tokens a piece needs only [max(s, a - left_window), b).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from megatron_ext.arrays import Bool, Int32, Int64, ranges
from megatron_ext.context_parallel import assignment
from megatron_ext.context_parallel.assignment import Pieces, Policy
from megatron_ext.errors import UserError
from megatron_ext.layout import PackedLayout, check_tokens, segment_pairs

# The cost of moving a row, in attention pairs, forward and backward together. A pair is 14 N H = 28,672 operations
# of a layer of 32 heads of 64 (72 ps at 400 TFLOP/s); a row is 2 KiB of keys, values and their gradients for 4 heads
# in bfloat16 (4.6 ns at 450 GB/s, one NVLink domain).
PAIRS_PER_ROW = 64
EVEN = 1.03  # ranks count as even if the slowest has up to this multiple of the mean pairs
UNEVEN = 1.10  # `auto` avoids plans whose slowest rank has more than this multiple
FEW = 200  # a contiguous plan that is even and moves up to T/200 rows is not compared with others


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The part of one rank: t = T/cp rows of its own, one uneven all-to-all, one local attention call."""

    cu_seqlens_q: Int32  # int32 [pieces+1], borders of its pieces among its rows, which are `CPPlan.rows[rank]`
    cu_seqlens_kv: Int32  # int32 [pieces+1], borders of their key ranges among `kv_rows`
    # for each rank q, int64, the indices of the rows that this rank sends to q, ascending; empty for itself
    rows_sent: tuple[Int64, ...]
    # for each rank q, int64, the tokens that this rank receives from q, ascending; empty for itself
    tokens_received: tuple[Int64, ...]
    # int64 [u], for each key row of the local call, its index into the concatenation of the rank's own rows and those
    # received from rank 0, 1, ... A row needed by two pieces is received once and occurs here twice.
    kv_rows: Int64
    is_local: Bool  # bool [pieces], `CPPlan.is_local` of its pieces


class _Transfers(NamedTuple):
    """Tokens [start, end) that are sent between ranks, int64 arrays; `piece` is the sender's piece."""

    piece: Int64
    source: Int64
    destination: Int64
    start: Int64
    end: Int64


@dataclass(frozen=True, eq=False)
class CPPlan:
    """An assignment of tokens to ranks and the keys that each rank needs; created by `plan`."""

    layout: PackedLayout  # the segments of the T tokens
    cp_size: int  # the number of ranks; each holds T/cp tokens
    policy: Policy  # the assignment that was chosen (never "auto")
    left_window: int | None  # the most tokens before itself that a token sees; None for its whole segment
    pieces: Pieces  # the tokens of each rank
    row_cost: float = PAIRS_PER_ROW  # cost of moving a row, in attention pairs

    @cached_property
    def rows(self) -> tuple[Int64, ...]:
        """rows[r]: int64 [T/cp], the tokens of rank r, ascending."""
        lengths = self.pieces.end - self.pieces.start
        pieces = map(self.pieces_of, range(self.cp_size))
        return tuple(ranges(self.pieces.start[index], lengths[index]) for index in pieces)

    @cached_property
    def pairs(self) -> Int64:
        """int64 [cp]: attention pairs (query, visible key) of each rank."""
        up_to_end = segment_pairs(self.pieces.end - self._segment_start, self.left_window)
        before_start = segment_pairs(self.pieces.start - self._segment_start, self.left_window)
        return _sums(self.pieces.rank, up_to_end - before_start, self.cp_size)

    @cached_property
    def rows_moved(self) -> Int64:
        """int64 [cp, cp]: rows of keys and values that [source, destination] exchange; 0 on the diagonal."""
        moved = self._transfers
        cell = moved.source * self.cp_size + moved.destination
        return _sums(cell, moved.end - moved.start, self.cp_size**2).reshape(self.cp_size, self.cp_size)

    @property
    def cost(self) -> float:
        """Pairs of the slowest rank, plus `row_cost` for each row that the busiest rank sends or receives.

        The slowest rank counts as at least `EVEN` times the mean: below that, moving fewer rows matters more.
        """
        return float(max(self.pairs.max(), EVEN * self.pairs.mean()) + self.exchange_cost)

    @property
    def exchange_cost(self) -> float:
        """Cost of the rows that the busiest rank sends or receives, in attention pairs."""
        busiest = max(self.rows_moved.sum(axis=0).max(), self.rows_moved.sum(axis=1).max())
        return float(self.row_cost * busiest)

    def under(self, layout: PackedLayout, left_window: int | None) -> "CPPlan":
        """Plan the same assignment for layers with other segments or another left window."""
        pieces = assignment.cut_at_segments(layout, self.pieces.start, self.pieces.rank)
        return replace(self, layout=layout, left_window=left_window, pieces=pieces)

    def pieces_of(self, rank: int) -> Int64:
        """Return the indices of the pieces of one rank, int64, by position."""
        return np.flatnonzero(self.pieces.rank == rank)

    @cached_property
    def _segment_start(self) -> Int64:
        return self.layout.cu_seqlens[self.pieces.segment].astype(np.int64)

    @cached_property
    def key_start(self) -> Int64:
        """int64 [P]: the first key that each piece sees."""
        if self.left_window is None:
            return self._segment_start
        return np.maximum(self._segment_start, self.pieces.start - self.left_window)

    @property
    def is_local(self) -> Bool:
        """bool [P]: whether the queries of each piece see only keys of its own rank.

        Neighbouring pieces of a segment are on different ranks, so a local piece sees no keys before its own.
        """
        return self.key_start == self.pieces.start

    @cached_property
    def _transfers(self) -> _Transfers:
        """All rows sent, ordered by destination, then by position.

        Tokens between two pieces of a rank in one segment belong to other ranks. A piece fetches those it sees after
        the rank's previous piece; the earlier ones are fetched for that piece. Rank 0 of a zigzag on two ranks:

            rank     0 0 1 1 1 1 0 0        its first piece sees no token before itself;
            fetched      ^ ^ ^ ^            its second one sees [0, 6), of which its rank lacks [2, 6)
        """
        order = np.argsort(self.pieces.rank, kind="stable")
        rank = self.pieces.rank[order]
        segment = self.pieces.segment[order]
        low = self.key_start[order]
        high = self.pieces.start[order]
        follows = np.flatnonzero((np.diff(rank) == 0) & (np.diff(segment) == 0)) + 1
        low[follows] = np.maximum(low[follows], self.pieces.end[order[follows - 1]])
        wanted = np.flatnonzero(low < high)
        query, piece, start, end = _overlaps(low[wanted], high[wanted], self.pieces.start, self.pieces.end)
        return _Transfers(piece, self.pieces.rank[piece], rank[wanted[query]], start, end)

    def of_rank(self, rank: int) -> RankPlan:
        """Compute the rows that a rank sends, receives and attends to."""
        pieces = self.pieces_of(rank)
        start = self.pieces.start[pieces]
        end = self.pieces.end[pieces]
        key_start = self.key_start[pieces]
        cu_seqlens_q = np.concatenate([[0], np.cumsum(end - start)])
        coming = self._in_order(self._transfers.destination == rank, self._transfers.source)
        going = self._in_order(self._transfers.source == rank, self._transfers.destination)
        sender = np.searchsorted(pieces, going.piece)
        going_rows = ranges(going.start - start[sender] + cu_seqlens_q[sender], going.end - going.start)
        coming_tokens = ranges(coming.start, coming.end - coming.start)
        cu_seqlens_kv = np.concatenate([[0], np.cumsum(end - key_start)])
        check_tokens(int(cu_seqlens_kv[-1]))  # keys that several pieces see count once for each
        # the intervals of tokens held here, its pieces before received ones, and the local row at which each starts
        starts = np.concatenate([start, coming.start])
        ends = np.concatenate([end, coming.end])
        local_row = np.cumsum(ends - starts) - (ends - starts)
        order = np.argsort(starts, kind="stable")
        _, interval, first, last = _overlaps(key_start, end, starts[order], ends[order])
        return RankPlan(
            cu_seqlens_q=cu_seqlens_q.astype(np.int32),
            cu_seqlens_kv=cu_seqlens_kv.astype(np.int32),
            rows_sent=tuple(np.split(going_rows, np.cumsum(self.rows_moved[rank])[:-1])),
            tokens_received=tuple(np.split(coming_tokens, np.cumsum(self.rows_moved[:, rank])[:-1])),
            kv_rows=ranges(local_row[order][interval] + first - starts[order][interval], last - first),
            is_local=self.is_local[pieces],
        )

    def _in_order(self, chosen: Bool, peer: Int64) -> _Transfers:
        """Sort the chosen transfers by peer, then by position."""
        index = np.flatnonzero(chosen)
        index = index[np.argsort(peer[index], kind="stable")]
        return _Transfers(*(column[index] for column in self._transfers))


def plan(
    layout: PackedLayout,
    cp_size: int,
    policy: str = "auto",
    *,
    left_window: int | None = None,
    row_cost: float = PAIRS_PER_ROW,
) -> CPPlan:
    """Assign the T tokens of a layout to the context-parallel ranks.

    Args:
        layout: the segments; several rows may be laid end to end.
        cp_size: the number of ranks, >= 1; T must be divisible by it.
        policy: a name of `Policy`; "auto" chooses the cheapest plan whose slowest rank stays within `UNEVEN`.
        left_window: for sliding-window layers, how many tokens before itself a token sees, >= 0; None for all.
        row_cost: cost of moving a row of keys and values, in attention pairs; a higher cost moves fewer rows.

    Raises:
        UserError: an unknown policy, or T not divisible by cp_size.
    """
    if layout.tokens % cp_size:
        raise UserError(
            f"seq_length: got {layout.tokens} tokens per micro-batch, needs a multiple of {cp_size} "
            "(context_parallel_size); change one of the two"
        )
    if policy not in list(Policy):
        raise UserError(f"cp_policy: got {policy!r}, needs one of {', '.join(Policy)}")
    first = CPPlan(layout, cp_size, Policy.CONTIGUOUS, left_window, assignment.contiguous(layout, cp_size), row_cost)
    if policy == Policy.CONTIGUOUS or (policy == Policy.AUTO and _good_enough(first)):
        return first
    if policy == Policy.BALANCED:
        return _balanced(first)
    zigzag = replace(first, policy=Policy.ZIGZAG, pieces=assignment.zigzag(layout, cp_size))
    if policy == Policy.ZIGZAG:
        return zigzag
    plans = [first, zigzag, _balanced(first)]
    even = [candidate for candidate in plans if candidate.pairs.max() <= UNEVEN * candidate.pairs.mean()]
    return min(even or plans, key=attrgetter("cost"))


def _balanced(first: CPPlan) -> CPPlan:
    """Return the contiguous plan if it is good enough, else the cheapest of the plans that keep their tolerance.

    The assignment is greedy and may miss its tolerance, so the plan's actual pairs are compared. A larger tolerance
    saves rows and costs pairs: it is tried while each plan is cheaper and moves no more rows than the one before, and
    while the rows cost more than the pairs that the next tolerance may add.
    """
    if _good_enough(first):
        return replace(first, policy=Policy.BALANCED)
    mean = first.pairs.mean()
    candidates = []
    best: CPPlan | None = None
    for tolerance in assignment.TOLERANCES:
        if best is not None and best.exchange_cost <= tolerance * mean - max(best.pairs.max(), EVEN * mean):
            break
        pieces = assignment.Balancer(first.layout, first.cp_size, first.left_window, tolerance).assign()
        candidate = replace(first, policy=Policy.BALANCED, pieces=pieces)
        candidates.append(candidate)
        if candidate.pairs.max() <= (tolerance + 0.005) * mean:
            if best is not None and not (
                candidate.cost < best.cost and candidate.rows_moved.sum() <= best.rows_moved.sum()
            ):
                break
            best = candidate
    return best or min(candidates, key=attrgetter("cost"))


def _good_enough(plan: CPPlan) -> bool:
    """Return whether ranks are even and almost nothing is moved, so that no other plan is needed."""
    few = plan.rows_moved.sum() * FEW <= plan.layout.tokens
    return bool(few and plan.pairs.max() <= EVEN * plan.pairs.mean())


def _sums(index: Int64, values: Int64, length: int) -> Int64:
    """Sum the values at each index; int64 [length], exact below 2^53, as bincount adds in float64."""
    return np.bincount(index, weights=values, minlength=length).astype(np.int64)


def _overlaps(low: Int64, high: Int64, starts: Int64, ends: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Find the parts that intervals [low, high) share with disjoint intervals [start, end) sorted by position.

    Returns:
        (query, interval, from, to), int64 each: the part [from, to) of the query lies in that interval. Ordered by
        query, then by position; empty parts are left out.
    """
    first = np.searchsorted(ends, low, side="right")
    counts = np.maximum(np.searchsorted(starts, high, side="left") - first, 0)
    query = np.repeat(np.arange(len(low), dtype=np.int64), counts)
    interval = ranges(first.astype(np.int64), counts)
    return query, interval, np.maximum(low[query], starts[interval]), np.minimum(high[query], ends[interval])
