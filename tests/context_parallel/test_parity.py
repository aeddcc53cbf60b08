"""Context parallelism trains the same model: real processes against one, on rows that try its corners."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_ext.context_parallel import plan
from megatron_ext.context_parallel.choice import CPOptions
from megatron_ext.context_parallel.exchange import Scheme
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.layout import build_layout
from tests.conftest import slow_but
from tests.context_parallel import cases as shared
from tests.context_parallel.cases import (
    CP2,
    CP4,
    LAYOUTS,
    STEPS,
    VALIDATION,
    Case,
    Layout,
    Outcome,
    Probe,
    Runs,
    errors,
)

TOLERANCE = 1e-5
LENGTH = 132
WINDOWS = (1, 7, 8, 64, 100, LENGTH)
POLICIES = ("contiguous", "zigzag", "balanced", "auto")
SCHEMES = ("exchange", "ulysses")
ALONE = Layout("alone", 1, 1)


def windows() -> Iterator[Case]:
    """Every window, with and without the document mask, in micro-batches of one and two rows; policies take turns."""
    for number, (window, document_mask) in enumerate(itertools.product(WINDOWS, (True, False))):
        policy = POLICIES[(number + number // 4) % 4]
        turn = (number // 2 + number) % 2
        yield Case(window, document_mask, policy, micro_batch=1 + turn, rows=2 + 2 * turn)


def corners() -> Iterator[Case]:
    """A row that is one document, and rows of documents of one token."""
    yield Case(100, True, "contiguous", "exchange", documents="one")
    yield Case(100, True, "zigzag", "ulysses", documents="one", length=128)
    yield Case(100, True, "balanced", "exchange", documents="token", length=196)
    yield Case(100, True, "auto", "ulysses", documents="token")


def loss_masks(layout: Layout) -> Iterator[Case]:
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
    """Yield cases where little is exchanged, and where trading heads is cheaper."""
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


def other_masks() -> Iterator[Case]:
    """Yield sliding windows, and local layers whose segments differ from the window's, each under two policies."""
    for first, scheme in itertools.product((0, 2), SCHEMES):
        policies = POLICIES[first:] + POLICIES[:first]
        yield Case(20, True, policies[0], scheme, window_mask="sliding", micro_batch=2, rows=4)
        yield Case(9, False, policies[1], scheme, window_mask="sliding", local_window=50)
        yield Case(9, True, policies[2], scheme, local_window=31)
        yield Case(LENGTH, False, policies[3], scheme, local_window=1)


def groups(layout: Layout) -> dict[str, list[Case]]:
    """Return the groups in which a layout is compared with one process."""
    cases = {"windows": list(windows()), "corners": list(corners()), "loss masks": list(loss_masks(layout))}
    if layout in (CP2, CP4):
        cases |= {"short segments": list(short_segments(layout)), "schemes": list(chosen_schemes())}
        cases |= {"other masks": list(other_masks())}
    if layout is CP2:
        cases |= {"recomputation and overlaps": list(switches())}
    return cases


LOW_PRECISION = [Case(100, True, "zigzag", scheme, bf16=True) for scheme in SCHEMES]
# every token of a micro-batch of two rows, replaced one at a time
PLACES = tuple(itertools.product(range(2), range(25)))
PROBES = [
    Probe(Case(window, document_mask, policy, scheme, micro_batch=2, rows=4, length=24), PLACES)
    for window, document_mask, policy, scheme in (
        (1, False, "balanced", "exchange"),
        (5, True, "contiguous", "exchange"),
        (7, False, "zigzag", "ulysses"),
        (12, True, "balanced", "ulysses"),
        (23, True, "auto", "exchange"),
        (24, True, "zigzag", "exchange"),
        (24, False, "balanced", "exchange"),
    )
]


def jobs(layout: Layout) -> list[list[Case | Probe]]:
    """Lists of jobs that run together; one process alone has probes only."""
    if layout is ALONE:
        return [[*PROBES]]
    together: list[list[Case | Probe]] = [[*cases] for cases in groups(layout).values()]
    if layout in (CP2, CP4):
        together.append([*PROBES])
    if layout is CP2:
        together.append([*LOW_PRECISION])
    return together


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(jobs)


GROUPS = [(layout, group) for layout in LAYOUTS for group in groups(layout)]
QUICK_GROUPS = [(CP4, "short segments")]
QUICK_GROUPS += [(layout, group) for layout, group in GROUPS if layout is CP2 and group != "windows"]


@pytest.mark.parametrize(("layout", "group"), slow_but(QUICK_GROUPS, GROUPS), ids=str)
def test_a_layout_trains_the_same_model(runs: Runs, layout: Layout, group: str) -> None:
    """Losses, gradient norms, validation and final weights equal one process to 1e-5; replicas agree bit for bit."""
    for case in groups(layout)[group]:
        outcomes = runs.of(layout, case)
        differences = errors(outcomes[0], runs.alone(case))
        assert max(differences.values()) <= TOLERANCE, (case, differences)
        replicas = {(outcome.coordinates, outcome.digest) for outcome in outcomes}
        assert len(replicas) == len({coordinates for coordinates, _ in replicas}), f"{case}: replicas differ"
        assert all(outcome.grad_norm == outcomes[0].grad_norm for outcome in outcomes), case
        assert all(outcome.lm_loss == outcomes[0].lm_loss for outcome in outcomes), case
        assert case.trained != "none" or outcomes[0].denominator == [0, 0]


@pytest.mark.parametrize(
    ("ranks", "heads", "key_heads", "window", "chosen"),
    [
        (4, 8, 8, LENGTH, Scheme.ULYSSES),  # 16 heads of 2.25 rows per token against 32 heads of 0.75
        (4, 8, 4, LENGTH, Scheme.EXCHANGE),  # 8 heads of 2.25 rows per token against 24 heads of 0.75: the same
        (4, 8, 8, 7, Scheme.EXCHANGE),  # little to exchange
        (4, 6, 6, LENGTH, Scheme.EXCHANGE),  # 4 ranks cannot share 6 heads
        (4, 8, 2, LENGTH, Scheme.EXCHANGE),  # copies of 2 key heads for 4 ranks are as many as 4 of them
        (16, 32, 8, LENGTH, Scheme.ULYSSES),  # 16 heads of 11.25 rows against 96, with copies, of 15/16
        (16, 32, 6, LENGTH, Scheme.EXCHANGE),  # 16 ranks cannot share 6 key heads
    ],
)
def test_auto_takes_the_scheme_that_moves_fewer_bytes(
    ranks: int, heads: int, key_heads: int, window: int, chosen: Scheme
) -> None:
    options = CPOptions(CPGroup(0, ranks, None), "zigzag", None, heads, key_heads)
    cp_plan = plan(build_layout(4 * LENGTH, [], 4 * LENGTH if window == LENGTH else window), ranks, "zigzag")
    assert options.choose(cp_plan) is chosen
    assert replace(options, exchanged_heads=0.5).choose(cp_plan) is Scheme.EXCHANGE  # a latent
    for named in Scheme:
        assert replace(options, scheme=named).choose(cp_plan) is named


def may_change(case: Case, row: int, place: int) -> np.ndarray:
    """bool [rows, L], from the formulas: who reads tokens[place] of `row` as an input or as its label."""
    length = case.length
    positions = np.arange(case.length)
    ends = case.row_at(row).document_ends
    document = (positions[:, None] >= ends).sum(axis=1)
    changed = np.zeros((case.micro_batch, length), dtype=np.bool_)
    if place < length:
        sees = (positions // case.window == place // case.window) & (positions >= place)
        changed[row] = sees & (document == document[place]) if case.document_mask else sees
    if place:
        changed[row, place - 1] = True
    return changed


@pytest.mark.parametrize("layout", slow_but([ALONE, CP2], [ALONE, CP2, CP4]), ids=str)
@pytest.mark.parametrize("probe", PROBES, ids=lambda p: f"{p.case.window} {p.case.policy} {p.case.scheme}")
def test_one_token_changes_exactly_what_sees_it(runs: Runs, layout: Layout, probe: Probe) -> None:
    outcomes = runs.of(layout, probe)
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
        exchanged = int(share.rows_moved.sum()) * 2 * shared.KEY_HEADS
        traded = share.layout.tokens * (layout.cp - 1) // layout.cp * 2 * (shared.HEADS + shared.KEY_HEADS)
        scheme = case.scheme
        if scheme == "auto":
            scheme = "ulysses" if traded < exchanged else "exchange"
        sent += (exchanged if scheme == "exchange" else traded) * shared.HEAD_SIZE * itemsize * layers
        calls += (bool(exchanged) * (case.parts or 1) if scheme == "exchange" else 4) * layers
    tensor = dict(layout.others).get("tensor_model_parallel_size", 1)
    return calls * layout.cp * tensor * passes, sent * passes


def assert_planned_traffic(layout: Layout, case: Case, outcomes: Sequence[Outcome]) -> None:
    """All collectives, seen at torch.distributed's operations and counted by CPGroup, are the plans' own."""
    passes = 2 if case.recompute is None else 3
    seen = [call for outcome in outcomes for call in outcome.calls]
    assert {name for name, _ in seen} <= {"alltoall_base_.default"}, case
    assert (len(seen), sum(sent for _, sent in seen)) == expected_traffic(layout, case, 0, passes), case
    for outcome in outcomes:
        assert outcome.counted[0] == sum(sent for _, sent in outcome.calls), case
    for step in range(STEPS):
        counted = sum(outcome.counted[step] for outcome in outcomes)
        assert counted == expected_traffic(layout, case, step, passes)[1], case
    evaluation_calls = [call for outcome in outcomes for call in outcome.evaluation_calls]
    evaluation_traffic = expected_traffic(layout, case, VALIDATION // case.rows, 1)
    assert (len(evaluation_calls), sum(sent for _, sent in evaluation_calls)) == evaluation_traffic, case


@pytest.mark.parametrize(("layout", "group"), slow_but(QUICK_GROUPS, GROUPS), ids=str)
def test_the_bytes_of_all_collectives_are_the_plans(runs: Runs, layout: Layout, group: str) -> None:
    silent = 0
    for case in groups(layout)[group]:
        outcomes = runs.of(layout, case)
        assert_planned_traffic(layout, case, outcomes)
        silent += not any(outcome.calls for outcome in outcomes)
    if group in ("windows", "corners"):
        assert silent  # with nothing to move, no collective at all


def test_low_precision(runs: Runs) -> None:
    for case in LOW_PRECISION:
        outcomes = runs.of(CP2, case)
        differences = errors(outcomes[0], runs.alone(case))
        assert max(differences[name] for name in ("lm_loss", "train_loss", "valid_loss")) <= 2e-3, differences
        assert max(differences[name] for name in ("grad_norm", "weights")) <= 1e-2, differences
        assert_planned_traffic(CP2, case, outcomes)
