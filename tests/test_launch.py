"""The environment of torchrun or Slurm: a wrong one is refused before any process waits for another."""

from pathlib import Path

import pytest

from megatron_ext.launch import Launch, LaunchError, is_first, read_launch

ROOT = Path(__file__).resolve().parents[1]
GOOD = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def changed(change: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in (GOOD | change).items() if value is not None}


def test_good_environments() -> None:
    assert read_launch({}) == Launch(0, 1, 0)
    assert read_launch(GOOD) == Launch(1, 2, 1)
    assert read_launch(changed({"LOCAL_RANK": None})) == Launch(1, 2, 0)
    assert is_first({})
    assert not is_first(GOOD)


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
        read_launch(changed(change))
    assert str(caught.value).startswith(text)
    assert "torchrun" in str(caught.value)
