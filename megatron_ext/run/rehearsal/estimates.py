"""Compares the memory that a dry run estimates with the rehearsed peak, for the stages of recipes.

The fullest rank is rehearsed, with the last window and one document in each row: what takes most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.config import Config
from megatron_ext.planning.attention_shapes import attention_shapes
from megatron_ext.planning.memory import Memory, fullest_rank, fullest_stage, stage_memory
from megatron_ext.planning.recipes import Recipe
from megatron_ext.planning.step_time import rank_work, work_of
from megatron_ext.run.rehearsal.ranks import in_process
from megatron_ext.run.rehearsal.request import Request

_GIB = 2**30
# how options of the model begin that set a number, and no shape
_NUMBERS = ("model_preset", "norm_epsilon", "rope_", "rotary_base", "init_", "query_pre_attn_scalar")


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
        """Equal where layers, ranks, micro-batches and kernels are of the same sizes and kinds at the last window.

        Schedules, learning rates, rotary bases, scores and the borders of documents change none of them.
        """
        config = self.config
        sizes = self.world_size, self.vocab_size, config.data.seq_length * config.data.micro_batch_size
        model = {name: value for name, value in vars(config.model).items() if not name.startswith(_NUMBERS)}
        kernels = [
            [(shapes.scheme, *(call.backend for call in shapes.calls)) for shapes in of_kinds]
            for of_kinds in attention_shapes(config, config.window_schedule().end)
        ]
        weighting = config.weighting.token_weighting, config.weighting.short_context, config.weighting.short_stride
        return sizes, model, config.parallel, kernels, config.mask_options().window_mask, weighting

    @property
    def short(self) -> Config:
        """The configuration with few micro-batches: the peak is that of the first, or between two of them."""
        data = self.config.data
        count = min(2 * self.config.parallel.pipeline_model_parallel_size, self.config.microbatches(self.world_size))
        rows = data.micro_batch_size * self.config.data_parallel_size(self.world_size) * count
        return replace(self.config, data=replace(data, global_batch_size=rows))

    def rehearse(self) -> dict[str, Any]:
        """Rehearse one step of the fullest rank; the result is as `rank.Step` in plain types.

        Raises:
            RuntimeError: the step fails.
        """
        rank = fullest_rank(self.config, self.world_size, self.vocab_size)
        window = self.config.window_schedule().end
        argv = [*self.argv, "--global-batch-size", str(self.short.data.global_batch_size)]
        layers = "transformer_engine" if self.config.parallel.moe_grouped_gemm else "local"
        found = in_process(Request(argv, self.world_size, rank, [window], "whole", layers=layers))
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

    experts = case.config.model.num_experts is not None
    yield f"{'of one rank':22} {'planned':>12} {'rehearsed':>12} {'difference':>11}"
    for name, one, other in (
        ("memory, GiB", case.estimate.total / _GIB, sum(step["memory"].values()) / _GIB),
        ("PFLOP", planned.flops / 1e15, sum(step["flops"].values()) / 1e15),
        ("sent over TP, GiB", planned.tensor_bytes / _GIB, sent("TP")),
        ("sent over CP, GiB", planned.context_bytes / _GIB, sent("CP")),
        *([("sent over EP, GiB", planned.expert_bytes / _GIB, sent("EP"))] if experts else []),
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
    """Yield a Markdown table of estimate and rehearsal, line by line: the first of those that are alike.

    Raises:
        RuntimeError: a step fails.
    """
    yield "| recipe | alike | GPUs | estimated, GiB | rehearsed, GiB | difference | the peak is in |"
    yield "|---|---|---|---|---|---|---|"
    for group in alike(all_cases):
        case, others = group[0], len(group) - 1
        rehearsed, estimate = sum(case.rehearse()["memory"].values()), case.estimate
        part = "the loss head" if estimate.logits > estimate.layer else "a layer"
        yield (
            f"| {case.name} | {f'{others} more' if others else ''} | {case.world_size} | {estimate.total / _GIB:.2f} | "
            f"{rehearsed / _GIB:.2f} | {estimate.total / rehearsed - 1:+.1%} | {part} |"
        )
