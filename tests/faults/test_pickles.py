"""Files that a user was given are never unpickled: each kind with a malicious pickle inside is refused by name."""

from __future__ import annotations

import io
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
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

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


def list_of_tensors(folder: Path, evil: Evil) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(evil))
    return ".metadata"


def list_with_one_more_entry(folder: Path, evil: Evil) -> str:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata"


def every_tensor(folder: Path, evil: Evil) -> str:
    content = record(evil)
    (folder / "__0_0.distcp").write_bytes(content)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data = {
        index: replace(info, offset=0, length=len(content)) for index, info in metadata.storage_data.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return "__0_0.distcp"


def an_object_beside_the_tensors(folder: Path, evil: Evil) -> str:
    content = record([evil])
    (folder / "__9_0.distcp").write_bytes(content)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    some = next(iter(metadata.storage_data.values()))
    metadata.state_dict_metadata["evil"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("evil")] = replace(
        some, relative_path="__9_0.distcp", offset=0, length=len(content)
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata"


def a_file_elsewhere(folder: Path, evil: Evil) -> str:
    (folder.parent / "elsewhere").write_bytes(record(evil))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data = {
        index: replace(info, relative_path="../elsewhere") for index, info in metadata.storage_data.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata"


@pytest.fixture(scope="module")
def saved(alone: Commands, small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pickles") / "run"
    alone.run(SCRIPT, *COMMON, *small_data.flags, "--train-iters", 1, "--save", run)
    return run


def sign(folder: Path) -> None:
    """What an attacker does as well: a manifest whose sizes and checksums are right."""
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    replace(Manifest.read(folder), files={name: facts_of(folder / name) for name in names}).write(folder)


@pytest.mark.parametrize("use", ["--load", "--init-from"])
@pytest.mark.parametrize(
    "plant",
    [
        list_of_tensors,
        list_with_one_more_entry,
        every_tensor,
        an_object_beside_the_tensors,
        a_file_elsewhere,
    ],
)
def test_a_malicious_file_is_refused_by_name_and_never_runs(
    alone: Commands,
    small_data: SmallData,
    saved: Path,
    tmp_path: Path,
    plant: Callable[[Path, Evil], str],
    use: str,
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


def test_the_pickle_is_malicious(tmp_path: Path) -> None:
    """Without which nothing above could fail."""
    pickle.loads(pickle.dumps(Evil(tmp_path / "plain")))
    torch.load(io.BytesIO(record([Evil(tmp_path / "record")])), weights_only=False)
    assert (tmp_path / "plain").is_dir()
    assert (tmp_path / "record").is_dir()
