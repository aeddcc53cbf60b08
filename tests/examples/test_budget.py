"""docs/experiments: budget.py at the smallest scale; pages follow from their runs."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "docs" / "experiments"


def test_every_experiment_can_be_imported() -> None:
    """Each import has its own process: a package of the tests has the name of an experiment."""
    names = " ".join(path.stem for path in EXPERIMENTS.glob("*.py"))
    command = [sys.executable, "-c", f"import {names.replace(' ', ', ')}"]
    subprocess.run(command, cwd=EXPERIMENTS, check=True)


@pytest.mark.parametrize("name", sorted(page.stem for page in EXPERIMENTS.glob("*.md") if page.stem != "README"))
def test_pages_follow_from_their_runs(name: str) -> None:
    subprocess.run([sys.executable, EXPERIMENTS / f"{name}.py", "--check"], cwd=ROOT, check=True)


@pytest.mark.parametrize("page", ["| run | loss |\n| a | 1.5 |\n| a | 1.4 |", "No table."])
def test_a_page_that_does_not_follow_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    check = importlib.import_module("harness").check
    (tmp_path / "page.json").write_text("1.5")
    file = tmp_path / "page.md"
    file.write_text("Text\n\n| run | loss |\n| a | 1.5 |\n\nMore text")
    check(file, lambda loss: f"| run | loss |\n| a | {loss} |\n")
    file.write_text(page)
    with pytest.raises(SystemExit, match=r"page\.md"):
        check(file, lambda loss: f"| run | loss |\n| a | {loss} |\n")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_experiment_at_its_smallest_scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The grid grows beyond its best rate; called again, the command trains nothing and writes the same page."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    novels, out = tmp_path / "novels", tmp_path / "out"
    novels.mkdir()
    for number, name in enumerate(("one", "two", *importlib.import_module("harness").HELD_OUT_NOVELS)):
        draw = np.random.default_rng(number)
        lines = [" ".join(draw.choice(["park", "dog", "Lily", "went", "saw"], 12)) + "\n" for _ in range(2000)]
        (novels / f"{name}.txt").write_text("".join(lines))
    command = [sys.executable, ROOT / "docs/experiments/budget.py", novels, out, "--tuned", "4", "--budgets", "2", "4"]
    command += ["--rates", "3.2e-2", "6.4e-2", "--tuning-seeds", "1", "--seeds", "8", "9", "--held-out", "3"]
    results = []
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        results.append([(out / "results" / name).read_text() for name in ("budget.md", "budget.jsonl")])
    assert results[0] == results[1]
    runs = [json.loads(line)["run"] for line in results[0][1].splitlines()]
    tuned = [run for run in runs if run["seed"] == 1]
    constant, growing = ({run["rate"] for run in tuned if run["arm"] == arm} for arm in ("constant", "growing"))
    assert constant == growing > {3.2e-2, 6.4e-2}
    assert sum(run["seed"] > 1 for run in runs) == 8
    assert "per doubling" in results[0][0]
    assert (out / "results" / "budget.png").stat().st_size > 0
