"""Holds published figures beside what `step_time` predicts for their settings.

The figures are data, facts/published.yaml: a value, its source, its setting, and whether the constants were fitted to
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

from annotated_types import Gt
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked

from megatron_ext.config import ModelConfig
from megatron_ext.config.presets import PRESETS
from megatron_ext.files.yaml_file import read_typed
from megatron_ext.planning.step_time import FACTS, Shapes, Speeds, Work, at_window, forward_seconds, step_time
from megatron_ext.schedule import build_schedule

Quantity = Literal["gpu_hours", "time_saved", "times_uniform", "tflops_full_attention", "tokens_per_s", "step_seconds"]
MOMENTS = 200  # at which a schedule's step is timed


@checked(config=ConfigDict(extra="forbid", frozen=True))
class Figure:
    """Holds one entry of facts/published.yaml.

    Attributes:
        name, source: what it is, and where it stands.
        quantity: what the value is; tokens and TFLOP/s are of one GPU.
        value: as published.
        setting: fields of `Work`; `model` is a preset's name or fields of `Shapes`.
        fit: the constants were fitted to it.
        tokens: gpu_hours: of the whole run.
        rate, steps: time_saved: the linear schedule, from a window of 32 tokens on.
        scored, short, scorer: times_uniform: tokens of a row that are passed through the scorer (the model itself where
            it is None) in chunks of `short`.
    """

    name: str
    quantity: Quantity
    value: Annotated[float, Gt(0)]
    source: str
    setting: dict[str, Any]
    fit: bool = False
    tokens: float | None = None
    rate: float | None = None
    steps: int | None = None
    scored: int | None = None
    short: int | None = None
    scorer: Shapes | None = None

    @property
    def work(self) -> Work:
        """The step of its setting."""
        given = dict(self.setting)
        model = given.pop("model")
        if isinstance(model, str):
            preset = ModelConfig(**PRESETS[model])
            assert preset.vocab_size is not None
            return Work(shapes=Shapes.of(preset, preset.vocab_size), **given)
        return Work(shapes=Shapes(**model), **given)


@dataclass(frozen=True)
class Comparison:
    """Holds a figure and its prediction, in the same unit."""

    figure: Figure
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.figure.value - 1


def read_figures(path: Path = FACTS / "published.yaml") -> list[Figure]:
    """Read the published figures.

    Raises:
        UserError: an entry with a missing or unknown field.
    """
    return read_typed(path, list[Figure])


def compare(figures: list[Figure], speeds: Speeds) -> list[Comparison]:
    """Predict each figure."""
    return [Comparison(figure, predict(figure, speeds)) for figure in figures]


def predict(figure: Figure, speeds: Speeds) -> float:
    """Predict a figure from its setting alone."""
    work = figure.work
    seconds = step_time(work, speeds).total
    match figure.quantity:
        case "step_seconds":
            return seconds
        case "tokens_per_s":
            return work.tokens / seconds / work.world
        case "tflops_full_attention":
            return work.tokens / seconds / work.world * _flops_full_attention(work) / 1e12
        case "gpu_hours":
            assert figure.tokens is not None
            return figure.tokens / work.tokens * seconds * work.world / 3600
        case "time_saved":
            assert figure.rate is not None
            assert figure.steps is not None
            schedule = build_schedule(kind="linear", start=32, end=work.row, rate=figure.rate)
            moments = [int((k + 0.5) / MOMENTS * figure.steps) for k in range(MOMENTS)]
            times = [step_time(at_window(work, schedule.window_at(step)), speeds).total for step in moments]
            return 1 - mean(times) / seconds
        case "times_uniform":
            assert figure.scored is not None
            assert figure.short is not None
            scorer = replace(work, shapes=figure.scorer or work.shapes, row=figure.short, recompute=False)
            chunks = figure.scored / figure.short * work.microbatches * work.micro
            return 1 + chunks * forward_seconds(scorer, speeds) / seconds


def table(compared: Sequence[Comparison]) -> Iterator[str]:
    """Yield a Markdown table of published and predicted, line by line."""
    yield "| figure | published | predicted | error | | source |"
    yield "|---|---|---|---|---|---|"
    for one in compared:
        figure = one.figure
        unit, fitted = figure.quantity.replace("_", " "), "fitted" if figure.fit else ""
        numbers = f"{figure.value:,.4g} {unit} | {one.predicted:,.4g} | {one.error:+.1%}"
        yield f"| {figure.name} | {numbers} | {fitted} | {figure.source} |"


def _flops_full_attention(work: Work) -> float:
    """Count FLOPs per token as NeMo 24.12 does: attention as if no key were masked."""
    shapes = work.shapes
    attention = 12 * shapes.layers * shapes.hidden * work.row
    return 6 * (shapes.layers * shapes.layer_parameters + shapes.vocabulary * shapes.hidden) + attention
