"""What benchmarks/soak.py takes for a fault, on records and logs made up here; the soak itself is `make soak`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_file import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(ROOT / "benchmarks" / "soak.py", monkeypatch)


def run(folder: Path, records: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def step(number: int, **given: Any) -> dict[str, Any]:
    return {"step": number, "lm_loss": 6.0 - number, "time": 17.0, "step_time_s": 0.1, "tokens_per_s": 9.0} | given


WHOLE = [step(number) for number in range(6)]


@pytest.mark.parametrize(
    ("records", "found"),
    [
        (WHOLE[:4], []),
        ([step(0, time=3.0, step_time_s=9.0, tokens_per_s=1.0)], []),
        ([step(0), step(2)], ["2 records of 2 steps, beside 2"]),
        ([step(0), step(1), step(1), step(2)], ["4 records of 3 steps, beside 4"]),
        ([step(0), step(1, lm_loss=5.0000001)], ["step 1: lm_loss is 5.0000001, not 5.0"]),
        ([step(0, spike=1)], ["step 0: spike is 1, not None"]),
        ([*WHOLE, step(6)], ["7 records of 7 steps, beside 6"]),
    ],
)
def test_a_lost_a_doubled_and_a_wrong_step(
    soak: ModuleType, tmp_path: Path, records: Sequence[dict[str, Any]], found: list[str]
) -> None:
    assert soak.differences(run(tmp_path / "disturbed", records), run(tmp_path / "whole", WHOLE)) == found


def test_growth_of_memory_is_seen_after_the_start(soak: ModuleType, tmp_path: Path) -> None:
    job = soak.Job(tmp_path, tmp_path / "soak.jsonl", 0.0)
    job.memory = [(float(at), 1, at, [min(100.0, 50.0 + at), 100.0 + at / 10]) for at in range(201)]
    flat, growing = soak.growth(job)
    assert flat == 0.0
    assert growing == pytest.approx((117.55 - 107.55) / 107.55)


@pytest.mark.parametrize(
    ("kind", "seconds", "status", "requeued", "said", "wrong"),
    [
        ("kill", 9, 137, True, ["error: rank 0: LostRankError: lost rank 1: killed or stopped"], None),
        ("kill", 9, 137, True, ["error: rank 1 has lost rank 0: it no longer answers"], "no line says 'lost rank 1'"),
        ("kill", 9, 137, False, ["error: lost rank 1"], "status 137 was not requeued"),
        ("stop", 999, 137, True, ["error: lost rank 1"], "999 s to the end"),
        ("hang", 30, 87, True, ["error: rank 1 holds up the others: in step 3"], None),
        ("full", 3, 2, False, ["error: save: x cannot be written (File too large)"], None),
        ("full", 3, 2, True, ["error: save: x cannot be written (File too large)"], "status 2, requeued True"),
        ("full", 3, 1, True, ["error: rank 0: OSError: [Errno 27] File too large"], None),
        ("slow", 30, None, False, [], None),
        ("slow", 30, 87, True, ["error: rank 1 holds up the others"], "a slow disk has ended the run with 87"),
        ("warn", 3, 85, True, [], None),
        ("warn", 3, 0, False, [], "status 0 was not requeued"),
    ],
)
def test_how_a_fault_has_to_end(
    soak: ModuleType, kind: str, seconds: float, status: int | None, requeued: bool, said: list[str], wrong: str | None
) -> None:
    found = soak.judged(kind, 1, seconds, status, requeued, said)
    assert found is None if wrong is None else found.startswith(wrong)
