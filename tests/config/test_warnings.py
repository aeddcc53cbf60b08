"""Each warning has flags that give it, and the neighbour that its remedy names, which does not."""

from __future__ import annotations

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.checks import mistakes, warnings_of

BASE = "--data-path x --vocab-size 64 --save s --train-iters 30"
LINEAR = "--window-schedule linear"
LONG = "--train-iters 1600 --seq-length 1024 --global-batch-size 64"  # 105 million tokens; 1,500 steps are 98
UNFROZEN = "--token-weighting unfrozen --short-context 128 --short-stride 96"


def warned(flags: str) -> list[str]:
    config = parse(f"{BASE} {flags}".split())
    assert list(mistakes(config, 1)) == []
    return list(warnings_of(config))


@pytest.mark.parametrize(
    ("bad", "said", "good"),
    [
        (LINEAR, "512 only from step 3,840 on", f"{LINEAR} --window-expansion-fraction 0.64"),
        (
            "--window-schedule cyclic_gradual --window-cycles 1.5",
            "512 only from step 11,520 on",
            "--window-schedule cyclic_gradual --window-cycles 1.5 --window-expansion-fraction 0.21",
        ),
        (
            "--window-schedule continual --window-switch-step 31",
            "512 only from step 31 on",
            "--window-schedule continual --window-switch-step 19",
        ),
        (LONG, "costs up to all 1,600 steps", f"{LONG} --save-seconds 1800"),
        ("--save none", "save: got nothing, so the weights are lost", "--save there"),
        (
            f"{LINEAR} --window-rate 16 {UNFROZEN}",
            "in the first 1 of 30 steps, every weight is 1",
            f"{LINEAR} --window-rate 16 --window-start 33 {UNFROZEN}",
        ),
        (
            f"--window-end 32 {UNFROZEN}",
            "in the first 30 of 30 steps, every weight is 1",
            f"--window-end 64 --window-start 33 {UNFROZEN}",
        ),
    ],
)
def test_warnings(bad: str, said: str, good: str) -> None:
    (line,) = warned(bad)
    assert said in line
    assert warned(good) == []
