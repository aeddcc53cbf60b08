"""docs/experiments/rate.py finds rates and gains that are known, without training."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "docs" / "experiments"
BUDGETS = (1000, 2000, 4000)
TUNING_SEEDS = (8, 9, 10)
SEEDS = (*TUNING_SEEDS, 11)
GAIN = {32: (0.10, 0.08, 0.06), 512: (0.10, 0.07, 0.04)}  # by budget
BEST = {"constant": (8.2, 6.2, 4.2), "growing": (2.2, 1.2, 0.2)}  # k of the rates, the first beyond the grid


@pytest.fixture
def rate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("rate")


def test_known_rates_and_gains_are_found(rate: ModuleType) -> None:
    draw = np.random.default_rng(0)
    base = {seed: draw.normal() for seed in SEEDS}
    numbers = {rate.rate(k): k for k in range(-10, 20)}
    runs = {}
    grid = rate.Grid(BUDGETS, TUNING_SEEDS, SEEDS)
    while plans := rate.missing(runs, grid):
        assert "Unfinished" in rate.results(runs, grid)[0]
        plan = plans[0]
        number = BUDGETS.index(plan.steps)
        loss = 4 + base[plan.seed] + 0.01 * (numbers[plan.rate] - BEST[plan.arm][number]) ** 2
        gained = {length: GAIN[length][number] * (plan.arm == "growing") for length in (32, 512)}
        runs[plan] = {  # gains are of the test half alone
            "tuning": dict.fromkeys((32, 512), loss + 1),
            "test": {length: loss - gained[length] for length in (32, 512)},
        }
    assert sum(plan.seed == 11 for plan in runs) == 8  # both arms at each budget, and at the last one two rates
    rates, optima, gains, gains_for_all, carried = (rate.results(runs, grid)[place] for place in (2, 4, 6, 8, 10))
    assert [line.split("|")[-2].strip() for line in rates.splitlines()[2:]] == [
        f"{rate.rate(int(k)):g}" for arm in ("constant", "growing") for k in BEST[arm]
    ]
    assert numbers_in(optima, "[+-][\\d.]+(?= ±)") == pytest.approx([-1, -0.5], abs=1e-3)  # octaves per doubling
    optimum = numbers_in(optima, r"(?<=\| )[\d.]+(?= \|)|[\d.]+(?= \|)")[:3]
    assert optimum == pytest.approx([2e-3 * 2 ** (k / 2) for k in BEST["constant"]], rel=0.03)  # two digits
    found = numbers_in(gains, r"[+-][\d.]+(?= ±)")
    by_budget = [[short, whole, whole - short] for short, whole in zip(*GAIN.values(), strict=True)]
    assert found == pytest.approx([*np.ravel(by_budget), -0.02, -0.03, -0.01], abs=1e-4)
    assert gains_for_all == gains  # here one rate is best for every seed
    # 4 and 2 steps of the grid away, squared, from 0.2 beside it
    assert numbers_in(carried, r"[+-][\d.]+(?= ±)") == pytest.approx(
        [0.01 * (3.8**2 - 0.2**2), 0.01 * (1.8**2 - 0.2**2)]
    )


def numbers_in(text: str, pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def test_the_rate_of_a_seed_does_not_depend_on_its_own_losses(rate: ModuleType) -> None:
    def runs(loss_of: Callable[[int, int], float]) -> dict[object, dict[str, dict[int, float]]]:
        return {
            rate.Plan("growing", rate.rate(k), 1000, seed): {"tuning": {512: loss_of(seed, k)}}
            for seed in TUNING_SEEDS
            for k in range(5)
        }

    same = runs(lambda seed, k: (k - 2) ** 2)
    other = runs(lambda seed, k: (k - 2 - 9 * (seed == 9)) ** 2)
    grid = rate.Grid(BUDGETS, TUNING_SEEDS, SEEDS)
    assert rate.chosen(same, "growing", 1000, grid) == [2, 2, 2, 2]
    assert rate.chosen(other, "growing", 1000, grid) == [4, 2, 4, 4]
