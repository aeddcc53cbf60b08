"""Divide documents into training, validation and test."""

from __future__ import annotations

import math
from fractions import Fraction

from megatron_ext.errors import UserError


def split_documents(documents: int, split: str) -> tuple[range, range, range]:
    """Divide documents into contiguous ranges for train, validation and test, as Megatron-LM's --split "98,2,0".

    Shares may have any sum; missing ones are 0. Every positive share gets at least one document.

        split_documents(100, "98,2,0") == (range(0, 98), range(98, 100), range(100, 100))

    Raises:
        UserError: shares that are not numbers, negative, all zero or more than three; or too few documents.
    """
    shares = parse_shares(split)
    wanted = sum(share > 0 for share in shares)
    if documents < wanted:
        raise UserError(
            f"split: {split!r} asks for {wanted} parts, but the data set has {documents} documents; "
            'set unwanted shares to 0, such as --split "1,0,0"'
        )
    ranges = []
    start, before = 0, Fraction(0)
    for share in shares:
        stop = start
        before += share
        if share > 0:
            wanted -= 1
            # Rounded to the nearest, but leaving at least one document here and for each share that follows.
            stop = min(
                max(math.floor(documents * before / sum(shares) + Fraction(1, 2)), start + 1),
                documents - wanted,
            )
        ranges.append(range(start, stop))
        start = stop
    return ranges[0], ranges[1], ranges[2]


def parse_shares(split: str) -> list[Fraction]:
    """Parse the shares of training, validation and test; missing ones are 0.

    Raises:
        UserError: as `split_documents`.
    """
    try:
        shares = [Fraction(repr(float(part))) for part in split.split(",")]  # via float: 1e999999999 would not end
    except ValueError:
        shares = []
    if len(shares) > 3 or min(shares, default=-1) < 0 or not any(shares):
        raise UserError(
            f"split: got {split!r}; needs one to three shares >= 0 (train, validation, test), such as 98,2,0"
        )
    return shares + [Fraction(0)] * (3 - len(shares))
