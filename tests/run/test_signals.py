"""How a run that has ended tells its launcher: the exit status, and the file in the run's folder."""

import json
import signal
from pathlib import Path

from megatron_ext.errors import DivergedError
from megatron_ext.run.signals import DIVERGED, Ending


def test_divergence_takes_precedence(tmp_path: Path) -> None:
    ending = Ending(signal.SIGTERM, 3, tmp_path / "earlier", DivergedError("loss", float("nan")))
    assert ending.status == DIVERGED
    ending.mark(tmp_path)
    facts = json.loads((tmp_path / "diverged.json").read_text())
    assert (facts["what"], facts["value"], facts["step"]) == ("loss", "nan", 3)
