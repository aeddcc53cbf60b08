"""`make clean` and the demo's start remove what was made, and nothing of a user's."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ["corpus.jsonl", "corpus.bin", "corpus.parts/lock", "tokenizer/tokenizer.json"]
RUN = ["config.yaml", "metrics.jsonl", "tensorboard/events.out.tfevents.1", "checkpoints/iter_0000060/manifest.json"]
MADE = [f"data/smoke/{name}" for name in CORPUS] + [f"runs/demo/{name}" for name in RUN]
MADE += [f"runs/demo/data/{name}" for name in CORPUS]
CACHES = [".venv/bin/python", ".pytest_cache/x", ".ruff_cache/x", ".mypy_cache/x", ".hypothesis/x"]
OWN = ["data/mine.bin", "data/smoke/notes.txt", "data/smoke/tokenizer/merges.txt", "runs/long/metrics.jsonl"]
OWN += ["runs/demo/notes.txt"]


def test_clean_and_a_demo_remove_what_was_made_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("clean.sh", "demo.sh"):
        shutil.copy(ROOT / "examples" / name, tmp_path / "examples")

    def left_by(*command: str) -> list[str]:
        for name in [*MADE, *OWN]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("content")
        subprocess.run(command, cwd=tmp_path, env=os.environ, check=True, capture_output=True, text=True)
        files = [path for folder in ("data", "runs") for path in (tmp_path / folder).rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(tmp_path)) for path in files)

    for name in CACHES:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert left_by("make", "clean") == sorted(OWN)
    assert not any((tmp_path / name).exists() for name in CACHES)
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "torchrun"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    smoke = [name for name in MADE if name.startswith("data/smoke")]
    assert left_by("examples/demo.sh") == sorted([*OWN, *smoke])
