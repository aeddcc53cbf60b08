"""Files that a user was given are never unpickled: each kind with a malicious pickle inside is refused by name."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import SmallData
from launcher import Commands
from runs import CONFIG

from megatron_ext.checkpoint.manifest import Manifest, facts_of

SCRIPT = "pretrain_skyladder.py"
COMMON = [*CONFIG, "--seq-length", 64, "--lr-decay-iters", 40]
CHECKPOINT = "iter_0000001"


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


def record(value: object) -> bytes:
    """As torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def every_tensor(folder: Path, evil: Evil) -> str:
    content = record(evil)
    (folder / "__0_0.distcp").write_bytes(content)
    index = json.loads((folder / "tensors.json").read_bytes())
    for tensor in index.values():
        for block in tensor["blocks"]:
            block |= {"file": "__0_0.distcp", "first": 0, "length": len(content)}
    (folder / "tensors.json").write_text(json.dumps(index))
    return "__0_0.distcp"


def a_file_elsewhere(folder: Path, evil: Evil) -> str:
    (folder.parent / "elsewhere").write_bytes(record(evil))
    index = json.loads((folder / "tensors.json").read_bytes())
    for tensor in index.values():
        for block in tensor["blocks"]:
            block["file"] = "../elsewhere"
    (folder / "tensors.json").write_text(json.dumps(index))
    return "tensors.json"


@pytest.fixture(scope="module")
def saved(alone: Commands, small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pickles") / "run"
    alone.run(SCRIPT, *COMMON, *small_data.flags, "--train-iters", 1, "--save", run)
    return run


def sign(folder: Path) -> None:
    """What an attacker does as well: a manifest whose sizes and checksums are right."""
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    replace(Manifest.read(folder), files={name: facts_of(folder / name) for name in names}).write(folder)


@pytest.mark.parametrize(("plant", "use"), [(every_tensor, "--load"), (a_file_elsewhere, "--init-from")])
def test_a_malicious_file_is_refused_by_name_and_never_runs(
    alone: Commands, small_data: SmallData, saved: Path, tmp_path: Path, plant: Callable[[Path, Evil], str], use: str
) -> None:
    run, mark = Path(shutil.copytree(saved, tmp_path / "run")), tmp_path / "mark"
    folder = run / "checkpoints" / CHECKPOINT
    name = plant(folder, Evil(mark))
    sign(folder)
    (done,) = alone.attempt(SCRIPT, *COMMON, *small_data.flags, "--train-iters", 2, use, run)
    assert not mark.exists()
    assert done.status == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: load: ")]
    assert line.startswith(f"error: load: {folder / name} ")


def test_torchs_own_index_is_not_read(alone: Commands, small_data: SmallData, saved: Path, tmp_path: Path) -> None:
    run, mark = Path(shutil.copytree(saved, tmp_path / "run")), tmp_path / "mark"
    folder = run / "checkpoints" / CHECKPOINT
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    sign(folder)
    alone.run(SCRIPT, *COMMON, *small_data.flags, "--train-iters", 2, "--load", run)
    assert not mark.exists()
