"""`examples/slurm/launch.sh`: its command line, and what it makes of the ends of real jobs."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.slurm.cluster import JOB_S, ROOT, Cluster, wait_until

LAUNCH = "examples/slurm/launch.sh"
PRETRAIN = "examples/slurm/pretrain.sbatch"
FIRST_START = "[[ ! ${SLURM_RESTART_COUNT:-} ]]"
POINTER = '"$RUN/64k/checkpoints/latest_checkpointed_iteration.txt"'  # a stage's
SAVE = f'mkdir -p "$RUN/64k/checkpoints"; echo "${{SLURM_RESTART_COUNT:-0}}" >{POINTER}'
TWO_NODES = {"SLURM_JOB_NUM_NODES": "2"}


def launch(tmp_path: Path, *words: str, script: str = LAUNCH, **settings: str) -> subprocess.CompletedProcess[str]:
    """launch.sh, or a script that calls it, by itself, as in a job of two ranks, without srun."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    job = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]", "DRY_RUN": "1"}
    environment = kept | job | {"RUN": str(tmp_path / "run")} | settings
    return subprocess.run(
        ["bash", script, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_dry_run_prints_the_command(tmp_path: Path) -> None:
    done = launch(tmp_path, "python", "train.py", "--name", "two words")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[0] == "srun"
    assert words[-4:] == ["python", "train.py", "--name", "two words"]
    assert f"--output={tmp_path}/run/logs/4711-node%n-%N.log" in words
    assert not any(word.startswith("--container") for word in words)
    assert not (tmp_path / "run").exists()
    settings = {"CONTAINER_IMAGE": "/images/trainer.sqsh", "CONTAINER_MOUNTS": "/data:/data:ro"}
    words = shlex.split(launch(tmp_path, "python", **settings).stdout)
    mounts = f"--container-mounts={ROOT}:{ROOT},{tmp_path}/run:{tmp_path}/run,/data:/data:ro"
    assert {"--container-image=/images/trainer.sqsh", mounts, f"--container-workdir={ROOT}"} <= set(words)
    assert words.index("--no-container-mount-home") < words.index("bash")


def test_the_run_is_no_flag(tmp_path: Path) -> None:
    message = refusal(launch(tmp_path, "--lr", "1e-4", flag := "--save=x", script=PRETRAIN))
    assert f": got {flag}, needs none, as the script gives RUN for it; leave it out" in message
    assert f"write the step into {tmp_path}/run/checkpoints/latest_checkpointed_iteration.txt" in message
    assert launch(tmp_path, "--load-latest-complete", "--save-interval", "5", script=PRETRAIN).returncode == 0


def test_the_checkout_is_what_runs(tmp_path: Path) -> None:
    """Inside the task, where an image may have a PYTHONPATH of its own, and a package installed."""
    ask = "import sys, os; print(os.environ['RANK'], os.environ['PYTHONPATH'], sys.argv[1:])"
    words = shlex.split(launch(tmp_path, sys.executable, "-c", ask, "two words", CONTAINER_IMAGE="x").stdout)
    task = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "PYTHONPATH": "/image/packages"}
    done = subprocess.run(
        words[words.index("bash") :], cwd=ROOT, env=os.environ | task, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"3 {ROOT}:/image/packages ['two words']"


@pytest.mark.parametrize(
    ("words", "settings", "text"),
    [
        ((), {}, "got no command, needs what every rank runs"),
        (("python",), {"SLURM_JOB_ID": "", "DRY_RUN": ""}, "no SLURM_JOB_ID: submit a script that calls this"),
        (("python",), {**TWO_NODES, "MASTER_ADDR": "localhost"}, "MASTER_ADDR: got localhost, where each of 2 nodes"),
        (("python",), {"VENV": "/nowhere"}, "VENV: got '/nowhere', needs a virtual environment"),
        (("python",), {"MODULES": "cuda"}, "MODULES: got 'cuda', but this node has no module command"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, words: Sequence[str], settings: dict[str, str], text: str) -> None:
    assert text in refusal(launch(tmp_path, *words, **settings))


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


NUMBERS = {
    LAUNCH: ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "MAX_CRASHES"),
    "examples/slurm/preprocess.sbatch": ("PARTS", "SLURM_ARRAY_TASK_ID"),
    "benchmarks/gpu.sh": ("MINUTES", "STEPS"),
}


@pytest.mark.parametrize(("script", "name"), [(script, name) for script, names in NUMBERS.items() for name in names])
def test_a_variable_that_enters_arithmetic_is_a_number(tmp_path: Path, script: str, name: str) -> None:
    """Bash evaluates the operands of its arithmetic, and in them the commands of a subscript."""
    array = {"SLURM_ARRAY_JOB_ID": "47", "SLURM_ARRAY_TASK_ID": "0"}
    needed = {"FILES": "x", "PARTS": "1", "PREFIX": "x", "TOKENIZER": "x", "PYTHON": "true"}
    for wrong in (f"PATH[$(touch {tmp_path}/mark)]", "1+1", "08", "-1"):
        done = launch(tmp_path, "true", script=script, **{**needed, **array, name: wrong})
        assert f"got '{wrong}', needs a" in refusal(done)
        assert not (tmp_path / "mark").exists()


@dataclass(frozen=True)
class Case:
    """A job whose ranks run `command` in bash (it knows RANK), and what Slurm says of it in the end."""

    command: str
    state: str
    code: str
    restarts: int
    settings: dict[str, str] = field(default_factory=dict)


def passed_on(name: str) -> Case:
    # Slurm may lose it under load; what the batch shell gets must reach the ranks at once
    arrived = f"grep --quiet --recursive 'got SIG{name}' $RUN/*.log"
    warn = f"sleep 2; until {arrived}; do scancel --batch --signal={name} $SLURM_JOB_ID; sleep 5 & wait $!; done"
    ranks = f"trap 'exit 85' {name}; ((RANK)) || {{ {warn}; }}; sleep 99 & wait"
    return Case(f"{FIRST_START} || exit 0; {ranks}", "COMPLETED", "0:0", 1)


ONE_CRASH = {"MAX_CRASHES": "1"}
CASES = {
    "done": Case("exit 0", "COMPLETED", "0:0", 0),
    "bad input": Case("exit 2", "FAILED", "2:0", 0),
    "stopped": Case(f"{FIRST_START} && exit 85; exit 0", "COMPLETED", "0:0", 1),
    "stopped, one rank torn": Case(
        f'{FIRST_START} && touch "$RUN/stopped.json" && exit $((85 + 52 * RANK)); exit 0', "COMPLETED", "0:0", 1
    ),
    "hung": Case("exit 87", "FAILED", "87:0", 1, ONE_CRASH),
    "diverged in a stage": Case('mkdir -p "$RUN/64k"; touch "$RUN/64k/diverged.json"; exit 1', "FAILED", "86:0", 0),
    "interrupted": Case("exit 130", "FAILED", "130:0", 0),
    "a file of crashes that is no number": Case(
        r'echo "a[\$(touch $RUN/mark)]" >"$LOGS/$SLURM_JOB_ID.crashes"; exit 1', "FAILED", "1:0", 0
    ),
    "warned too early": Case(f"{FIRST_START} && kill -USR1 $$; exit 0", "COMPLETED", "0:0", 1),
    "warned too early each time": Case("kill -USR1 $$", "FAILED", "138:0", 1, ONE_CRASH),
    "warned too early, without checkpoints": Case(
        f"{FIRST_START} && kill -PWR $$; exit 0", "COMPLETED", "0:0", 1, {"RUN": "", "MAX_CRASHES": "0"}
    ),
    "SIGHUP to the batch shell alone": passed_on("HUP"),
    "SIGTERM to the batch shell alone": passed_on("TERM"),
    "SIGUSR2 to the batch shell alone": passed_on("USR2"),
    "crashing": Case("exit 1", "FAILED", "1:0", 1, ONE_CRASH),
    "crashing, with checkpoints between": Case(
        f'{SAVE}; ((${{SLURM_RESTART_COUNT:-0}} == 2)) || exit 1; exit 0', "COMPLETED", "0:0", 2, ONE_CRASH
    ),
    "one rank crashes, the other hangs": Case(
        "((RANK == 0)) || exit 7; sleep 600", "FAILED", "137:0", 0, {"GRACE_S": "2", "MAX_CRASHES": "0"}
    ),
}  # fmt: skip


def submit(cluster: Cluster, folder: Path, case: Case, *options: str) -> str:
    script = folder / "job.sbatch"
    script.write_text(f'#!/usr/bin/env bash\n#SBATCH --requeue\n#SBATCH --open-mode=append\nexec {LAUNCH} "$@"\n')
    words = ["--nodes=2", "--ntasks-per-node=1", "--time=10", f"--output={folder}/job-%a.log", *options]
    settings = {"RUN": str(folder), "LOGS": str(folder / "logs"), **case.settings}
    return cluster.submit(*words, script, "bash", "-c", case.command, environment=settings)


@pytest.mark.slow
def test_how_jobs_end(cluster: Cluster, tmp_path: Path) -> None:
    folders = {name: tmp_path / str(number) for number, name in enumerate(CASES)}
    for folder in folders.values():
        folder.mkdir()
    jobs = {name: submit(cluster, folders[name], case) for name, case in CASES.items()}

    def said(name: str) -> str:
        return "\n".join(file.read_text() for file in sorted(folders[name].rglob("*.log")))

    for name, case in CASES.items():
        state = cluster.end_of(jobs[name], lambda name=name: f"{name}\n{said(name)}\n{cluster.logs()}")
        outcome = state, cluster.field(jobs[name], "ExitCode"), int(cluster.field(jobs[name], "Restarts"))
        assert outcome == (case.state, case.code, case.restarts), f"{name}\n{said(name)}"
    assert not list(tmp_path.rglob("mark")), "a file of crashes is no program"


def test_one_job_per_run(cluster: Cluster, tmp_path: Path) -> None:
    def log(job: str) -> str:
        return (tmp_path / f"job-{job}.log").read_text()

    ready = tmp_path / "ready"
    case = Case(f"touch {ready}; sleep 600", "CANCELLED", "", 0)
    first = submit(cluster, tmp_path, case, f"--output={tmp_path}/job-%j.log", "--nodes=1")
    wait_until(ready.exists, JOB_S, cluster.logs)
    second = submit(cluster, tmp_path, case, f"--output={tmp_path}/job-%j.log", "--nodes=1")
    cluster.end_of(second)
    assert cluster.field(second, "ExitCode") == "2:0"
    assert f"RUN: got {tmp_path}, where job {first} still runs, needs" in log(second)
    assert [file.name for file in tmp_path.glob("*.job")] == [f"slurm-{first}.job"]
    cluster.call("scancel", "--signal=KILL", "--full", first)  # the batch shell too: its mark stays
    cluster.end_of(first)
    third = submit(cluster, tmp_path, Case("exit 0", "COMPLETED", "0:0", 0), f"--output={tmp_path}/job-%j.log")
    assert cluster.end_of(third) == "COMPLETED", log(third)
    assert not list(tmp_path.glob("*.job"))


ASK = "from megatron_ext.launch import *\ntry: print(read_launch().world_size)\nexcept LaunchError as e: print(e)"


def test_tasks_of_srun_without_ranks_are_refused(cluster: Cluster) -> None:
    """Several tasks of a step are refused; a single one, a batch script and a shell of salloc run one process."""
    python = (sys.executable, "-c", ASK)
    texts = cluster.call("srun", "--ntasks=2", *python).splitlines()
    assert len(texts) == 2
    assert all("one of several tasks (SLURM_STEP_NUM_TASKS '2')" in text for text in texts)
    assert cluster.call("srun", "--ntasks=1", *python) == "1"
    assert cluster.call("salloc", "--ntasks=2", *python) == "1"
    shell = ("--interactive", "--preserve-env", "--ntasks=1", "--nodes=1")  # of salloc with use_interactive_step
    assert cluster.call("salloc", "--ntasks=2", "srun", *shell, *python) == "1"


@pytest.mark.slow
def test_a_task_of_an_array_is_requeued_alone(cluster: Cluster, tmp_path: Path) -> None:
    """Its last task has the array's own number: requeueing by that would take all tasks."""
    last = f"[[ $SLURM_ARRAY_TASK_ID == 2 ]] && {FIRST_START} && exit 85; exit 0"
    array = submit(cluster, tmp_path, Case(last, "COMPLETED", "0:0", 1, {"RUN": ""}), "--array=0-2", "--nodes=1")
    tasks = [f"{array}_{number}" for number in range(3)]
    assert [cluster.end_of(task) for task in tasks] == ["COMPLETED"] * 3
    assert [cluster.field(task, "Restarts") for task in tasks] == ["0", "0", "1"]
    assert cluster.field(tasks[2], "JobId") == array
    assert {file.name.split("-node")[0] for file in (tmp_path / "logs").glob("*.log")} == set(tasks)
