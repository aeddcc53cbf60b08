"""Commands run by a shell: a closed pipe, a full disk, another working directory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SmallData
from tests.launcher import ROOT, clean_environment, torchrun
from tests.runs import CONFIG, TRAINER


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    bash = ["bash", "-c", command]
    environment = clean_environment() | {"PYTHON": sys.executable}
    return subprocess.run(bash, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_a_closed_output_pipe_is_no_error(tmp_path: Path) -> None:
    """Run from a folder other than the repository."""
    done = run(f"$PYTHON {ROOT}/tools/recipes.py --list | true; echo ${{PIPESTATUS[0]}}", tmp_path)
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.slow
def test_standard_output_that_is_full_or_closed(tmp_path: Path) -> None:
    done = run(f"$PYTHON {ROOT}/tools/recipes.py --list > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = run(f"$PYTHON {ROOT}/tools/recipes.py --list {closed}", tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), closed
        done = run(f"$PYTHON {ROOT}/tools/recipes.py --nonsense {closed}", tmp_path)
        assert done.returncode == 2, closed
        assert "Traceback" not in done.stderr + done.stdout, closed


@pytest.mark.slow
def test_only_our_own_lines_are_on_stderr(small_data: SmallData, tmp_path: Path) -> None:
    """Warnings of torch and Megatron-Core about each other are hidden: the user cannot act on them."""
    words = ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--train-iters", 1, "--lr-warmup-iters", 0]
    words += ["--use-distributed-optimizer"]
    flags = [*CONFIG, *small_data.flags, *words, "--seq-length", 64, "--save", tmp_path / "run"]
    (done,) = torchrun(2, TRAINER, *flags).finish()
    assert done.status == 0, done.stderr
    assert not re.search(r"Warning|DEPRECATED|DistributedDataParallel", done.stderr), done.stderr
