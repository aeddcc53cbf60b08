"""How a run that has ended tells its launcher: the exit status, and the file beside it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.run.signals import DIVERGED, REQUEUE, Divergence, Ending, StopRequest, unmark


@pytest.mark.parametrize(
    ("number", "saved", "status"),
    [
        (0, True, 0),
        (signal.SIGTERM, True, REQUEUE),
        (signal.SIGUSR1, True, REQUEUE),
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGINT, False, 130),
    ],
)
def test_only_a_saved_run_that_no_person_stopped_is_to_start_again(
    tmp_path: Path, number: int, saved: bool, status: int
) -> None:
    checkpoint = tmp_path / "checkpoints" / "iter_0000003" if saved else None
    ending = Ending(number, 3, checkpoint)
    assert ending.status == status
    ending.mark(tmp_path)
    if status != REQUEUE:
        assert list(tmp_path.iterdir()) == []
        return
    facts = json.loads((tmp_path / "stopped.json").read_text())
    name = signal.Signals(number).name
    assert facts == {"signal": name, "exit_code": 85, "step": 3, "checkpoint": "checkpoints/iter_0000003"}


def test_a_divergence_comes_before_a_signal(tmp_path: Path) -> None:
    ending = Ending(signal.SIGTERM, 3, tmp_path / "earlier", Divergence("loss", float("nan")))
    assert ending.status == DIVERGED
    ending.mark(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["diverged.json"]
    facts = json.loads((tmp_path / "diverged.json").read_text())
    assert (facts["what"], facts["value"], facts["step"]) == ("loss", "nan", 3)


def test_a_run_that_begins_removes_both_marks_and_nothing_else(tmp_path: Path) -> None:
    for name in ("stopped.json", "diverged.json", "metrics.jsonl"):
        (tmp_path / name).touch()
    unmark(tmp_path)
    unmark(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(UserError, match=r"^save: .* cannot be written"):
        unmark(tmp_path / "metrics.jsonl")


def test_a_request_listens_from_when_it_is_told_to_until_its_end() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest() as request:
        assert signal.getsignal(signal.SIGUSR1) is before
        request.listen()
        request.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.asked == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is before
