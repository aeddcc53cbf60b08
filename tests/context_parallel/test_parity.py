"""Context parallelism trains the same model: real processes against one, on rows that try its corners."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ext.context_parallel import plan
from megatron_ext.context_parallel.choice import ContextOptions
from megatron_ext.context_parallel.exchange import Scheme
from megatron_ext.context_parallel.group import ContextGroup
from megatron_ext.layout import build_layout
from tests.conftest import slow_but
from tests.context_parallel.cases import (
    CP2,
    CP2_DP2,
    CP2_PP2,
    CP2_TP2,
    CP4,
    HEAD_SIZE,
    HEADS,
    KEY_HEADS,
    STEPS,
    VALIDATION,
    Case,
    Layout,
    Outcome,
    Probe,
    ProbeOutcome,
    errors,
    run,
)

TOLERANCE = 1e-5
LENGTH = 132
WINDOWS = (1, 7, 8, 64, 100, LENGTH)
POLICIES = ("contiguous", "zigzag", "balanced", "auto")
FAST = ("auto",)  # whose grid is in the fast part
SCHEMES = ("exchange", "ulysses")


LAYOUTS = (CP2, CP4, CP2_TP2, CP2_PP2, CP2_DP2)


def grid(policy: str, layout: Layout) -> Iterator[Case]:
    """Every window; with and without the document mask, or in turn where there is more than context parallelism.

    Micro-batches have one and two rows in turn.
    """
    for number, (window, document_mask) in enumerate(itertools.product(WINDOWS, (True, False))):
        turn = (number // 2 + number) % 2
        if layout in (CP2, CP4) or turn == POLICIES.index(policy) % 2:
            yield Case(window, document_mask, policy, micro_batch=1 + turn, rows=2 + 2 * turn)
    for window, document_mask, size in ((7, True, 2), (LENGTH, False, 1)):
        yield Case(window, document_mask, policy, "ulysses", micro_batch=size, rows=2 * size)
    for documents in ("one", "token"):
        yield Case(LENGTH, True, policy, documents=documents)


def rest_of_grid(policy: str, layout: Layout) -> list[Case]:
    """Both micro-batches, all kinds of rows, both schemes, other lengths: each under one policy and layout in turn."""
    first = set(grid(policy, layout))
    choices = itertools.product(WINDOWS, (True, False), SCHEMES, (1, 2), ("mixed", "one", "token"))
    made = []
    for window, document_mask, scheme, size, documents in choices:
        if documents == "mixed" or (document_mask and window in (7, LENGTH)):
            made.append(Case(window, document_mask, policy, scheme, documents, micro_batch=size, rows=2 * size))
    for length, window, scheme in itertools.product((128, 196), (3, 100, 196), SCHEMES):
        made.append(Case(min(window, length), True, policy, scheme, length=length))
    turns = list(itertools.product(LAYOUTS, POLICIES))
    return [case for case in made[turns.index((layout, policy)) :: len(turns)] if case not in first]


def masks(layout: Layout) -> Iterator[Case]:
    """Loss masks that differ from rank to rank, up to a rank, a micro-batch or a step without a trained token."""
    for scheme in SCHEMES:
        yield Case(40, False, "zigzag", scheme, trained="uneven")
        yield Case(LENGTH, True, "contiguous", scheme, trained="uneven", micro_batch=2, rows=4)
    for policy in ("contiguous", "zigzag", "balanced"):
        for rank in {0, layout.cp - 1}:
            yield Case(50, True, policy, trained="rank", masked=(layout.cp, policy, rank))
    yield Case(LENGTH, False, "zigzag", "ulysses", trained="rank", masked=(layout.cp, "zigzag", 0))
    yield Case(30, True, "zigzag", trained="micro-batch", rows=4)
    yield Case(30, True, "zigzag", trained="none")


def short_segments(layout: Layout) -> Iterator[Case]:
    """Segments of 2, 3 and 2 cp - 1 tokens, which public schemes pad to 2 cp."""
    for policy, window in itertools.product(("contiguous", "zigzag"), sorted({2, 3, 2 * layout.cp - 1})):
        yield Case(window, False, policy, "exchange" if policy == "zigzag" else "ulysses")


def chosen_schemes() -> Iterator[Case]:
    """Where little is exchanged, and where trading heads is cheaper."""
    for window in (7, 64, LENGTH):
        for scheme in ("auto", *SCHEMES):
            yield Case(window, False, "zigzag", scheme)


def switches() -> Iterator[Case]:
    """Options of the engine that run forward twice or reduce gradients another way."""
    for scheme in SCHEMES:
        yield Case(100, True, "zigzag", scheme, recompute="full")
        yield Case(100, True, "zigzag", scheme, recompute="selective")
        yield Case(100, True, "zigzag", scheme, parts=4)
        yield Case(100, True, "balanced", scheme, parts=2, recompute="full", local_window=40)
        yield Case(100, True, "zigzag", scheme, overlaps=True, trained="uneven")


def other_masks(policies: Sequence[str]) -> Iterator[Case]:
    """Sliding windows, and local layers whose segments are not those of the window."""
    for policy, scheme in itertools.product(policies, SCHEMES):
        yield Case(20, True, policy, scheme, window_mask="sliding", micro_batch=2, rows=4)
        yield Case(9, False, policy, scheme, window_mask="sliding", local_window=50)
        yield Case(9, True, policy, scheme, local_window=31)
        yield Case(LENGTH, False, policy, scheme, local_window=1)


def low_precision() -> Iterator[Case]:
    for scheme in SCHEMES:
        yield Case(100, True, "zigzag", scheme, bf16=True)


def probes() -> Iterator[Probe]:
    """Every token of a micro-batch of two rows, replaced one at a time."""
    for window, document_mask, policy, scheme in (
        (5, True, "contiguous", "exchange"),
        (24, True, "zigzag", "exchange"),
        (24, False, "balanced", "exchange"),
        (7, False, "zigzag", "ulysses"),
        (24, True, "auto", "exchange"),
    ):
        case = Case(window, document_mask, policy, scheme, micro_batch=2, rows=4, length=24)
        yield Probe(case, tuple(itertools.product(range(2), range(25))))


def cases(layout: Layout, part: str) -> list[Case]:
    """The "fast" or the "slow" part of a layout's cases."""
    made: list[Case] = []
    if part == "slow":
        for policy in POLICIES:
            made += [*(grid(policy, layout) if policy not in FAST else ()), *rest_of_grid(policy, layout)]
        if layout in (CP2, CP4):
            made += other_masks(("contiguous", "balanced"))
        return list(dict.fromkeys(made))
    made = [*(case for policy in FAST for case in grid(policy, layout)), *masks(layout)]
    if layout in (CP2, CP4):
        made += [*short_segments(layout), *chosen_schemes(), *other_masks(("zigzag", "auto"))]
    if layout is CP2:
        made += [*switches(), *low_precision()]
    return list(dict.fromkeys(made))


class Runs:
    """What came of each part of each layout; its processes are started once, when first asked for."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], dict[Any, list[Any]]] = {}
        self._asked: set[Layout] = {CP2}

    def of(self, layout: Layout, part: str = "fast") -> dict[Any, list[Any]]:
        """By case or probe, the outcome of each process."""
        self._asked.add(layout)
        key = (layout.name, part)
        if key not in self._seen:
            jobs = [*cases(layout, part), *(probes() if part == "fast" and layout in (CP2, CP4) else ())]
            self._seen[key] = dict(zip(jobs, run(layout.parallel, layout.processes, jobs), strict=True))
        return self._seen[key]

    def alone(self, case: Case, part: str = "fast") -> Outcome:
        seen = self._seen.setdefault(("alone", part), {})
        if case.alone not in seen:
            jobs = list(dict.fromkeys(one.alone for layout in self._asked for one in cases(layout, part)))
            jobs = [job for job in jobs if job not in seen]
            seen.update(zip(jobs, run({}, 1, jobs), strict=True))
        outcome: Outcome = seen[case.alone][0]
        return outcome


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


def completed(runs: Runs, layout: Layout, case: Case, part: str = "fast") -> list[Outcome]:
    outcomes = runs.of(layout, part)[case]
    assert not isinstance(outcomes[0], str), f"{case}: {outcomes[0]}"
    return outcomes


def assert_same_training(runs: Runs, layout: Layout, some: Sequence[Case], part: str = "fast") -> None:
    """Losses, gradient norms, validation and final weights equal one process to 1e-5; replicas agree bit for bit."""
    assert some
    worst: dict[str, tuple[float, Case]] = {}
    for case in some:
        outcomes = completed(runs, layout, case, part)
        for name, error in errors(outcomes[0], runs.alone(case, part)).items():
            worst[name] = max(worst.get(name, (-1.0, case)), (error, case), key=lambda found: found[0])
        replicas = {(outcome.coordinates, outcome.digest) for outcome in outcomes}
        assert len(replicas) == len({coordinates for coordinates, _ in replicas}), f"{case}: replicas differ"
        assert all(outcome.grad_norm == outcomes[0].grad_norm for outcome in outcomes), case
        assert all(outcome.lm_loss == outcomes[0].lm_loss for outcome in outcomes), case
    print(f"{layout.name}, {len(some)} cases:", ", ".join(f"{name} {error:.1e}" for name, (error, _) in worst.items()))
    assert max(error for error, _ in worst.values()) <= TOLERANCE, worst


def each(*layouts: Layout) -> pytest.MarkDecorator:
    """Every layout; those of four processes are slow."""
    marks = {layout: [pytest.mark.slow] if layout.processes > 2 else [] for layout in layouts}
    return pytest.mark.parametrize("layout", [pytest.param(one, id=one.name, marks=marks[one]) for one in layouts])


ALL_LAYOUTS = each(*LAYOUTS)
BOTH_SIZES = each(CP2, CP4)


@ALL_LAYOUTS
@pytest.mark.parametrize("policy", slow_but(FAST, POLICIES))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_window_trains_the_same_model(runs: Runs, layout: Layout, policy: str, scheme: str) -> None:
    some = [case for case in grid(policy, layout) if case.scheme == scheme]
    assert_same_training(runs, layout, some, "fast" if policy in FAST else "slow")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@ALL_LAYOUTS
def test_the_rest_of_the_grid(runs: Runs, layout: Layout) -> None:
    assert_same_training(runs, layout, [case for policy in POLICIES for case in rest_of_grid(policy, layout)], "slow")


@ALL_LAYOUTS
@pytest.mark.parametrize("trained", ["uneven", "rank", "micro-batch", "none"])
def test_loss_masks_that_differ_from_rank_to_rank(runs: Runs, layout: Layout, trained: str) -> None:
    assert_same_training(runs, layout, [case for case in masks(layout) if case.trained == trained])


def test_the_masks_are_what_they_are_called(runs: Runs) -> None:
    """A rank without a trained token at every step, a step without any, and uneven shares."""
    for case in masks(CP4):
        for step, sample in itertools.product(range(STEPS), range(0, case.rows, case.micro_batch)):
            first = step * case.rows + sample
            trained = np.concatenate([case.row_at(first + row).trained for row in range(case.micro_batch)])
            ((_, made),) = case.plans(4, step)[sample // case.micro_batch]
            counts = [int(trained[rows].sum()) for rows in made.rows]
            if case.trained == "rank":
                assert [rank for rank, count in enumerate(counts) if not count] == [case.masked[2]]
            elif case.trained == "uneven":
                assert len(set(counts)) > 1
            elif case.trained == "micro-batch":
                assert (not any(counts)) == (sample == 0)
            else:
                assert not any(counts)
    for case in masks(CP2):
        if case.trained == "none":
            assert runs.alone(case).denominator == [0, 0]


@BOTH_SIZES
def test_segments_shorter_than_twice_the_ranks(runs: Runs, layout: Layout) -> None:
    some = list(short_segments(layout))
    assert all(case.window < 2 * layout.cp for case in some if layout is CP4)
    assert_same_training(runs, layout, some)


@BOTH_SIZES
def test_the_scheme_auto_trains_the_same_model(runs: Runs, layout: Layout) -> None:
    assert_same_training(runs, layout, list(chosen_schemes()))


@pytest.mark.parametrize(
    ("heads", "key_heads", "window", "chosen"),
    [
        (8, 8, LENGTH, Scheme.ULYSSES),  # 16 heads of 2.25 rows per token against 32 heads of 0.75
        (8, 4, LENGTH, Scheme.EXCHANGE),  # 8 heads of 2.25 rows per token against 24 heads of 0.75: the same
        (8, 8, 7, Scheme.EXCHANGE),  # little to exchange
        (6, 6, LENGTH, Scheme.EXCHANGE),  # 4 ranks cannot share 6 heads
        (8, 2, LENGTH, Scheme.EXCHANGE),  # nor 2 key heads
    ],
)
def test_auto_takes_the_scheme_that_moves_fewer_bytes(heads: int, key_heads: int, window: int, chosen: Scheme) -> None:
    options = ContextOptions(ContextGroup(0, 4, None), "zigzag", None, heads, key_heads)
    made = plan(build_layout(4 * LENGTH, [], 4 * LENGTH if window == LENGTH else window), 4, "zigzag")
    assert options.choose(made) is chosen
    assert replace(options, exchanged_heads=0.5).choose(made) is Scheme.EXCHANGE  # a latent
    for named in Scheme:
        assert replace(options, scheme=named).choose(made) is named


def test_recomputation_and_overlaps(runs: Runs) -> None:
    assert_same_training(runs, CP2, list(switches()))


@BOTH_SIZES
@pytest.mark.parametrize("part", ["fast", pytest.param("slow", marks=pytest.mark.slow)])
def test_sliding_windows_and_local_layers(runs: Runs, layout: Layout, part: str) -> None:
    policies = ("zigzag", "auto") if part == "fast" else ("contiguous", "balanced")
    assert_same_training(runs, layout, list(other_masks(policies)), part)


def test_low_precision(runs: Runs) -> None:
    for case in low_precision():
        found = errors(completed(runs, CP2, case)[0], runs.alone(case))
        print(case.scheme, found)
        assert max(found[name] for name in ("lm_loss", "train_loss", "valid_loss")) <= 2e-3, found
        assert max(found[name] for name in ("grad_norm", "weights")) <= 1e-2, found


def may_change(case: Case, row: int, place: int) -> np.ndarray:
    """bool [rows, L], from the formulas: who reads tokens[place] of `row` as an input or as its label."""
    length, positions = case.length, np.arange(case.length)
    ends = case.row_at(row).document_ends
    document = (positions[:, None] >= ends).sum(axis=1)
    changed = np.zeros((case.micro_batch, length), dtype=np.bool_)
    if place < length:
        sees = (positions // case.window == place // case.window) & (positions >= place)
        changed[row] = sees & (document == document[place]) if case.document_mask else sees
    if place:
        changed[row, place - 1] = True
    return changed


@BOTH_SIZES
@pytest.mark.parametrize("probe", probes(), ids=lambda p: f"{p.case.window} {p.case.policy} {p.case.scheme}")
def test_one_token_changes_exactly_what_sees_it(runs: Runs, layout: Layout, probe: Probe) -> None:
    outcomes: list[ProbeOutcome] = runs.of(layout)[probe]
    assert not isinstance(outcomes[0], str), outcomes[0]
    held = np.concatenate([outcome.held for outcome in outcomes])
    assert sorted(held) == list(range(probe.case.micro_batch * probe.case.length))
    losses = np.concatenate([outcome.losses for outcome in outcomes], axis=1)[:, np.argsort(held)]
    changed = (losses[1:] != losses[0]).reshape(len(probe.places), probe.case.micro_batch, -1)
    for number, (row, place) in enumerate(probe.places):
        expected = may_change(probe.case, row, place)
        np.testing.assert_array_equal(changed[number], expected, err_msg=f"row {row}, token {place}")


def expected_traffic(layout: Layout, case: Case, step: int, passes: int) -> tuple[int, int]:
    """Collectives and bytes of all processes in one step, from the plans alone."""
    itemsize = 2 if case.bf16 else 4
    calls = sent = 0
    for layers, share in itertools.chain.from_iterable(case.plans(layout.cp, step)):
        exchanged = int(share.rows_moved.sum()) * 2 * KEY_HEADS
        traded = share.layout.tokens * (layout.cp - 1) // layout.cp * 2 * (HEADS + KEY_HEADS)
        scheme = case.scheme
        if scheme == "auto":
            scheme = "ulysses" if traded < exchanged else "exchange"
        sent += (exchanged if scheme == "exchange" else traded) * HEAD_SIZE * itemsize * layers
        calls += (bool(exchanged) * (case.parts or 1) if scheme == "exchange" else 4) * layers
    tensor = dict(layout.others).get("tensor_model_parallel_size", 1)
    return calls * layout.cp * tensor * passes, sent * passes


@ALL_LAYOUTS
def test_the_bytes_of_all_collectives_are_the_plans(runs: Runs, layout: Layout) -> None:
    """Seen at torch.distributed's operations on the context-parallel group, and counted by ContextGroup."""
    silent = 0
    for case in cases(layout, "fast"):
        outcomes = completed(runs, layout, case)
        passes = 2 if case.recompute is None else 3
        seen = [call for outcome in outcomes for call in outcome.calls]
        assert {name for name, _ in seen} <= {"alltoall_base_.default"}, case
        assert (len(seen), sum(sent for _, sent in seen)) == expected_traffic(layout, case, 0, passes), case
        silent += not seen
        for outcome in outcomes:
            assert outcome.counted[0] == sum(sent for _, sent in outcome.calls), case
        for step in range(STEPS):
            counted = sum(outcome.counted[step] for outcome in outcomes)
            assert counted == expected_traffic(layout, case, step, passes)[1], case
        seen = [call for outcome in outcomes for call in outcome.evaluation_calls]
        other = expected_traffic(layout, case, VALIDATION // case.rows, 1)
        assert (len(seen), sum(sent for _, sent in seen)) == other, case
    assert silent  # with nothing to move, no collective at all
