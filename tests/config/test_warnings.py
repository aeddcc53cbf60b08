"""Each warning has flags that give it, and the neighbour that its remedy names, which does not."""

from __future__ import annotations

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.checks import WARNINGS, broken, mistakes

BASE = "--data-path x --vocab-size 64 --save s --train-iters 30"
LONG = "--train-iters 1600 --seq-length 1024 --global-batch-size 64"  # 105 million tokens; 1,500 steps are 98


def warned(flags: str) -> list[str]:
    config = parse(f"{BASE} {flags}".split())
    assert list(mistakes(config, 1)) == []
    return list(broken(WARNINGS, config))


@pytest.mark.parametrize(
    ("bad", "said", "good"),
    [
        (LONG, "costs up to all 1,600 steps", f"{LONG} --save-seconds 1800"),
        ("--save none", "save: got nothing, so the weights are lost", "--save there"),
    ],
)
def test_warnings(bad: str, said: str, good: str) -> None:
    (line,) = warned(bad)
    assert said in line
    assert warned(good) == []
