"""Pieces: which rank holds which interval of which segment, by each of the policies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.layout import PackedLayout


class Policy(StrEnum):
    """How tokens are shared out over the ranks."""

    AUTO = "auto"
    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    BALANCED = "balanced"


@dataclass(frozen=True, eq=False)
class Pieces:
    """Every token once: int64 [P] arrays, sorted by position; piece [start, end) is one segment's, one rank's."""

    segment: Int64
    start: Int64
    end: Int64
    rank: Int64


def contiguous(layout: PackedLayout, cp_size: int) -> Pieces:
    """Rank r holds the tokens [r T/cp, (r+1) T/cp)."""
    share = layout.tokens // cp_size
    return cut_at_segments(layout, np.arange(cp_size, dtype=np.int64) * share, np.arange(cp_size, dtype=np.int64))


def zigzag(layout: PackedLayout, cp_size: int) -> Pieces:
    """Rank r holds chunks r and 2cp-1-r of the T tokens; of an odd T/cp, the back chunk has one token more."""
    share = layout.tokens // cp_size
    front = share // 2
    ranks = np.arange(cp_size, dtype=np.int64)
    starts = np.concatenate([ranks * front, cp_size * front + ranks * (share - front)])
    owners = np.concatenate([ranks, ranks[::-1]])
    keep = np.append(np.diff(starts) > 0, True)
    return cut_at_segments(layout, starts[keep], owners[keep])


def cut_at_segments(layout: PackedLayout, starts: Int64, owners: Int64) -> Pieces:
    """Pieces of intervals that begin at `starts` (sorted, the first at 0) and belong to `owners`."""
    starts = starts[np.append(True, np.diff(owners) != 0)]
    owners = owners[np.append(True, np.diff(owners) != 0)]
    borders = layout.cu_seqlens.astype(np.int64)
    place = np.searchsorted(borders, starts)
    inside = np.flatnonzero(borders[place] != starts)
    start = np.insert(borders[:-1], place[inside], starts[inside])
    opens = np.ones(len(start), dtype=np.int64)
    opens[place[inside] + np.arange(len(inside))] = 0
    first = np.searchsorted(start, starts)
    rank = np.repeat(owners, np.diff(np.append(first, len(start))))
    return Pieces(np.cumsum(opens) - 1, start, np.append(start[1:], layout.tokens), rank)
