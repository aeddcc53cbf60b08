"""Dataset Decomposition: pieces by binary digits, rows of one size, and the order of a curriculum."""

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.packing.decomposition import curriculum
from megatron_ext.data.packing.policies import build_plan
from megatron_ext.data.rows.packed import PackedRows
from tests.conftest import refused
from tests.data.packing.sources import STRIDE, ListedSource, Piece, rows_of, seeds, some_lengths

options_ = st.fixed_dictionaries(
    {"shortest": st.sampled_from([1, 2, 4]), "cycles": st.integers(1, 3), "batch_rows": st.integers(1, 3)}
)


def pieces_of(lengths: list[int], shortest: int, longest: int) -> dict[int, list[Piece]]:
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for document, length in enumerate(lengths):
        start = 0
        sizes = [longest] * (length // longest) + [longest >> k for k in range(1, longest.bit_length())]
        for size in sizes:
            if size >= shortest and length - start >= size:
                pieces[size].append((document, start, size))
                start += size
        assert length - start < shortest
    return pieces


@given(lengths=some_lengths, row_length=st.sampled_from([4, 8, 16]), seed=seeds, options=options_)
@settings(max_examples=200)
def test_rows_hold_pieces_of_one_size(lengths: list[int], row_length: int, seed: int, options: dict[str, int]) -> None:
    source = ListedSource(lengths)
    documents = range(len(lengths))
    batch = options["batch_rows"]
    wanted = pieces_of(lengths, options["shortest"], row_length)
    batches = {size: len(pieces) * size // (row_length * batch) for size, pieces in wanted.items()}
    if not sum(batches.values()):
        assert "makes no row" in refused(build_plan, "decomposition", source, documents, row_length, seed, options)
        return
    plan = build_plan("decomposition", source, documents, row_length, seed, options)
    rows = rows_of(plan)
    assert len(rows) == batch * sum(batches.values())
    for number in range(0, len(rows), batch):
        (size,) = {count for row in rows[number : number + batch] for _, _, count in row}
        assert {len(row) for row in rows[number : number + batch]} == {row_length // size}
    placed = Counter(itertools.chain(*rows))
    assert set(placed.values()) == {1}
    for size, pieces in wanted.items():
        chosen = [piece for piece in placed if piece[2] == size]
        assert set(chosen) <= set(pieces)
        assert len(chosen) * size == batches[size] * batch * row_length


@given(lengths=some_lengths, seed=seeds)
def test_every_epoch_reads_the_rows_in_the_plans_order_and_each_piece_alone(lengths: list[int], seed: int) -> None:
    source = ListedSource([*lengths, 8])
    plan = build_plan("decomposition", source, range(len(lengths) + 1), 8, seed, {"shortest": 2})
    rows = PackedRows(source, plan, seed=5)
    for sample in range(2 * plan.rows):
        pieces = plan.row_pieces(sample % plan.rows).tolist()
        row = rows.row(sample)
        assert row.tokens[:-1].tolist() == [d * STRIDE + s + i for d, s, n in pieces for i in range(n)]
        size = pieces[0][2]
        assert set(range(size, 8, size)) <= set(row.document_ends.tolist()) <= {*range(size, 8, size), 8}


def draws(counts: list[int], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.random(count) for count in counts]


def test_a_shorter_run_sees_every_size() -> None:
    source = ListedSource([8] * 40 + [4] * 40 + [2] * 80)
    options = {"shortest": 2, "cycles": 1}
    plans = [build_plan("decomposition", source, range(160), 8, 0, options | more) for more in ({}, {"rows": 20})]
    sizes = [Counter(row[0][2] for row in rows_of(plan)) for plan in plans]
    assert sizes == [{8: 40, 4: 20, 2: 20}, {8: 10, 4: 5, 2: 5}]


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    cycles=st.integers(1, 4),
    growth=st.sampled_from([1.0, 2.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_every_cycle_has_an_even_share(counts: list[int], cycles: int, growth: float, seed: int) -> None:
    order = curriculum(counts, draws(counts, seed), growth, cycles).tolist()
    start = 0
    for cycle in range(cycles):
        shares = [(cycle + 1) * count // cycles - cycle * count // cycles for count in counts]
        drawn_buckets = Counter(order[start : start + sum(shares)])
        assert [drawn_buckets[bucket] for bucket in range(len(counts))] == shares
        start += sum(shares)
    assert start == len(order) == sum(counts)


@pytest.mark.parametrize("growth", [1.0, 2.0, 5.0])
def test_the_odds(growth: float) -> None:
    """The odds of the next batch's bucket follow from what is left in the cycle, over many draws."""
    counts = [2, 3, 1]
    seen: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for seed in range(4000):
        remaining = list(counts)
        for bucket in curriculum(counts, draws(counts, seed), growth, 1).tolist():
            seen[tuple(count > 0 for count in remaining)][bucket] += 1
            remaining[bucket] -= 1
    weights = [growth**-bucket * count for bucket, count in enumerate(counts)]
    for alive, drawn_buckets in seen.items():
        total = np.dot(weights, alive)
        for bucket, weight in enumerate(weights):
            share = weight * alive[bucket] / total
            error = 5 * (share * (1 - share) / drawn_buckets.total()) ** 0.5
            assert abs(drawn_buckets[bucket] / drawn_buckets.total() - share) <= error, (alive, bucket)
