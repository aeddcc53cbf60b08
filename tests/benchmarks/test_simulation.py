"""The comparison of the simulation with real runs: speeds are found again, and every case can be predicted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "simulation", raising=False)
    import simulation

    return simulation


def test_speeds_are_found_from_the_seconds_that_they_give(simulation) -> None:  # type: ignore[no-untyped-def]
    for own in simulation.OWN.values():
        given = simulation.cpu(0.031, 0.047)
        seconds = {window: simulation.predicted(own, window, given) for window in (simulation.SMALL, simulation.ROW)}
        assert simulation.fitted(own, seconds) == pytest.approx((0.031, 0.047), rel=1e-6)


def test_what_a_step_takes_beside_its_rows_is_found(simulation) -> None:  # type: ignore[no-untyped-def]
    windows = (simulation.SMALL, simulation.ROW)
    rows = {(simulation.OWN[1], window): 0.6 for window in windows}
    half = {(simulation.HALF_STEP, window): 0.3 for window in windows}
    assert simulation.beside_rows(rows | half) == pytest.approx(0.0)
    with_rest = {key: seconds + 0.1 for key, seconds in (rows | half).items()}
    assert simulation.beside_rows(with_rest) == pytest.approx(0.1)


def test_the_exchange_s_speed_is_found_from_the_seconds_that_it_gives(simulation) -> None:  # type: ignore[no-untyped-def]
    own = 0.031, 0.047
    for link in (0.02, 0.04):
        seconds = simulation.predicted(simulation.EXCHANGE, simulation.ROW, simulation.cpu(*own, link))
        assert simulation.fitted_link(own, seconds) == pytest.approx(link, rel=1e-3)
    assert simulation.fitted_link(own, 0.0) == simulation.LINK  # faster than any link


def test_every_case_is_predicted_and_a_pipeline_waits(simulation) -> None:  # type: ignore[no-untyped-def]
    speeds = simulation.cpu(0.03, 0.03)
    seconds = {case.name: simulation.predicted(case, simulation.ROW, speeds) for case in simulation.CASES}
    assert seconds["PP 2, 2 micro-batches"] > seconds["PP 2, 4 micro-batches"] > seconds["PP 2, 8 micro-batches"]
    assert seconds["PP 2 x 2 chunks, 2 micro-batches"] < seconds["PP 2, 2 micro-batches"]
