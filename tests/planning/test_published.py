"""The time model's predictions next to published figures (published.yaml).

python tests/planning/test_published.py [--fit] prints the table; --fit fits the shares of gpus.yaml to the figures that
are marked so, and prints the shares too.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from megatron_ext.checkpoint.hf.names import count_parameters
from megatron_ext.config import ModelConfig
from megatron_ext.config.presets import PRESETS
from megatron_ext.files.yaml_file import read_yaml, typed
from megatron_ext.planning.step_time import Speeds, Work, read_speeds, step_time
from megatron_ext.schedule import build_schedule

FITTED = ("ampere.matmul", "hopper.matmul", "hopper.cudnn")
MOMENTS = 200  # at which a schedule's step is timed


@dataclass(config=ConfigDict(extra="forbid", frozen=True))
class Figure:
    """One entry of published.yaml; `setting` has the fields of `Work`, with a preset or sizes as `model`."""

    name: str
    quantity: Literal["gpu_hours", "time_saved", "tflops_full_attention", "tokens_per_s", "step_seconds"]
    value: float
    source: str
    setting: dict[str, Any]
    fit: bool = False
    tokens: float = 0.0  # gpu_hours: of the whole run
    rate: float = 0.0  # time_saved: of the linear schedule, from a window of 32 tokens on
    steps: int = 0

    def predicted(self, speeds: Speeds) -> float:
        setting = dict(self.setting)
        shapes = setting.pop("model")
        model = ModelConfig(**(PRESETS[shapes] if isinstance(shapes, str) else shapes))
        work = Work(model=model, **setting)
        seconds = step_time(work, speeds).total
        match self.quantity:
            case "step_seconds":
                return seconds
            case "tokens_per_s":
                return work.tokens / seconds / work.world
            case "gpu_hours":
                return self.tokens / work.tokens * seconds * work.world / 3600
            case "tflops_full_attention":  # as NeMo counts: attention as if no key were masked
                vocab_size = model.vocab_size or 0
                parameters = count_parameters(model, vocab_size) - vocab_size * model.hidden_size
                flops = 6 * parameters + 12 * model.num_layers * model.hidden_size * work.row
                return work.tokens / seconds / work.world * flops / 1e12
            case "time_saved":
                schedule = build_schedule(kind="linear", start=32, end=work.row, rate=self.rate)
                windows = [schedule.window_at(int((k + 0.5) / MOMENTS * self.steps)) for k in range(MOMENTS)]
                times = (replace(work, context=one, exchanged=one / work.row) for one in windows)
                return 1 - mean(step_time(one, speeds).total for one in times) / seconds


PUBLISHED = Path(__file__).with_name("published.yaml")
FIGURES = typed(read_yaml(PUBLISHED), list[Figure], PUBLISHED)


def errors(speeds: Speeds, figures: list[Figure]) -> list[float]:
    return [figure.predicted(speeds) / figure.value - 1 for figure in figures]


def test_the_figures_that_it_was_not_fitted_to() -> None:
    found = [abs(error) for error in errors(read_speeds(), [figure for figure in FIGURES if not figure.fit])]
    assert median(found) <= 0.15
    assert max(found) <= 0.35


def test_more_figures_are_fitted_than_there_are_shares_and_no_share_is_at_a_bound() -> None:
    assert sum(figure.fit for figure in FIGURES) > len(FITTED)
    speeds = read_speeds()
    again = fit(speeds)
    for name in FITTED:
        family, share = name.split(".")
        stored = getattr(speeds.reached[family], share)
        assert 0.05 < stored < 0.95
        assert abs(again[name] - stored) < 0.01, name


def with_shares(speeds: Speeds, shares: dict[str, float]) -> Speeds:
    reached = dict(speeds.reached)
    for name, value in shares.items():
        family, share = name.split(".")
        reached[family] = replace(reached[family], **{share: value})
    return replace(speeds, reached=reached)


def fit(speeds: Speeds) -> dict[str, float]:
    """Fit the shares to the logarithm of predicted over published."""
    from scipy.optimize import least_squares

    figures = [figure for figure in FIGURES if figure.fit]

    def logarithms(values: list[float]) -> list[float]:
        there = with_shares(speeds, dict(zip(FITTED, map(float, values), strict=True)))
        return [math.log(1 + error) for error in errors(there, figures)]

    found = least_squares(logarithms, [0.5] * len(FITTED), bounds=(0.05, 0.95)).x
    return dict(zip(FITTED, map(float, found), strict=True))


if __name__ == "__main__":
    speeds = read_speeds()
    if "--fit" in sys.argv:
        shares = fit(speeds)
        speeds = with_shares(speeds, shares)
        print("\n".join(f"{name} {value:.3f}" for name, value in shares.items()))
    print("| figure | published | predicted | error | |\n|---|---|---|---|---|")
    for figure, error in zip(FIGURES, errors(speeds, FIGURES), strict=True):
        unit, fitted = figure.quantity.replace("_", " "), "fitted" if figure.fit else ""
        values = f"{figure.value:,.4g} {unit} | {figure.value * (1 + error):,.4g}"
        print(f"| {figure.name} | {values} | {error:+.1%} | {fitted} |")
