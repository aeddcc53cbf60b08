"""The search for layouts: what it lists is legal and fits, and nothing that it passed over would have been better."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.config import Config
from megatron_ext.config.arguments import parse, parse_stages
from megatron_ext.config.validation import mistakes
from megatron_ext.planning.memory import estimate
from megatron_ext.planning.search import ROOM, candidates, search
from megatron_ext.planning.step_time import read_speeds

ROOT = Path(__file__).resolve().parents[2]
SPEEDS = read_speeds()
VOCABULARY = {"skyladder/skyladder_1b_32k.yaml": 32000, "prolong/prolong_8b.yaml": 128256}


def recipe(name: str) -> Config:
    return parse_stages(["--config", str(ROOT / "examples" / "configs" / name)])[0].config


@pytest.mark.parametrize(("name", "gpus"), [("skyladder/skyladder_1b_32k.yaml", 16), ("prolong/prolong_8b.yaml", 64)])
def test_what_is_listed_is_legal_fits_and_is_sorted(name: str, gpus: int) -> None:
    found = search(recipe(name), gpus, "H100", VOCABULARY[name], SPEEDS, top=5)
    assert len(found.best) == 5
    for layout in found.best:
        assert list(mistakes(layout.config, gpus)) == []
        assert layout.memory == estimate(layout.config, gpus, VOCABULARY[name]).total <= ROOM * 80 * 2**30
    assert [layout.seconds for layout in found.best] == sorted(layout.seconds for layout in found.best)


def test_no_legal_layout_that_fits_is_faster_than_the_best() -> None:
    config, gpus, vocabulary = recipe("skyladder/skyladder_1b_32k.yaml"), 8, 32000
    best = search(config, gpus, "H100", vocabulary, SPEEDS, top=1).best[0]
    everything = search(config, gpus, "H100", vocabulary, SPEEDS, top=10**6).best
    legal = [
        one
        for one in candidates(config, gpus, SPEEDS.gpu("H100"))
        if estimate(one, gpus, vocabulary).total <= ROOM * 80 * 2**30 and not list(mistakes(one, gpus))
    ]
    assert len(everything) == len(legal) > 20
    assert best.seconds == min(layout.seconds for layout in everything)


def test_more_memory_is_suggested_only_where_it_is_faster() -> None:
    found = search(recipe("prolong/prolong_8b.yaml"), 64, "H100", 128256, SPEEDS, top=1)
    assert found.larger is not None
    assert found.larger.seconds < found.best[0].seconds
    assert found.larger.memory > ROOM * 80 * 2**30


def plan_run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/plan_run.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_written_configuration_passes_a_dry_run(tmp_path: Path) -> None:
    output = tmp_path / "plan.yaml"
    given = ("--config", "examples/configs/skyladder/skyladder_1b_32k.yaml", "--gpus", "16", "--gpu", "h100")
    done = plan_run(*given, "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "the window schedule saves" in done.stdout
    check = [sys.executable, "pretrain_skyladder.py", "--config", str(output), "--dry-run", "--world-size", "16"]
    dry = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert dry.returncode == 0, dry.stderr
    assert parse(["--config", str(output)]).parallel.use_distributed_optimizer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "H300"], "gpu: got 'H300', needs one of"),
        (["--gpus", "0"], "gpus, top: got 0 and 5, need 1 or more"),
        (["--stage", "third"], "stage: got 'third', needs one of"),
        (["--num-experts", "8"], "num_experts: got 8, the times of tools/plan_run.py are those of models without"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str) -> None:
    done = plan_run("--config", "examples/configs/prolong/prolong_8b.yaml", "--gpus", "8", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
