"""Compares the memory that a dry run estimates with the rehearsed peak, for the stages of recipes.

The fullest pipeline stage is rehearsed, with the last window and one document in each row: what takes most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.config import Config
from megatron_ext.planning.memory import Memory, fullest_stage, stage_memory
from megatron_ext.planning.recipes import Recipe
from megatron_ext.planning.step_time import rank_work, work_of
from megatron_ext.run.rehearsal.ranks import in_process
from megatron_ext.run.rehearsal.request import Request

_GIB = 2**30


@dataclass(frozen=True)
class Case:
    """Names a stage of a recipe, and holds what memory depends on.

    Attributes:
        name: the recipe, and its stage where it has several.
        argv: the training flags.
        world_size: processes.
        vocab_size: token ids.
        config: the stage's.
    """

    name: str
    argv: tuple[str, ...]
    world_size: int
    vocab_size: int
    config: Config

    @property
    def stage(self) -> int:
        """The fullest pipeline stage."""
        return fullest_stage(self.config, self.world_size, self.vocab_size)

    @property
    def estimate(self) -> Memory:
        """What a dry run says of it under the last window."""
        return stage_memory(self.config, self.world_size, self.vocab_size, self.stage)

    @property
    def key(self) -> Any:
        """Equal where no byte differs at the last window: schedules and learning rates change none."""
        config, end = self.config, self.config.window_schedule().end
        sizes = self.world_size, self.vocab_size, config.data.seq_length, config.data.micro_batch_size
        return sizes, config.model, config.parallel, end, config.mask_options(), config.weighting

    @property
    def short(self) -> Config:
        """The configuration with few micro-batches: the peak is that of the first, or between two of them."""
        data = self.config.data
        count = min(2 * self.config.parallel.pipeline_model_parallel_size, self.config.microbatches(self.world_size))
        rows = data.micro_batch_size * self.config.data_parallel_size(self.world_size) * count
        return replace(self.config, data=replace(data, global_batch_size=rows))

    def rehearse(self) -> dict[str, Any]:
        """Rehearse one step of the fullest stage; the result is as `rank.Step` in plain types.

        Raises:
            RuntimeError: the step fails.
        """
        rank = self.stage * (self.world_size // self.config.parallel.pipeline_model_parallel_size)
        window = self.config.window_schedule().end
        argv = [*self.argv, "--global-batch-size", str(self.short.data.global_batch_size)]
        found = in_process(Request(argv, self.world_size, rank, [window], "whole"))
        fault = found["fault"] or found["steps"][0]["fault"]
        if fault is not None:
            raise RuntimeError(f"{self.name}: {fault['traceback']}")
        step: dict[str, Any] = found["steps"][0]
        return step


def confirm(case: Case, gpu: str) -> Iterator[str]:
    """Yield a table of what a layout was planned with beside its rehearsal, line by line.

    One step of the fullest pipeline stage, of few micro-batches, at the last window and of one document in each row.

    Raises:
        RuntimeError: the step fails.
    """
    step = case.rehearse()
    last = case.stage == case.config.parallel.pipeline_model_parallel_size - 1
    work = work_of(case.short, case.world_size, gpu, case.vocab_size, case.config.window_schedule().end)
    planned = rank_work(work, head=last)

    def sent(group: str) -> float:
        return float(step["collectives"].get(group, {"sent_bytes": 0})["sent_bytes"]) / _GIB

    yield f"{'of one rank':22} {'planned':>12} {'rehearsed':>12} {'difference':>11}"
    for name, one, other in (
        ("memory, GiB", case.estimate.total / _GIB, sum(step["memory"].values()) / _GIB),
        ("PFLOP", planned.flops / 1e15, sum(step["flops"].values()) / 1e15),
        ("sent over TP, GiB", planned.tensor_bytes / _GIB, sent("TP")),
        ("sent over CP, GiB", planned.context_bytes / _GIB, sent("CP")),
    ):
        difference = f"{one / other - 1:+.1%}" if other else ""
        yield f"{name:22} {one:12.3f} {other:12.3f} {difference:>11}"


def cases(recipes: Sequence[Recipe]) -> Iterator[Case]:
    """Yield every stage of every recipe."""
    for recipe in recipes:
        for stage, plan in recipe.plans().items():
            argv = ["--config", str(recipe.path)]
            yield Case(
                name=recipe.name if stage is None else f"{recipe.name}: {stage}",
                argv=tuple(argv if stage is None else [*argv, "--stage", stage]),
                world_size=recipe.facts.world_size,
                vocab_size=plan.vocab_size,
                config=plan.config,
            )


def alike(all_cases: Sequence[Case]) -> list[list[Case]]:
    """Put together the cases whose memory is the same."""
    groups: dict[Any, list[Case]] = {}
    for case in all_cases:
        groups.setdefault(repr(case.key), []).append(case)
    return list(groups.values())


def table(all_cases: Sequence[Case]) -> Iterator[str]:
    """Yield a Markdown table of estimate and rehearsal, line by line; cases that are alike are rehearsed once.

    Raises:
        RuntimeError: a step fails.
    """
    yield "| recipe | GPUs | estimated, GiB | rehearsed, GiB | difference | the peak is in |"
    yield "|---|---|---|---|---|---|"
    for group in alike(all_cases):
        step = group[0].rehearse()
        for case in group:
            rehearsed, estimated = sum(step["memory"].values()), case.estimate.total
            part = "the loss head" if case.estimate.logits > case.estimate.layer else "a layer"
            yield (
                f"| {case.name} | {case.world_size} | {estimated / _GIB:.2f} | {rehearsed / _GIB:.2f} | "
                f"{estimated / rehearsed - 1:+.1%} | {part} |"
            )
