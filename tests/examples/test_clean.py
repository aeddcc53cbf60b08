"""`make clean` and the demo's start remove what was made, and nothing of a user's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ["corpus.jsonl", "corpus.bin", "corpus.idx", "corpus.json", "corpus.parts/lock"]
CORPUS += ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
RUN = [
    "config.yaml",
    "metrics.jsonl",
    "evaluation.jsonl",
    "report.html",
    "tensorboard/events.out.tfevents.1",
]
RUN += ["checkpoints/iter_0000060/manifest.json", "checkpoints/iter_0000060.ab.left/manifest.json"]
RUN += ["checkpoints/latest_checkpointed_iteration.txt", *(f"data/{name}" for name in CORPUS)]
SMOKE, DEMO = [f"data/smoke/{name}" for name in CORPUS], [f"runs/demo/{name}" for name in RUN]
CACHES = [".venv/bin/python", ".pytest_cache/x", ".ruff_cache/x", ".mypy_cache/x", ".hypothesis/x"]
OWN = ["data/mine.bin", "data/smoke/notes.txt", "data/smoke/tokenizer/merges.txt", "runs/smoke/metrics.jsonl"]
OWN += ["runs/long/checkpoints/iter_0000040/manifest.json", "runs/demo/notes.txt"]
OWN += ["runs/demo/checkpoints/kept/manifest.json"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("clean.sh", "demo.sh"):
        shutil.copy(ROOT / "examples" / name, tmp_path / "examples")
    return tmp_path


def fill(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("content")


def left(folder: Path) -> list[str]:
    roots = [folder / name for name in ("data", "runs", *(cache.split("/")[0] for cache in CACHES))]
    return sorted(str(path.relative_to(folder)) for root in roots for path in root.rglob("*") if path.is_file())


def test_clean_removes_what_was_made_and_nothing_else(checkout: Path) -> None:
    fill(checkout, [*SMOKE, *DEMO, *CACHES, *OWN])
    subprocess.run(["make", "clean"], cwd=checkout, check=True, capture_output=True, text=True)
    assert left(checkout) == sorted(OWN)
    assert not (checkout / "runs/demo/data").exists()


def test_a_demo_begins_anew_and_spares_what_is_not_its_own(checkout: Path) -> None:
    fill(checkout, [*DEMO, *OWN])
    tools = checkout / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "torchrun"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    subprocess.run(["examples/demo.sh"], cwd=checkout, env=os.environ, check=True, capture_output=True, text=True)
    assert [name for name in left(checkout) if not name.startswith(".venv")] == sorted(OWN)
