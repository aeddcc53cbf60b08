"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd in a temporary folder, on free ports."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from tests import launcher

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # where Debian has the daemons
NODES = ("n1", "n2")
STARTUP_S = 60  # a start of training takes 10 s on an idle machine
JOB_S = 300
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
FirstJobId={first_job}
KillWait=60
MailProg=/bin/true
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
{nodes}
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=1000000 Gres=gpu:4"


def missing_programs() -> list[str]:
    """Parts of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class Cluster:
    """A context in which Slurm runs; all that it started is gone afterwards.

    Attributes:
        folder: configuration, state and the daemons' logs.
        environment: of the commands that talk to it.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # short: a socket's path has 107 bytes
        self.folder.chmod(0o755)
        self.environment = os.environ | {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        for name in [name for name in self.environment if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))]:
            if name != "SLURM_CONF":  # the tests may themselves run in a job
                del self.environment[name]
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        try:
            self._configure()
            files = {"key": "key", "socket": "sock", "pid": "pid", "log": "log", "seed": "seed"}
            options = [f"--{name}-file={self.folder}/munge.{end}" for name, end in files.items() if name != "socket"]
            self._start("munged", "--foreground", "--force", *options, f"--socket={self.folder}/munge.sock")
            wait_until((self.folder / "munge.sock").exists, STARTUP_S, self.logs)
            self._start("slurmctld", "-D", "-c")
            for name in NODES:
                self._start("slurmd", "-D", "-N", name)
            wait_until(lambda: self._idle_nodes() == len(NODES), STARTUP_S, self.logs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        for daemon in reversed(self._daemons):  # the nodes before their controller, munged last
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        for process in self._processes():  # jobs and their step managers outlive slurmd
            with contextlib.suppress(psutil.Error):
                process.kill()
        for daemon in self._daemons:
            daemon.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *command: object, environment: dict[str, str] | None = None) -> str:
        """Run one of Slurm's commands from the repository's root and return what it says.

        Raises:
            AssertionError: it failed, with its stderr and the daemons' logs.
        """
        words = [str(word) for word in command]
        variables = self.environment | (environment or {})
        done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def submit(self, *arguments: object, environment: dict[str, str] | None = None) -> str:
        """Submit a job; its number."""
        return self.call("sbatch", "--parsable", *arguments, environment=environment)

    def field(self, job: str, name: str) -> str:
        """Return what `scontrol show job` says, such as JobState."""
        shown = self.call("scontrol", "show", "--oneliner", "job", job)
        return next(word.removeprefix(f"{name}=") for word in shown.split() if word.startswith(f"{name}="))

    def end_of(self, job: str, explain: Callable[[], str] | None = None) -> str:
        """Wait for the end of a job: COMPLETED, FAILED, CANCELLED, TIMEOUT or NODE_FAIL."""
        wait_until(lambda: self.field(job, "JobState") in OVER, JOB_S, explain or self.logs)
        return self.field(job, "JobState")

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n" + file.read_text(errors="replace")[-3000:] for file in files)

    def _configure(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        first, *ports = {launcher.free_port() for _ in range(20)}  # different ones
        nodes = [NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports, strict=False)]
        here = {"host": host, "user": os.getuid(), "folder": self.folder, "controller_port": first}
        text = CONFIGURATION.format(**here, first_job=1 + secrets.randbelow(20_000), nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        # any devices do: Slurm only counts them
        devices = "/dev/null,/dev/zero,/dev/full,/dev/random"
        (self.folder / "gres.conf").write_text(f"Name=gpu File={devices} Flags=no_gpu_env\n")
        (self.folder / "plugstack.conf").touch()

    def _start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}-{len(self._daemons)}.log").open("wb") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            daemon = subprocess.Popen([program, *arguments], env=self.environment, start_new_session=True, **pipes)
        self._daemons.append(daemon)

    def _idle_nodes(self) -> int:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args} ended with {daemon.returncode}\n{self.logs()}"
        command = ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%T"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout.split().count("idle")

    def _processes(self) -> list[psutil.Process]:
        """Return processes with this cluster's configuration in their environment, or that work in its folder."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                has_configuration = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if (
                    has_configuration or str(self.folder) in " ".join(process.cmdline())
                ) and process.pid != os.getpid():
                    processes.append(process)
        return processes


def wait_until(condition: Callable[[], bool], seconds: float, explain: Callable[[], str], every: float = 0.2) -> None:
    """Return as soon as `condition` holds.

    Raises:
        AssertionError: it did not within `seconds`; with what `explain` says.
    """
    assert launcher.wait_until(condition, seconds, every), f"still waiting after {seconds} s\n{explain()}"
