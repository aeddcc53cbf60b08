"""A disk that is full, and a folder that cannot be written: one line of error, and earlier checkpoints are intact."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.checkpoint.folders import locate
from megatron_ext.checkpoint.hf.convert import hf_to_megatron
from tests.checkpoint.models import write_model
from tests.conftest import SmallData
from tests.faults.test_kills import assert_complete
from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER, refusal_of_all, refused_command, series

COMMON = [*CONFIG, "--seq-length", 64, "--train-iters", 3, "--lr-warmup-iters", 1, "--save-interval", 1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """20 MiB: room for one checkpoint of 12.6 MB, not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("saving", [(), ("--async-save",)], ids=["sync", "async"])
def test_a_full_disk(alone: Commands, small_data: SmallData, small_disk: Path, saving: tuple[str, ...]) -> None:
    run = small_disk / "run"
    line = refused_command(alone, TRAINER, *COMMON, *small_data.flags, "--save", run, *saving)
    assert "No space left on device" in line
    assert "so the checkpoint of step 2 was not written" in line
    assert f"{run / 'checkpoints' / 'iter_0000001'} is the newest complete one; make room and start again" in line
    assert locate(run).folder == run / "checkpoints" / "iter_0000001"
    assert_complete(run)
    assert not list(run.glob("checkpoints/*.incomplete"))
    # with enough space the same command continues
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    alone.run(TRAINER, *COMMON, *small_data.flags, "--save", run, "--load", run, *saving)
    assert locate(run).folder == run / "checkpoints" / "iter_0000003"


def test_a_disk_too_full_for_metrics(alone: Commands, small_data: SmallData, small_disk: Path) -> None:
    """The message names the file, and the last checkpoint stays usable."""
    run = small_disk / "run"
    common = [*COMMON, *small_data.flags, "--save", run, "--window-schedule", "constant", "--lr-decay-iters", 600]
    common += ["--eval-interval", 0, "--save-interval", 1000]
    alone.run(TRAINER, *common, "--train-iters", 2)
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - 8_192))
    message = refused_command(alone, TRAINER, *common, "--load", run, "--train-iters", 600)
    assert f"{run}/metrics.jsonl: No space left on device" in message
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    alone.run(TRAINER, *common, "--load", run, "--train-iters", 4)
    assert series(run, "step") == [0, 1, 2, 3]


def test_an_export_onto_a_full_disk(alone: Commands, small_disk: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "run", small_disk / "export"
    wide = {"vocab_size": 8000, "hidden_size": 320, "head_dim": 8}  # 23 MB
    hf_to_megatron(write_model(tmp_path / "model", "llama", **wide), run)
    export = ("megatron-to-hf", "--input", run, "--output", output, "--tokenizer", "none")
    assert "No space left on device" in refused_command(alone, "tools/convert_checkpoint.py", *export)
    assert not list(small_disk.iterdir())


def test_a_read_only_disk(alone: Commands, small_data: SmallData, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    line = refused_command(alone, TRAINER, *COMMON, *small_data.flags, "--save", small_disk / "run")
    assert line.startswith(f"save: {small_disk / 'run'} cannot be written (Read-only file system)")


def test_a_folder_where_a_file_belongs(small_data: SmallData, tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    processes = Commands(2).attempt(TRAINER, *COMMON, *small_data.flags, "--save", tmp_path / "run")
    assert "metrics.jsonl cannot be written (Is a directory); choose another folder or" in refusal_of_all(processes)
