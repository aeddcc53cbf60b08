"""The records of processes, put together: what each would wait for, had it a core of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Event = tuple[str, list[int], int, float]


@pytest.fixture
def own_cores(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import own_cores

    return own_cores


def write(folder: Path, logs: list[list[Event]]) -> None:
    for rank, log in enumerate(logs):
        (folder / f"{rank}.json").write_text(json.dumps(log))


def step(*events: Event, seconds: float) -> list[Event]:
    return [("step begins", [], 0, 0.0), *events, ("step ends", [], 0, seconds)]


def test_a_chain_of_messages_takes_the_sum(own_cores, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """0 computes 3 s and sends to 2, which computes 2 s and sends to 1, which computes 1 s."""
    zero = step(("send", [0, 2], 0, 3.0), ("wait send", [0, 2], 0, 3.0), seconds=3.0)
    one = step(("receive", [2, 1], 0, 0.0), ("wait receive", [2, 1], 0, 0.0), seconds=1.0)
    two = step(
        ("receive", [0, 2], 0, 0.0),
        ("wait receive", [0, 2], 0, 0.0),
        ("send", [2, 1], 0, 2.0),
        ("wait send", [2, 1], 0, 2.0),
        seconds=2.0,
    )
    write(tmp_path, [zero, one, two])
    assert own_cores.step_seconds(tmp_path, 3) == [pytest.approx(6.0)]


def test_each_group_waits_for_its_own_slowest(own_cores, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Ranks 0 and 1 meet after 1 and 4 s, 2 and 3 after 2 and 3; each then computes 1 s, and all meet."""

    def rank(pair: list[int], before: float) -> list[Event]:
        every = [0, 1, 2, 3]
        own = [("meet", pair, 0, before), ("wait meet", pair, 0, before)]
        return step(*own, ("meet", every, 0, before + 1), seconds=before + 1)

    write(tmp_path, [rank([0, 1], 1.0), rank([0, 1], 4.0), rank([2, 3], 2.0), rank([2, 3], 3.0)])
    assert own_cores.step_seconds(tmp_path, 4) == [pytest.approx(5.0)]
    for path in tmp_path.glob("*.json"):  # and where all wait for all, no longer than the slowest pair
        log = json.loads(path.read_text())
        path.write_text(json.dumps([*log[:-1], ("wait meet", [0, 1, 2, 3], 0, log[-1][3]), log[-1]]))
    assert own_cores.step_seconds(tmp_path, 4) == [pytest.approx(5.0)]


def test_processes_that_wait_for_each_other_are_no_answer(own_cores, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    one = step(("wait receive", [1, 0], 0, 0.0), ("send", [0, 1], 0, 0.0), seconds=0.0)
    other = step(("wait receive", [0, 1], 0, 0.0), ("send", [1, 0], 0, 0.0), seconds=0.0)
    write(tmp_path, [one, other])
    with pytest.raises(AssertionError, match="wait for each other"):
        own_cores.step_seconds(tmp_path, 2)
