"""`preprocess.sbatch` and `score.sbatch` on a real Slurm: an array makes what one process makes."""

import functools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import SmallData
from tests.launcher import Commands
from tests.slurm.cluster import Cluster
from tests.slurm.test_launch import launch, refusal

SMALL = ["--cpus-per-task=1", "--time=10"]


def finish(cluster: Cluster, job: str, parts: int, folder: Path) -> None:
    """Wait until every task of the array has ended well."""

    def logs() -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(folder.rglob("*.log"))) + cluster.logs()

    assert {cluster.end_of(f"{job}_{part}", logs) for part in range(parts)} == {"COMPLETED"}, logs()


def environment(folder: Path, **settings: object) -> dict[str, str]:
    here = {"VENV": sys.prefix, "PYTHONPATH": os.environ["PYTHONPATH"], "LOGS": str(folder / "logs")}
    return here | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in settings.items()}


@pytest.fixture(scope="module")
def files(small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The corpus in five files, one of which has a space in its name."""
    folder = tmp_path_factory.mktemp("files")
    lines = small_data.prefix.with_suffix(".jsonl").read_text().splitlines(keepends=True)
    paths = [folder / f"text {number}.jsonl" if number == 2 else folder / f"text{number}.jsonl" for number in range(5)]
    for number, path in enumerate(paths):
        path.write_text("".join(lines[number::5]))
    return paths


@pytest.mark.slow
def test_each_task_preprocesses_its_files(
    cluster: Cluster, alone: Commands, small_data: SmallData, files: Sequence[Path], tmp_path: Path
) -> None:
    """Seven tasks for five files: two have nothing to do."""
    listed = tmp_path / "files.txt"
    listed.write_text("".join(f"{path}\n" for path in files))
    settings = environment(tmp_path, FILES=listed, PARTS=7, PREFIX=tmp_path / "part", TOKENIZER=small_data.tokenizer)
    output = f"--output={tmp_path}/job-%a.log"
    job = cluster.submit("--array=0-6", *SMALL, output, "examples/slurm/preprocess.sbatch", environment=settings)
    finish(cluster, job, 7, tmp_path)
    for number, path in enumerate(files):
        whole = tmp_path / f"whole{number}"
        flags = ["--input", path, "--output-prefix", whole, "--tokenizer-model", small_data.tokenizer]
        alone.run("tools/preprocess_data.py", *flags)
        for suffix in (".bin", ".idx"):
            written = (tmp_path / f"part-0000{number}").with_suffix(suffix)
            assert written.read_bytes() == whole.with_suffix(suffix).read_bytes()
    assert "no file left" in (tmp_path / "job-6.log").read_text()


def test_wrong_lists_of_files_are_refused(tmp_path: Path) -> None:
    """Task 0 of preprocess.sbatch up to the srun command, which it prints."""
    files = tmp_path / "files.txt"
    task = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_NTASKS": "1", "PARTS": "2", "TOKENIZER": "bytes"}
    task |= {"FILES": str(files), "PREFIX": str(tmp_path / "part"), "script": "examples/slurm/preprocess.sbatch"}
    submit = functools.partial(launch, tmp_path, **task)

    files.write_text(" \n\n")
    assert f"FILES: {files} is missing or empty, needs one input per line" in refusal(submit())
    files.write_text("\na b.jsonl\nc.jsonl\n")
    assert shlex.split(submit().stdout)[-8:-7] == ["a b.jsonl"]
    assert "needs PARTS=1, or GROUPED=1 where each key lies in one file" in refusal(submit("--concat-by=repo"))
    assert submit("--concat-by=repo", GROUPED="1").returncode == 0


@pytest.mark.slow
def test_an_array_fills_one_store(cluster: Cluster, alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=1031, **sizes)).save_pretrained(tmp_path / "model")
    flags = ["--config", "examples/configs/cpu_smoke.yaml", *small_data.flags, "--seq-length", 64]
    flags += ["--micro-batch-size", 1, "--context", 16, "--rows", 7, "--device", "cpu"]
    settings = environment(tmp_path, SCORER=tmp_path / "model", STORE=tmp_path / "scores.zarr", PARTS=2)
    options = ["--array=0-1", "--ntasks-per-node=1", "--gpus-per-node=1", *SMALL, f"--output={tmp_path}/job-%a.log"]
    job = cluster.submit(*options, "examples/slurm/score.sbatch", *flags, environment=settings)
    finish(cluster, job, 2, tmp_path)
    alone.run("tools/score_tokens.py", "--checkpoint", tmp_path / "model", "--output", tmp_path / "alone.zarr", *flags)
    by_array, by_one_process = (zarr.open_array(tmp_path / name, mode="r")[:] for name in ("scores.zarr", "alone.zarr"))
    assert not np.isnan(by_one_process).any()
    np.testing.assert_array_equal(by_array, by_one_process)
