"""The first steps of a few runs give the losses that they gave when losses.json was written.

    dense       documents of a growing window
    sliding     a sliding window, a shorter one in every second layer, and YaRN
    weighted    token weights from a second pass with a shorter context
    qwen3 ...   one run of each model family

Other tests say that two ways of computing agree; this one that neither has moved. Where a change is meant to move them,
`make golden` writes the file anew, and the change's message says why.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER, read_jsonl

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
FILE = FOLDER / "losses.json"
FACTS = ("window", "segments", "denominator")
LOSSES = ("lm_loss", "train_loss", "grad_norm")
# Another CPU or another release of torch sums fp32 in another order: that moves a loss by 1e-7 and the gradient norm,
# with six steps of Adam behind it, by a few times that. One token more or less in a loss or a mask moves both by 1e-3.
TOLERANCE = {"lm_loss": 1e-6, "train_loss": 1e-6, "grad_norm": 1e-5}
RUNS = yaml.safe_load((FOLDER / "runs.yaml").read_text())


def losses_of(name: str, folder: Path) -> dict[str, list[float]]:
    flags = [*RUNS["common"].split(), *RUNS["runs"][name].split()]
    Commands().run(TRAINER, *CONFIG, "--data-path", CORPUS, *flags, "--save", folder / name)
    records = read_jsonl(folder / name / "metrics.jsonl")
    return {key: [record[key] for record in records] for key in (*FACTS, *LOSSES)}


def write(kept: dict[str, dict[str, list[float]]]) -> None:
    """Write FILE with the runs in the order of RUNS and each series on a line of its own, so that a diff is read."""
    runs = []
    for name in RUNS["runs"]:
        lines = [f'  "{key}": {json.dumps(series)}' for key, series in kept.get(name, {}).items()]
        runs.append(f' "{name}": {{\n' + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(runs) + "\n}\n")


@pytest.mark.parametrize("name", RUNS["runs"])
def test_a_run_has_the_losses_that_it_had(name: str, tmp_path: Path) -> None:
    measured = losses_of(name, tmp_path)
    if os.environ.get("REWRITE_GOLDEN"):
        kept = json.loads(FILE.read_text()) if FILE.exists() else {}
        kept[name] = measured
        write(kept)
        return
    golden = json.loads(FILE.read_text())[name]
    assert {key: measured[key] for key in FACTS} == {key: golden[key] for key in FACTS}
    for key in LOSSES:
        np.testing.assert_allclose(measured[key], golden[key], rtol=TOLERANCE[key], atol=0, err_msg=key)


def test_the_runs_are_kept_and_differ() -> None:
    kept = json.loads(FILE.read_text())
    assert kept.keys() == RUNS["runs"].keys()
    assert len({tuple(run["lm_loss"]) for run in kept.values()}) == len(kept)
    assert kept["weighted"]["train_loss"] != kept["weighted"]["lm_loss"]  # the weights matter
