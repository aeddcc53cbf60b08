"""What the job scripts make of values and files from outside, and of the ends of a run; without Slurm.

srun, squeue, scontrol and scancel are those of a folder that comes first in PATH: srun ends as it is told.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = "examples/slurm/launch.sh"
PROGRAMS = {
    "srun": 'eval "$SRUN"',
    "squeue": 'eval "$SQUEUE"',
    "scontrol": 'eval "$SCONTROL"',
    "scancel": 'eval "$SCANCEL"',
    "sleep": ":",
}
JOB = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
ANSWERS = {"SQUEUE": "echo RUNNING", "SCONTROL": 'echo "scontrol $*"'}


def call(tmp_path: Path, script: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A job script in a job of two ranks; `settings` are its environment."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for name, text in PROGRAMS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tools / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment = (
        kept | JOB | ANSWERS | {"RUN": str(tmp_path / "run"), "PATH": f"{tools}:{os.environ['PATH']}"} | settings
    )
    return subprocess.run(
        ["bash", script, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def requeued(done: subprocess.CompletedProcess[str]) -> bool:
    return "scontrol requeue 4711" in done.stdout


@pytest.mark.parametrize(
    ("srun", "status", "again"),
    [
        ("exit 87", 87, True),
        ('mkdir -p "$RUN/64k"; touch "$RUN/64k/diverged.json"; exit 1', 86, False),
        ("exit 130", 130, False),
    ],
)
def test_what_is_requeued(tmp_path: Path, srun: str, status: int, again: bool) -> None:
    done = call(tmp_path, LAUNCH, "python", SRUN=srun)
    assert (done.returncode, requeued(done)) == (status, again), done.stdout + done.stderr


def crashes(tmp_path: Path, content: str) -> Path:
    file = tmp_path / "run" / "logs" / "4711.crashes"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


@pytest.mark.parametrize("content", ["a[$(touch${IFS}%s)] none\n", ""])
def test_a_file_of_crashes_is_no_program(tmp_path: Path, content: str) -> None:
    mark = tmp_path / "mark"
    file = crashes(tmp_path, content.replace("%s", str(mark)))
    done = call(tmp_path, LAUNCH, "python", SRUN="exit 1")
    assert not mark.exists()
    assert (done.returncode, requeued(done)) == (1, False)
    assert f"{file}: got '" in done.stdout
    assert "needs a number of starts: not requeued" in done.stdout


@pytest.mark.parametrize(("running", "runs"), [("4711\n4712", True), ("4711\n47120", False)])
def test_the_job_that_has_the_run(tmp_path: Path, running: str, runs: bool) -> None:
    """Array tasks have names of their own, and whose controller does not answer starts."""
    (tmp_path / "run").mkdir()
    for other in ("4712", "4700_3", "x"):
        (tmp_path / "run" / f"slurm-{other}.job").touch()
    asked = f'echo "$*" >{tmp_path}/asked; echo "{running}"'
    done = call(tmp_path, LAUNCH, "python", SRUN="exit 0", SQUEUE=asked)
    assert (done.returncode, "where job 4712 still runs" in done.stderr) == ((2, True) if runs else (0, False))
    assert "--jobs=4711,4700_3,4712" in (tmp_path / "asked").read_text()
    assert not (tmp_path / "run" / "slurm-4711.job").exists()
    assert (tmp_path / "run" / "slurm-4712.job").exists() is runs
    (tmp_path / "run" / "slurm-4712.job").touch()
    assert call(tmp_path, LAUNCH, "python", SRUN="exit 0", SQUEUE="exit 1").returncode == 0


def test_a_controller_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    busy = 'n=$(cat "$RUN/n" 2>/dev/null || echo 0); echo $((n + 1)) >"$RUN/n"; ((n >= 3))'
    done = call(tmp_path, LAUNCH, "python", SRUN="exit 85", SQUEUE=f"{busy} && echo RUNNING")
    assert (done.returncode, requeued(done)) == (85, True)
    done = call(tmp_path, LAUNCH, "python", SRUN="exit 85", SCONTROL="exit 1")
    assert done.returncode == 85
    assert "job 4711: not requeued: Slurm did not take it; submit the same command again" in done.stdout


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_RESTART_COUNT", "MASTER_PORT", "MAX_CRASHES", "GRACE_S"])
def test_only_digits_reach_arithmetic(tmp_path: Path, name: str) -> None:
    given = f"a[$(touch${{IFS}}{tmp_path / 'mark'})]"
    done = call(tmp_path, LAUNCH, "python", SRUN="exit 1", **{name: given})
    assert not (tmp_path / "mark").exists()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"launch.sh: {name}: got '{given}', needs a number; correct or unset it\n"
