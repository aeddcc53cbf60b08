"""The time model's predictions next to published figures (published.yaml).

python tests/planning/test_published.py [--fit] prints the table; --fit fits the shares of gpus.yaml to the figures that
are marked so, and prints the shares too.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from megatron_ext.checkpoint.parameters import count_parameters
from megatron_ext.config.arguments import parse
from megatron_ext.files.reading import read_yaml, typed
from megatron_ext.planning.step_time import Machine, Speeds, read_speeds, step_time

FITTED = ("ampere.matmul", "hopper.matmul", "hopper.cudnn")
MOMENTS = 200  # at which a schedule's step is timed
LLAMA_2 = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 32 "
LLAMA_2 += "--vocab-size 32000 --fp8-format hybrid --attention-backend te_thd"


@dataclass(config=ConfigDict(extra="forbid", frozen=True))
class Figure:
    """One entry of published.yaml; the linear schedule of `time_saved` begins with a window of 32 tokens."""

    name: str
    quantity: Literal["gpu_hours", "time_saved", "tflops_full_attention", "tokens_per_s", "step_seconds"]
    value: float
    source: str
    gpu: str
    gpus: int
    flags: str
    llama2: bool = False
    fit: bool = False
    tokens: float = 0.0  # gpu_hours: of the whole run

    def predicted(self, speeds: Speeds) -> float:
        flags = f"{LLAMA_2 if self.llama2 else ''} --train-iters 100000 --window-start 32 --bf16 {self.flags}"
        config = parse(flags.split())
        model = config.model
        row = config.data.seq_length
        vocab_size = config.model.vocab_size or 0
        machine = Machine(self.gpus, self.gpu, vocab_size, speeds)
        tokens = config.data.global_batch_size * row
        seconds = step_time(config, row, machine).total
        match self.quantity:
            case "step_seconds":
                return seconds
            case "tokens_per_s":
                return tokens / seconds / self.gpus
            case "gpu_hours":
                return self.tokens / tokens * seconds * self.gpus / 3600
            case "tflops_full_attention":  # as NeMo counts: attention as if no key were masked
                parameters = count_parameters(model, vocab_size) - vocab_size * model.hidden_size
                flops = 6 * parameters + 12 * model.num_layers * model.hidden_size * row
                return tokens / seconds / self.gpus * flops / 1e12
            case "time_saved":
                schedule = config.window_schedule()
                moments = [int((k + 0.5) / MOMENTS * config.training.train_iters) for k in range(MOMENTS)]
                times = [step_time(config, schedule.window_at(moment), machine).total for moment in moments]
                return 1 - mean(times) / seconds


PUBLISHED = Path(__file__).with_name("published.yaml")
FIGURES = typed(read_yaml(PUBLISHED), list[Figure], PUBLISHED)


def errors(speeds: Speeds, figures: list[Figure]) -> list[float]:
    return [figure.predicted(speeds) / figure.value - 1 for figure in figures]


def test_the_figures_that_it_was_not_fitted_to() -> None:
    distances = [abs(error) for error in errors(read_speeds(), [figure for figure in FIGURES if not figure.fit])]
    assert median(distances) <= 0.15
    assert max(distances) <= 0.35


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

    shares = least_squares(logarithms, [0.5] * len(FITTED), bounds=(0.05, 0.95)).x
    return dict(zip(FITTED, map(float, shares), strict=True))


if __name__ == "__main__":
    speeds = read_speeds()
    if "--fit" in sys.argv:
        shares = fit(speeds)
        speeds = with_shares(speeds, shares)
        print("\n".join(f"{name} {value:.3f}" for name, value in shares.items()))
    print("| figure | published | predicted | error | |\n|---|---|---|---|---|")
    for figure, error in zip(FIGURES, errors(speeds, FIGURES), strict=True):
        unit = figure.quantity.replace("_", " ")
        fitted = "fitted" if figure.fit else ""
        values = f"{figure.value:,.4g} {unit} | {figure.value * (1 + error):,.4g}"
        print(f"| {figure.name} | {values} | {error:+.1%} | {fitted} |")
