"""What a configuration amounts to on so many processes: the numbers that a dry run shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.checkpoint.names import count_parameters
from megatron_ext.config import Config
from megatron_ext.planning.flops import RunFlops, run_flops
from megatron_ext.planning.memory import Memory, estimate
from megatron_ext.run_warnings import warnings_of

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Milestone:
    """Window, rotary base and learning rate at a step."""

    step: int
    window: int
    rotary_base: float
    learning_rate: float


@dataclass(frozen=True)
class RunPlan:
    """A run before it runs.

    Attributes:
        config: of the run.
        world_size: processes.
        parameters: of the whole model.
        milestones: from the first step to the last.
        full_step: the first step from which the window is the last one for good.
        flops: of the whole run.
        memory: of one GPU of the fullest pipeline stage.
    """

    config: Config
    world_size: int
    parameters: int
    milestones: tuple[Milestone, ...]
    full_step: int
    flops: RunFlops
    memory: Memory

    @property
    def tokens_per_step(self) -> int:
        """Of a global batch."""
        return self.config.data.global_batch_size * self.config.data.seq_length

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.tokens_per_step * self.config.training.train_iters


def plan_run(config: Config, world_size: int, vocab_size: int) -> RunPlan:
    """The plan of a configuration that `validation.check` accepts."""
    schedule, rate, last = config.window_schedule(), config.learning_rate_schedule(), config.training.train_iters - 1
    steps = {round(share * last) for share in _SHARES} | {last}
    steps |= {step for step in (schedule.expansion_steps, config.optimizer.lr_warmup_iters) if step <= last}
    return RunPlan(
        config,
        world_size,
        count_parameters(config.model, vocab_size),
        tuple(
            Milestone(step, window := schedule.window_at(step), config.model.rotary_base_at(window), rate.at(step))
            for step in sorted(steps)
        ),
        schedule.expansion_steps,
        run_flops(config, vocab_size),
        estimate(config, world_size, vocab_size),
    )


def describe(plan: RunPlan) -> Iterator[str]:
    """The plan as lines."""
    yield from _sizes(plan)
    yield from _course(plan)
    yield from _costs(plan)
    for line in warnings_of(plan.config):
        yield f"warning          {line}"


def _sizes(plan: RunPlan) -> Iterator[str]:
    config, parallel = plan.config, plan.config.parallel
    data, dp = config.data, config.data_parallel_size(plan.world_size)
    yield f"parameters       {plan.parameters:,}"
    yield (
        f"processes        {plan.world_size:,}: TP {parallel.tensor_model_parallel_size} x "
        f"PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} x DP {dp}"
    )
    yield (
        f"batch            {plan.tokens_per_step:,} tokens: {data.global_batch_size:,} rows of {data.seq_length:,}; "
        f"{config.microbatches(plan.world_size):,} micro-batches of {data.micro_batch_size} on each of {dp} replicas"
    )
    yield f"tokens           {plan.tokens:,} in {config.training.train_iters:,} steps"


def _course(plan: RunPlan) -> Iterator[str]:
    window, steps = plan.config.window, plan.config.training.train_iters
    reached = f"full from step {plan.full_step:,} on" if plan.full_step < steps else "never full in this run"
    documents = ", inside documents" if window.document_mask else ""
    yield f"window           {window.window_schedule}, {window.window_mask}{documents}; {reached}"
    bases = bool(plan.config.model.rope_window_bases)
    for at in plan.milestones:
        base = f"   rotary base {at.rotary_base:>12,.0f}" if bases else ""
        yield f"  step {at.step:>9,}   window {at.window:>9,}   learning rate {at.learning_rate:.3e}{base}"


def _costs(plan: RunPlan) -> Iterator[str]:
    flops, memory = plan.flops, plan.memory
    yield f"FLOPs            {flops.scheduled:.3e}; {flops.saved:.1%} less than with a constant window"
    if flops.scoring:
        yield f"                 and {flops.scoring:.3e} ({flops.scoring / flops.scheduled:.0%}) to score tokens"
    yield f"memory per GPU   {gibibytes(memory.total)} at least, of the fullest pipeline stage:"
    for name, size in vars(memory).items():
        yield f"  {name:<14} {gibibytes(size):>10}"


def gibibytes(size: int) -> str:
    """A number of bytes, as one reads it."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
