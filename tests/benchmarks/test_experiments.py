"""The experiments of docs/experiments: what they plan is what the trainer takes, and their intervals are Student's."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from megatron_ext.config.arguments import parse
from megatron_ext.config.validation import check
from megatron_ext.schedule import ScheduleKind

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"
DATA: list[object] = [
    "--data-path",
    "data/train",
    "--valid-data-path",
    "data/valid",
    "--eval-interval",
    10,
    "--vocab-size",
    512,
]


@pytest.mark.parametrize("script", ["prolong_twin.sh", "token_weighting.sh"])
def test_a_script_without_its_folders_says_which(script: str) -> None:
    done = subprocess.run(["bash", FOLDER / script, "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(f"{script}: got 1 words, needs NOVELS HF OUT\n")


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import each other, as they do where they are started."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("harness", "token_weighting"):
        sys.modules.pop(name, None)


def script(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


@pytest.mark.parametrize("name", ["skyladder", "context_window", "token_weighting_names"])
def test_every_planned_run_is_one_that_the_trainer_takes(name: str, tmp_path: Path) -> None:
    experiment, seeds = script(name), (1, 2)
    plans = experiment.planned(seeds, tmp_path) if name == "token_weighting_names" else experiment.planned(seeds)
    assert len({plan.folder(tmp_path) for plan in plans}) == len(plans)
    common = getattr(experiment, "COMMON", None) or [*experiment.SHAPE, *experiment.OPTIMIZER, "--seq-length", 1024]
    configs = set()
    for plan in plans:
        config = parse([str(word) for word in (*DATA, *common, "--train-iters", 500, *plan.flags)])
        check(config, 1)
        if plan.seed == seeds[0]:
            configs.add(str(config))
    assert len(configs) == len(plans) // len(seeds)


def test_all_schedules_of_skyladder_end_at_the_same_step(tmp_path: Path) -> None:
    """All but the constant one have the whole row from 64 % of the steps on; long to short falls until then."""
    experiment = script("skyladder")
    kinds = set()
    for plan in experiment.planned([1]):
        config = parse([str(word) for word in (*DATA, *experiment.COMMON, "--train-iters", 500, *plan.flags)])
        schedule = config.window_schedule()
        kinds.add(schedule.kind)
        full = [step for step in range(500) if schedule.window_at(step) < experiment.ROW]
        assert (max(full, default=-1) in range(310, 321)) == (schedule.kind is not ScheduleKind.CONSTANT), plan.name
    assert len(kinds) == len(experiment.SCHEDULES)


def test_intervals_are_students() -> None:
    mean = script("harness").Mean
    values = [0.1, 0.3, 0.2, 0.6]
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    found = mean.of(values)
    assert (found.value - found.half_width, found.value + found.half_width) == pytest.approx((low, high))
    assert found.significant == (low > 0)
    assert str(mean.of([0.5, 0.5002])) == "**+0.5001 ± 0.0013**"
    assert str(mean.of([0.5, -0.5])).startswith("+0.0000 ± ")
    assert np.isnan(mean.of([0.5]).half_width)
    assert not mean.of([0.5]).significant


def test_pieces_lose_nothing() -> None:
    text = "one line\nanother line\n\nthe third\nno newline"
    cut = list(script("harness").pieces(text, 10))
    assert "".join(cut) == text
    assert cut == ["one line\nanother line\n", "\nthe third\n", "no newline"]


def test_held_out_texts_are_not_trained_on(tmp_path: Path) -> None:
    harness = script("harness")
    novels = tmp_path / "novels"
    novels.mkdir()
    for name in ("camilla", *harness.HELD_OUT_NOVELS):
        (novels / f"{name}.txt").write_text(f"{name}\n" * 3000)
    library = tmp_path / "library.jsonl"
    library.write_text("".join(f'{{"text": "package {n} "}}\n' for n in range(16)))
    harness._write_texts(novels, library, tmp_path, None)
    train, held_out = ((tmp_path / f"{name}.jsonl").read_text() for name in ("train", "valid-novels"))
    assert len(train.splitlines()) == 1 + 14
    assert not any(name in train for name in harness.HELD_OUT_NOVELS)
    assert not any(f"package {n} " in train for n in (0, 8))
    assert (tmp_path / "valid-library.jsonl").read_text().count("package") == 2
    assert "camilla" not in held_out
    assert len(held_out.splitlines()) > 2 * len(harness.HELD_OUT_NOVELS)
