"""The environment of torchrun or Slurm: a wrong one is refused before any process waits for another."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_ext.launch import Launch, LaunchError, is_first, read_launch

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE: got none, "),
        ({"RANK": None}, "RANK: got none, "),
        ({"MASTER_ADDR": None}, "MASTER_ADDR, MASTER_PORT: got none, "),
    ],
)
def test_wrong_environments(change: dict[str, str | None], text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        with_environment(change)
    assert str(caught.value).startswith(text)
    assert "torchrun" in str(caught.value)
