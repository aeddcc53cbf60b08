"""How a run that has ended tells its launcher: the exit status, and the file in the run's folder."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megatron_ext.errors import DivergedError, UserError
from megatron_ext.run.signals import DIVERGED, REQUEUE, Ending, StopRequest, unmark


@pytest.mark.parametrize(
    ("number", "saved", "status"),
    [
        (0, True, 0),
        (signal.SIGTERM, True, REQUEUE),
        (signal.SIGUSR1, True, REQUEUE),
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
    ],
)
def test_only_a_saved_run_that_no_person_stopped_is_restarted(
    tmp_path: Path, number: int, saved: bool, status: int
) -> None:
    ending = Ending(number, 3, tmp_path / "checkpoints" / "iter_0000003" if saved else None)
    assert ending.status == status
    ending.mark(tmp_path)
    if status != REQUEUE:
        assert list(tmp_path.iterdir()) == []
        return
    facts = json.loads((tmp_path / "stopped.json").read_text())
    name = signal.Signals(number).name
    assert facts == {"signal": name, "exit_code": 85, "step": 3, "checkpoint": "checkpoints/iter_0000003"}


def test_divergence_takes_precedence_and_a_new_run_removes_the_files(tmp_path: Path) -> None:
    ending = Ending(signal.SIGTERM, 3, tmp_path / "earlier", DivergedError("loss", float("nan")))
    assert ending.status == DIVERGED
    ending.mark(tmp_path)
    facts = json.loads((tmp_path / "diverged.json").read_text())
    assert (facts["what"], facts["value"], facts["step"]) == ("loss", "nan", 3)
    for name in ("stopped.json", "metrics.jsonl"):
        (tmp_path / name).touch()
    unmark(tmp_path)
    unmark(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(UserError, match=r"^save: .* cannot be written"):
        unmark(tmp_path / "metrics.jsonl")


def test_a_request_records_signals_from_listen_until_its_end() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest() as request:
        assert signal.getsignal(signal.SIGUSR1) is before
        request.listen()
        request.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.signal == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is before
