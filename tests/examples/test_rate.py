"""docs/experiments/rate.py finds rates and gains that are known, without training."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "docs" / "experiments"
BUDGETS = (1000, 2000, 4000)
TUNING_SEEDS = (1, 2)
SEEDS = (8, 9, 10)
GAIN = {32: (0.10, 0.08, 0.06), 512: (0.10, 0.07, 0.04)}  # by budget
BEST = {"constant": (8, 6, 4), "growing": (2, 1, 0)}  # k of the rates, the first beyond the grid


def test_known_rates_and_gains_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    rate = importlib.import_module("rate")
    draw = np.random.default_rng(0)
    base = {seed: draw.normal() for seed in (*TUNING_SEEDS, *SEEDS)}
    numbers = {rate.rate(k): k for k in range(-10, 20)}
    runs = {}
    grid = (BUDGETS, TUNING_SEEDS, SEEDS)

    def loss(arm: str, k: int, number: int, seed: int, length: int) -> float:
        gained = GAIN[length][number] if arm == "growing" else 0.0
        return float(4 + base[seed] + 0.01 * (k - BEST[arm][number]) ** 2 - gained)

    while plans := rate.missing(runs, *grid):
        assert "Unfinished" in rate.results(runs, *grid)[0]
        plan = plans[0]
        where = plan.arm, numbers[plan.rate], BUDGETS.index(plan.steps), plan.seed
        losses = {length: loss(*where, length) for length in (32, 512)}
        # only the tuning half chooses: the other one has no best rate among the tuning seeds' rates
        spoilt = dict.fromkeys(losses, -plan.rate) if plan.seed in TUNING_SEEDS else losses
        runs[plan] = {"tuning": losses, "test": spoilt}
    rates, gains, carried = (rate.results(runs, *grid)[place] for place in (1, 3, 5))
    assert [line.split("|")[-2].strip() for line in rates.splitlines()[2:]] == [
        f"{rate.rate(k):g}" for arm in ("constant", "growing") for k in BEST[arm]
    ]
    gain_rows = [[float(cell) for cell in re.findall(r"([+-][\d.]+) ±", line)] for line in gains.splitlines()[2:6]]
    expected = [[short, whole, whole - short] for short, whole in zip(*GAIN.values(), strict=True)]
    assert gain_rows == [pytest.approx(row) for row in [*expected, [-0.02, -0.03, -0.01]]]
    costs = [float(cell) for cell in re.findall(r"([+-][\d.]+) ±", carried)]
    assert costs == pytest.approx([0.16, 0.04])  # 4 and 2 steps of the grid away, squared
