"""What a launcher tells by the environment is whole, or said in a line before any process waits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.launch import Launch, LaunchError, check_meeting_place, is_first, is_first_of_node, read_launch

ROOT = Path(__file__).resolve().parents[1]
GOOD = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Launch(0, 1, 0)),
        ({"MASTER_ADDR": "", "MASTER_PORT": "0", "LOCAL_RANK": "0"}, Launch(0, 1, 0)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch(0, 1, 0)),
        (GOOD, Launch(1, 2, 1)),
        ({name: value for name, value in GOOD.items() if name != "LOCAL_RANK"}, Launch(1, 2, 0)),
        (GOOD | {"MASTER_PORT": "1"}, Launch(1, 2, 1)),
        (GOOD | {"MASTER_PORT": "65535", "RANK": "0"}, Launch(0, 2, 1)),
        (GOOD | {"RANK": "1023", "LOCAL_RANK": "7", "WORLD_SIZE": "1024"}, Launch(1023, 1024, 7)),
    ],
)
def test_what_processes_can_meet(environment: dict[str, str], found: Launch) -> None:
    assert read_launch(environment) == found


@pytest.mark.parametrize("rank", [None, "0", "00", "000000000"])
def test_zero_is_the_first_however_it_is_written(rank: str | None) -> None:
    environment = {} if rank is None else GOOD | {"RANK": rank}
    assert is_first(environment)
    assert is_first_of_node(GOOD | {"LOCAL_RANK": rank or "0"})
    assert read_launch(environment).rank == 0


@pytest.mark.parametrize("rank", ["1", "01", "10", "", "-0", "0.0", " 0", "none"])
def test_no_other_rank_is_the_first(rank: str) -> None:
    assert not is_first(GOOD | {"RANK": rank})
    assert not is_first_of_node(GOOD | {"LOCAL_RANK": rank})


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_NONAME])
def test_a_name_may_get_its_address_late(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    refusals = [socket.gaierror(code, "not now")] * 3

    def resolve(*_: object, **__: object) -> None:
        if refusals:
            raise refusals.pop()

    waited: list[float] = []
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", waited.append)
    check_meeting_place(GOOD | {"MASTER_ADDR": "node-1"}, rank=1)
    assert len(waited) == 3
    refusals = [socket.gaierror(code, "not now")] * 3
    with pytest.raises(RuntimeError, match=r"'node-1' has had no address for 0 s \(not now"):  # no bad input: a crash
        check_meeting_place(GOOD | {"MASTER_ADDR": "node-1"}, rank=1, timeout_s=0)


@pytest.mark.parametrize("host", ["x" * 64, "a..b", "http://node", "node 1", "no\0de"])
def test_what_can_be_no_name_is_refused_at_once(host: str) -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR: got "):
        check_meeting_place(GOOD | {"MASTER_ADDR": host}, rank=1)


BAD: list[tuple[dict[str, str | None], str]] = [
    ({"WORLD_SIZE": None}, "WORLD_SIZE: got none beside RANK=1, needs both or neither;"),
    ({"RANK": None}, "RANK: got none beside WORLD_SIZE=2, needs both or neither;"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE: got 'two', needs a number 1..999999999,"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE: got '0', needs a number 1..999999999,"),
    ({"WORLD_SIZE": "-2"}, "WORLD_SIZE: got '-2', needs"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE: got '', needs"),
    ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE: got '2.0', needs"),
    ({"WORLD_SIZE": "1_0"}, "WORLD_SIZE: got '1_0', needs"),
    ({"WORLD_SIZE": "²"}, "WORLD_SIZE: got '²', needs"),
    ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE: got '9999999999"),
    ({"RANK": "2"}, "RANK: got '2', needs a number 0..1, as WORLD_SIZE is 2;"),
    ({"RANK": "-1"}, "RANK: got '-1', needs a number 0..1,"),
    ({"RANK": "first"}, "RANK: got 'first', needs a number 0..1,"),
    ({"LOCAL_RANK": "2"}, "LOCAL_RANK: got '2', needs a number 0..1, as WORLD_SIZE is 2;"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK: got 'x', needs a number 0..1,"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR: got none, 2 processes need it to meet;"),
    ({"MASTER_ADDR": " "}, "MASTER_ADDR: got none, 2 processes need it to meet;"),
    ({"MASTER_PORT": None}, "MASTER_PORT: got none, 2 processes need it to meet;"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT: got '0', needs a number 1..65535, a free port of MASTER_ADDR;"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT: got '65536', needs a number 1..65535,"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT: got 'http', needs a number 1..65535,"),
]


def changed(change: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in (GOOD | change).items() if value is not None}


@pytest.mark.parametrize(("change", "said"), BAD)
def test_what_can_not_meet_is_one_line(change: dict[str, str | None], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read_launch(changed(change))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert "torchrun" in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        ["pretrain_skyladder.py", "--config", "examples/configs/cpu_smoke.yaml"],
        ["tools/score_tokens.py", "--checkpoint", "none", "--context", "16", "--output", "none.zarr"],
    ],
)
@pytest.mark.parametrize(("change", "said"), [BAD[0], BAD[10], BAD[15]])
def test_a_launcher_does_not_wait_for_the_others(command: list[str], change: dict[str, str | None], said: str) -> None:
    """A real process, which would wait for others for ten minutes."""
    clean = {name: value for name, value in os.environ.items() if name not in GOOD}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=clean | changed(change),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.removeprefix("error: ").startswith(said)
    assert done.stderr.count("\n") == 1


ENGINE = """
import sys
from megatron_ext.config import ParallelConfig
from megatron_ext.engine import parallel, platform
from megatron_ext.errors import UserError
try:
    parallel.start(ParallelConfig(), 1, platform.choose("auto"), 1)
except UserError as error:
    sys.exit(f"refused {error}")
"""


def test_whatever_starts_the_engine_asks_first() -> None:
    clean = {name: value for name, value in os.environ.items() if name not in GOOD} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        cwd=ROOT,
        env=clean | {"RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "refused MASTER_ADDR: got none, 2 processes need it to meet" in done.stderr
