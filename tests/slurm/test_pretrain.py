"""`examples/slurm/pretrain.sbatch` on a real Slurm of two nodes: stopped by a warning or a preemption, and requeued."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.folders import saved_steps
from tests.conftest import SmallData
from tests.runs import read_jsonl, without_times
from tests.slurm.cluster import JOB_S, Cluster, wait_until

pytestmark = pytest.mark.timeout(1800)  # generous: each wait below fails by itself, with the logs
STEPS = 24
SMALL = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10"]


class Job:
    """A submitted run of the CPU twin in the folder `run`; `number` is Slurm's."""

    def __init__(self, cluster: Cluster, data: SmallData, run: Path) -> None:
        self.cluster = cluster
        self.run = run
        self.output = run.with_name(f"{run.name}.log")
        environment = {"RUN": str(run), "VENV": sys.prefix, "PYTHONPATH": os.environ["PYTHONPATH"]}
        environment |= {"MASTER_ADDR": socket.gethostname(), "OMP_NUM_THREADS": "1"}
        config = ["--config", "examples/configs/cpu_smoke.yaml", "--seq-length", "256", "--train-iters", str(STEPS)]
        command = ["examples/slurm/pretrain.sbatch", *config, "--no-tensorboard", *data.flags, "--device", "cpu"]
        self.number = cluster.submit(*SMALL, f"--output={self.output}", *command, environment=environment)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_jsonl(self.run / "metrics.jsonl")

    @property
    def saved(self) -> int:
        return max(saved_steps(self.run), default=0)

    def wait_for_steps(self, steps: int) -> None:
        wait_until(lambda: len(self.metrics) >= steps, JOB_S, self.logs, every=0.02)

    def ends(self, state: str) -> None:
        assert self.cluster.end_of(self.number, self.logs) == state, self.logs()

    def log(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def logs(self) -> str:
        nodes = sorted((self.run / "logs").glob("*-node*"))
        parts = [self.log(), *(f"== {file.name}\n{file.read_text()}" for file in nodes), self.cluster.logs()]
        return "\n".join(part[-6000:] for part in parts)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(cluster, small_data, tmp_path_factory.mktemp("whole") / "run")
    job.ends("COMPLETED")
    assert [record["step"] for record in job.metrics] == list(range(STEPS))
    return job


def assert_same_trace(job: Job, whole: Job) -> None:
    """Every metric of every step, bit for bit, but the times."""
    assert without_times(job.metrics) == without_times(whole.metrics)
    assert job.saved == whole.saved == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("signal", [(), ("--batch",)])  # as --signal=USR1@300 and --signal=B:USR1@300 do
def test_warned_saved_requeued(
    cluster: Cluster, small_data: SmallData, whole: Job, tmp_path: Path, signal: tuple[str, ...]
) -> None:
    job = Job(cluster, small_data, tmp_path / "run")
    job.wait_for_steps(3)
    cluster.call("scancel", "--signal=USR1", *signal, job.number)
    wait_until(lambda: cluster.field(job.number, "Restarts") == "1", JOB_S, job.logs)
    stopped = job.saved
    assert 3 <= stopped < STEPS, job.logs()
    job.ends("COMPLETED")
    assert_same_trace(job, whole)
    assert f"exit status 85 after start 1, newest checkpoint {stopped}: requeued" in job.log()
    logs = sorted((tmp_path / "run" / "logs").glob(f"{job.number}-node*.log"))
    assert [file.name.split("-")[1] for file in logs] == ["node0", "node1"]
    assert f"continuing from {job.run}/checkpoints/iter_{stopped:07d} after {stopped} steps" in logs[0].read_text()


@pytest.mark.slow
def test_cancelled_is_saved_but_not_requeued(cluster: Cluster, small_data: SmallData, tmp_path: Path) -> None:
    job = Job(cluster, small_data, tmp_path / "run")
    job.wait_for_steps(3)
    cluster.call("scancel", job.number)
    wait_until(lambda: "not requeued" in job.log(), JOB_S, job.logs)
    job.ends("CANCELLED")
    assert 3 <= job.saved < STEPS
    assert json.loads((job.run / "stopped.json").read_text())["exit_code"] == 85
    assert cluster.field(job.number, "Restarts") == "0"


@pytest.mark.slow
def test_preempted_saved_requeued(cluster: Cluster, small_data: SmallData, whole: Job, tmp_path: Path) -> None:
    job = Job(cluster, small_data, tmp_path / "run")
    job.wait_for_steps(3)
    high = ["--partition=high", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent.log"]
    urgent = cluster.submit(*high, "--wrap=sleep 5")
    wait_until(lambda: cluster.field(job.number, "Restarts") == "1", JOB_S, job.logs)
    assert 3 <= job.saved < STEPS
    job.ends("COMPLETED")
    assert cluster.end_of(urgent) == "COMPLETED"
    assert_same_trace(job, whole)
