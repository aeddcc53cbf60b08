"""The environment of torchrun or Slurm: a wrong one is refused before any process waits for another."""

import os
import socket
from unittest.mock import patch

import pytest

from megatron_ext.errors import echo
from megatron_ext.launch import Launch, LaunchError, is_first, read_launch
from tests.conftest import SmallData, refused
from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER, refusal

GOOD = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def with_environment(change: dict[str, str | None]) -> Launch:
    environment = {name: value for name, value in (GOOD | change).items() if value is not None}
    with patch.dict(os.environ, environment, clear=True):
        assert is_first() == ("RANK" not in environment)
        return read_launch()


def test_good_environments() -> None:
    assert with_environment(dict.fromkeys(GOOD)) == Launch(0, 1, 0)
    assert with_environment({}) == Launch(1, 2, 1)
    assert with_environment({"LOCAL_RANK": None}) == Launch(1, 2, 0)
    assert with_environment({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "65535"}) == Launch(1, 2, 1)
    elsewhere = {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "x"}  # one process meets nobody
    assert with_environment(dict.fromkeys(GOOD) | elsewhere) == Launch(0, 1, 0)


NUMBERS = {  # what each needs, and numbers that are outside
    "RANK": ("0..1", "-1 2"),
    "WORLD_SIZE": ("1..1048576", "0 -2 9999999999"),
    "LOCAL_RANK": ("0..1", "-1 2"),
    "LOCAL_WORLD_SIZE": ("1..2", "0 3"),
    "MASTER_PORT": ("1..65535", "0 65536 99999"),
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE: got none, "),
        ({"RANK": None}, "RANK: got none, "),
        ({"MASTER_ADDR": None}, "MASTER_ADDR, MASTER_PORT: got none, "),
        ({"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK: got '1', needs 0..0"),
        *(
            ({"MASTER_ADDR": host}, "MASTER_ADDR: got ")
            for host in ("nowhere.invalid", "two words", "x" * 70, "a..b", "127.0.0.1:29500")
        ),
        *(
            ({name: wrong}, f"{name}: got {echo(wrong)}, needs {needs}; ")
            for name, (needs, outside) in NUMBERS.items()
            for wrong in (*outside.split(), "x", "1.0", " 1", "01", "1\n", "\u0661", "1" * 5000)
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_environments(change: dict[str, str | None], text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        with_environment(change)
    assert str(caught.value).startswith(text)
    assert "torchrun" in str(caught.value)


# of one of two tasks of Slurm's srun, of Open MPI's mpirun, and of MPICH's
TASKS = (
    {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"},
    {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"},
)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: next(iter(task)))
def test_one_of_several_tasks_needs_a_rank(task: dict[str, str]) -> None:
    """A task without a rank would do the work of all, as its neighbours do."""
    alone = {name: value.replace("2", "1") for name, value in task.items()}
    assert with_environment(dict.fromkeys(GOOD) | alone) == Launch(0, 1, 0)
    assert with_environment(task) == Launch(1, 2, 1)
    text = refused(lambda: with_environment(dict.fromkeys(GOOD) | task))
    assert text.startswith("RANK, WORLD_SIZE: got none in one of several tasks (")
    assert "torchrun" in text


def test_a_port_that_another_program_has(small_data: SmallData) -> None:
    with socket.create_server(("", 0)) as server:
        place = GOOD | {"RANK": "0", "MASTER_PORT": str(server.getsockname()[1])}
        (done,) = Commands(environment=place).attempt(TRAINER, *CONFIG, *small_data.flags, timeout_s=60)
    assert f"rank 0: MASTER_PORT: got {place['MASTER_PORT']}, " in refusal(done)
