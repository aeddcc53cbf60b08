"""The lower bound on rows moved: no assignment of all beats it."""

from itertools import combinations

import pytest

from benchmarks.lower_bound import fewest_rows
from megatron_ext.layout import PackedLayout, build_layout


def rows_and_balance(layout: PackedLayout, first: tuple[int, ...]) -> tuple[int, float]:
    """Count by hand what two ranks move, of which one holds the tokens of `first`."""
    ranks = [set(first), set(range(layout.tokens)) - set(first)]
    rows, pairs = 0, []
    for held in ranks:
        seen, count = set(), 0
        for start, end in zip(layout.cu_seqlens[:-1].tolist(), layout.cu_seqlens[1:].tolist(), strict=True):
            own = [token for token in range(start, end) if token in held]
            count += sum(token - start + 1 for token in own)
            seen |= set(range(start, max(own) + 1)) if own else set()
        rows += len(seen - held)
        pairs.append(count)
    return rows, max(pairs) / (sum(pairs) / 2)


@pytest.mark.parametrize("ends", [(), (2,), (5,), (9,), (1, 2, 3), (3, 6), (4, 5)])
def test_no_assignment_of_ten_tokens_to_two_ranks_moves_fewer_rows(ends: tuple[int, ...]) -> None:
    """Of its balance, which is rounded."""
    layout = build_layout(10, ends, 10)
    tried = {rows_and_balance(layout, first) for first in combinations(range(10), 5)}
    assert all(fewest_rows(layout, 2, balance) <= rows for rows, balance in tried)


def test_it_is_reached_by_one_segment_whose_ranks_need_not_have_as_many_tokens_of_it() -> None:
    # 8 tokens of one segment, and single tokens beside it: the last ones go to one rank, with the lightest
    layout = build_layout(16, list(range(8, 16)), 16)
    tried = [rows_and_balance(layout, first) for first in combinations(range(16), 8)]
    assert fewest_rows(layout, 2, 1.1) == min(rows for rows, balance in tried if balance <= 1.1) > 0
