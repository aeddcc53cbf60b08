"""The lower bound on rows moved: no assignment of all beats it."""

import functools
from itertools import combinations, product

import pytest

from benchmarks.lower_bound import fewest_rows, least_cost
from megatron_ext.layout import PackedLayout, build_layout


def rows_and_balance(layout: PackedLayout, first: tuple[int, ...]) -> tuple[int, float]:
    """Count by hand what two ranks move, of which one holds the tokens of `first`."""
    ranks = [set(first), set(range(layout.tokens)) - set(first)]
    rows = 0
    pairs = []
    for held in ranks:
        seen = set()
        count = 0
        for start, end in zip(layout.cu_seqlens[:-1].tolist(), layout.cu_seqlens[1:].tolist(), strict=True):
            held_tokens = [token for token in range(start, end) if token in held]
            count += sum(token - start + 1 for token in held_tokens)
            seen |= set(range(start, max(held_tokens) + 1)) if held_tokens else set()
        rows += len(seen - held)
        pairs.append(count)
    return rows, max(pairs) / (sum(pairs) / 2)


@pytest.mark.parametrize("ends", [(), (2,), (5,), (9,), (1, 2, 3), (3, 6), (4, 5)])
def test_no_assignment_of_ten_tokens_to_two_ranks_moves_fewer_rows(ends: tuple[int, ...]) -> None:
    """The bound holds among assignments of the same balance, which is rounded."""
    layout = build_layout(10, ends, 10)
    tried = {rows_and_balance(layout, first) for first in combinations(range(10), 5)}
    assert all(fewest_rows(layout, 2, balance) <= rows for rows, balance in tried)


def test_it_is_reached_by_one_segment_whose_ranks_need_not_have_as_many_tokens_of_it() -> None:
    # 8 tokens of one segment, and single tokens beside it: the last ones go to one rank, with the lightest
    layout = build_layout(16, list(range(8, 16)), 16)
    tried = [rows_and_balance(layout, first) for first in combinations(range(16), 8)]
    assert fewest_rows(layout, 2, 1.1) == min(rows for rows, balance in tried if balance <= 1.1) > 0


@pytest.mark.parametrize("ends", [(), (2,)])
@pytest.mark.parametrize(("key", "query"), [(1, 1), (2, 3), (1, 5)])
def test_no_division_of_pairs_costs_less_than_the_bound_with_queries(
    ends: tuple[int, ...], key: int, query: int
) -> None:
    """Tried for 4 tokens on 2 ranks: every assignment of the tokens, and every rank for each pair of a query and a key.

    The cost of two heads that share keys: a rank needs the keys of both heads' pairs, and sends queries of each.
    """
    layout = build_layout(4, ends, 4)

    @functools.cache
    def bound(busiest: float, together: bool) -> int:
        """Return the bound for a number of pairs of the busiest rank."""
        return least_cost(layout, 2, 2 * busiest / len(pairs), key, query, together=together)

    segment = [int((layout.cu_seqlens <= token).sum()) for token in range(4)]
    pairs = [(i, j) for i in range(4) for j in range(i + 1) if segment[i] == segment[j]]
    for first in combinations(range(4), 2):
        held = [set(first), set(range(4)) - set(first)]
        divisions = []  # of each head alone: pairs of rank 0, keys that each rank lacks, queries that it lacks
        for where in product(range(2), repeat=len(pairs)):
            pairs_of_ranks = [
                [pair for pair, rank in zip(pairs, where, strict=True) if rank == wanted] for wanted in range(2)
            ]
            keys = [frozenset(j for _, j in rank_pairs) - held[rank] for rank, rank_pairs in enumerate(pairs_of_ranks)]
            queries = sum(
                len({i for i, _ in rank_pairs} - held[rank]) for rank, rank_pairs in enumerate(pairs_of_ranks)
            )
            divisions.append((len(pairs_of_ranks[0]), keys, queries))
        for pairs_of_0, keys, queries in divisions:
            cost = key * sum(map(len, keys)) + query * queries
            assert max(bound(max(pairs_of_0, len(pairs) - pairs_of_0), together) for together in (False, True)) <= cost
        cheapest = {
            (pairs_of_0, *keys): queries
            for pairs_of_0, keys, queries in sorted(divisions, key=lambda division: -division[2])
        }
        for ((pairs_of_0, *keys), queries), ((other_pairs_of_0, *other_keys), sent) in product(
            cheapest.items(), repeat=2
        ):
            busiest = max(pairs_of_0 + other_pairs_of_0, 2 * len(pairs) - pairs_of_0 - other_pairs_of_0)
            shared = sum(len(a | b) for a, b in zip(keys, other_keys, strict=True))
            cost = 2 * key * shared + query * (queries + sent)  # twice what the cost of one head would be
            assert 2 * bound(busiest / 2, together=True) <= cost
