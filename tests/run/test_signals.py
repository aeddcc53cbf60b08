"""How a run that has ended tells its launcher: the exit status, and the file in the run's folder."""

import json
import signal
from pathlib import Path

import pytest

from megatron_ext.errors import DivergedError, UserError
from megatron_ext.run.signals import DIVERGED, Ending, unmark


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
