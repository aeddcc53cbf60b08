"""examples/own_model.py: the exchange in a plain torch model, by several processes, against one with a dense mask."""

from __future__ import annotations

import re

import pytest
from launcher import Commands

WINDOWS = [
    [],
    ["--window", "24"],
    ["--window", "24", "--scheme", "ulysses"],
    ["--window", "7", "--window-mask", "sliding"],
    ["--window", "7", "--window-mask", "sliding_w"],
]


def agrees(processes: int, flags: list[str]) -> None:
    (first, *_) = done = Commands(processes).attempt("examples/own_model.py", *flags)
    assert [rank.status for rank in done] == [0] * processes, done
    assert re.fullmatch(rf"{processes} ranks against one: outputs \S+, gradients \S+ apart\n", first.stdout), first


def test_two_processes_agree_with_one() -> None:
    agrees(2, ["--window", "40", "--window-mask", "sliding"])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("flags", WINDOWS, ids=" ".join)
def test_any_number_of_processes_agrees_with_one(processes: int, flags: list[str]) -> None:
    agrees(processes, flags)
