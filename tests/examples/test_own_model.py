"""examples/own_model.py: the exchange in a plain torch model, by several processes, against one with a dense mask."""

import re

import pytest

from tests.launcher import Commands


@pytest.mark.parametrize("flags", [["--window", "40", "--window-mask", "sliding"], ["--scheme", "ulysses"]])
def test_two_processes_agree_with_one(flags: list[str]) -> None:
    (first, _) = done = Commands(2).attempt("examples/own_model.py", *flags)
    assert [rank.status for rank in done] == [0, 0], done
    assert re.fullmatch(r"2 ranks against one: outputs \S+, gradients \S+ apart\n", first.stdout), first
