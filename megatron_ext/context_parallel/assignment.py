"""Assign pieces of segments to ranks, by policy."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.layout import PackedLayout


class Policy(StrEnum):
    """How tokens are assigned to ranks; values of `--cp-policy`."""

    AUTO = "auto"
    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    BALANCED = "balanced"


@dataclass(frozen=True, eq=False)
class Pieces:
    """P pieces that cover every token once, by position; neighbouring pieces of a segment are on different ranks."""

    segment: Int64  # int64 [P], the segment of each piece
    # start, end: int64 [P], its tokens [start, end)
    start: Int64
    end: Int64
    rank: Int64  # int64 [P], the rank that holds it


def contiguous(layout: PackedLayout, cp_size: int) -> Pieces:
    """Assign the tokens [r T/cp, (r+1) T/cp) to rank r."""
    share = layout.tokens // cp_size
    return cut_at_segments(layout, np.arange(cp_size, dtype=np.int64) * share, np.arange(cp_size, dtype=np.int64))


def zigzag(layout: PackedLayout, cp_size: int) -> Pieces:
    """Assign chunks r and 2cp-1-r of 2cp to rank r; if T/cp is odd, the second one has one more token.

    With one segment of T tokens, all ranks get nearly the same number of pairs.
    """
    share = layout.tokens // cp_size
    front = share // 2
    ranks = np.arange(cp_size, dtype=np.int64)
    starts = np.concatenate([ranks * front, cp_size * front + ranks * (share - front)])
    owners = np.concatenate([ranks, ranks[::-1]])
    keep = np.append(np.diff(starts) > 0, True)
    return cut_at_segments(layout, starts[keep], owners[keep])


def cut_at_segments(layout: PackedLayout, starts: Int64, owners: Int64) -> Pieces:
    """Cut intervals that begin at `starts` (sorted, the first at 0) and belong to `owners` into pieces of segments.

    segments of 4 and 3 tokens    [0 1 2 3][4 5 6]
    starts 0 2, owners 0 1        [0 0][1 1][1 1 1]        pieces [0,2) [2,4) [4,7)
    """
    changes = np.append(True, np.diff(owners) != 0)  # join neighbours of the same owner
    starts, owners = starts[changes], owners[changes]
    borders = layout.cu_seqlens.astype(np.int64)
    border = np.searchsorted(borders, starts)
    inside = np.flatnonzero(borders[border] != starts)  # the starts that cut a segment; the others are borders already
    start = np.insert(borders[:-1], border[inside], starts[inside])
    opens = np.ones(len(start), dtype=np.int64)  # 1 for the first piece of each segment; their sum counts segments
    opens[border[inside] + np.arange(len(inside))] = 0
    first = np.searchsorted(start, starts)
    rank = np.repeat(owners, np.diff(np.append(first, len(start))))
    return Pieces(np.cumsum(opens) - 1, start, np.append(start[1:], layout.tokens), rank)
