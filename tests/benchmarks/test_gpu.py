"""benchmarks/gpu.sh: its parts fail alone; on this machine all of it is a dry run. docs/benchmarks.md is up to date."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launcher import wait_until

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("correct", "attention", "step", "length", "loss_head", "weighting", "effect")


def gpu_sh(*parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "benchmarks" / "gpu.sh", *parts]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def test_one_script_that_fails_stops_no_other(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && echo dry-run && exit\n'
        f'echo "$*" >>{tmp_path}/calls\n'
        "case $1 in *attention.py) exit 7 ;; esac\n"
    )
    python.chmod(0o755)
    done = gpu_sh("attention", "step", PYTHON=str(python), OUTPUT=str(tmp_path / "out.jsonl"))
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()] == [
        "benchmarks/attention.py",
        "benchmarks/step.py",
    ]
    assert done.returncode == 1
    assert done.stderr.strip().endswith("failed: attention speed: status 7")


def test_long_parts_have_their_time_for_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step

    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo NVIDIA-H100 && exit\necho "$*" >>{tmp_path}/calls\n')
    python.chmod(0o755)
    output = tmp_path / "out.jsonl"
    assert gpu_sh("attention", "step", PYTHON=str(python), OUTPUT=str(output)).returncode == 0
    rows = [f"benchmarks/attention.py speed {row}" for row in (8192, 32768, 131072, 524288)]
    shapes = [f"benchmarks/step.py --profile {shape}" for shape in step.SHAPES if shape != "dry-run"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"{call} --output {output}" for call in (*rows, *shapes)]


def parent(folder: Path, ends: str) -> Path:
    """A Python whose child takes no notice of TERM and INT; it notes the child in `folder`/children, and `ends`."""
    python = folder / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && echo dry-run && exit\n'
        f"(trap '' TERM INT; exec sleep 60) >/dev/null 2>&1 &\necho $! >>{folder}/children\n{ends}\n"
    )
    python.chmod(0o755)
    return python


def children(folder: Path) -> list[int]:
    noted = folder / "children"
    return [int(line) for line in noted.read_text().split("\n")[:-1]] if noted.exists() else []


def runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("ends", "status"), [("sleep 1; kill -ALRM $PPID; wait", 124), ("exit 7", 7)], ids=["late", "failed"]
)
def test_no_child_outlives_its_script(tmp_path: Path, ends: str, status: int) -> None:
    # ALRM is what tells timeout that the time is over, once it has noted its child
    python = parent(tmp_path, ends)
    done = gpu_sh("length", "effect", PYTHON=str(python), OUTPUT=str(tmp_path / "out.jsonl"))
    assert (done.returncode, len(children(tmp_path))) == (1, 2)
    assert done.stderr.splitlines()[-2:] == [f"failed: length: status {status}", f"failed: effect: status {status}"]
    assert wait_until(lambda: not any(map(runs, children(tmp_path))), 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_all(tmp_path: Path, number: signal.Signals) -> None:
    environment = os.environ | {"PYTHON": str(parent(tmp_path, "wait")), "OUTPUT": str(tmp_path / "out.jsonl")}
    # a shell cannot trap what it is told to ignore from the start, as nohup and `&` do
    command = ["env", "--default-signal", ROOT / "benchmarks" / "gpu.sh", "attention", "step"]
    begun = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    assert wait_until(lambda: bool(children(tmp_path)), 60)
    os.killpg(begun.pid, number)  # as a terminal does: to all in the foreground
    assert begun.wait(30) == 128 + number
    (child,) = children(tmp_path)
    assert wait_until(lambda: not runs(child), 10)


@pytest.mark.parametrize("minutes", ["a[$(touch${IFS}%s)]", "0", "08", "many"])
def test_minutes_are_digits(tmp_path: Path, minutes: str) -> None:
    given = minutes.replace("%s", str(tmp_path / "mark"))
    done = gpu_sh("length", PYTHON="false", MINUTES=given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"benchmarks/gpu.sh: MINUTES: got '{given}', needs a number from 1 on\n"
    assert not (tmp_path / "mark").exists()


def test_an_unknown_part_is_refused() -> None:
    done = gpu_sh("speed", PYTHON=sys.executable)
    assert done.returncode == 2
    assert f"got 'speed', needs one of {' '.join(PARTS)}" in done.stderr


def test_the_page_of_results_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], check=False)
    assert done.returncode == 0, "python benchmarks/tables.py writes docs/benchmarks.md"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # ten minutes where the machine is busy
def test_every_part_runs_dry(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = gpu_sh(PYTHON=sys.executable, OUTPUT=str(output))
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert {record["part"] for record in records} == set(PARTS)
    for record in records:
        assert record.get("ok", True) is True, record
        assert record["command"].startswith("python benchmarks/")
        assert {"date", "device", "versions"} <= record.keys()
