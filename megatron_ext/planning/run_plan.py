"""Derive the numbers that a dry run shows from a configuration and a number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.checkpoint.hf.names import count_active_parameters, count_parameters
from megatron_ext.config import Config
from megatron_ext.config.checks import warnings_of
from megatron_ext.planning.flops import RunFlops, run_flops
from megatron_ext.planning.memory import Memory, estimate, uncounted

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class RunPlan:
    """The derived numbers of a run; `memory` is that of one GPU of the fullest pipeline stage.

    From `full_step` on the window stays the last one.
    """

    config: Config
    world_size: int
    vocab_size: int
    parameters: int
    full_step: int
    flops: RunFlops
    memory: Memory

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.config.data.global_batch_size * self.config.data.seq_length

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.tokens_per_step * self.config.training.train_iters


def plan_run(config: Config, world_size: int, vocab_size: int) -> RunPlan:
    """Plan a configuration that `checks.check` accepts."""
    return RunPlan(
        config=config,
        world_size=world_size,
        vocab_size=vocab_size,
        parameters=count_parameters(config.model, vocab_size),
        full_step=config.window_schedule().expansion_steps,
        flops=run_flops(config, vocab_size),
        memory=estimate(config, world_size, vocab_size),
    )


def describe(plan: RunPlan) -> Iterator[str]:
    """Yield the lines that a dry run prints: sizes, the schedules of window and learning rate, costs, warnings."""
    config, parallel, data, window = plan.config, plan.config.parallel, plan.config.data, plan.config.window
    dp, steps = config.data_parallel_size(plan.world_size), config.training.train_iters
    active = count_active_parameters(config.model, plan.vocab_size)
    met = f", of which a token meets {active:,}" if active < plan.parameters else ""
    yield f"parameters       {plan.parameters:,}{met}"
    yield (
        f"processes        {plan.world_size:,}: TP {parallel.tensor_model_parallel_size} x "
        f"PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} x DP {dp}"
        + (f", experts over {parallel.expert_model_parallel_size}" if config.model.num_experts else "")
    )
    yield (
        f"batch            {plan.tokens_per_step:,} tokens: {data.global_batch_size:,} rows of {data.seq_length:,}; "
        f"{config.microbatches(plan.world_size):,} micro-batches of {data.micro_batch_size} on each of {dp} replicas"
    )
    yield f"tokens           {plan.tokens:,} in {steps:,} steps"

    reached = f"full from step {plan.full_step:,} on" if plan.full_step < steps else "never full in this run"
    documents = ", inside documents" if window.document_mask else ""
    yield f"window           {window.window_schedule}, {window.window_mask}{documents}; {reached}"
    schedule, rate, last = config.window_schedule(), config.learning_rate_schedule(), steps - 1
    turns = {step for step in (plan.full_step, config.optimizer.lr_warmup_iters) if step <= last}
    for step in sorted({*(round(share * last) for share in _SHARES), *turns, last}):
        at = schedule.window_at(step)
        base = f"   rotary base {config.model.rotary_base_at(at):>12,.0f}" if config.model.rope_window_bases else ""
        yield f"  step {step:>9,}   window {at:>9,}   learning rate {rate.at(step):.3e}{base}"

    flops = plan.flops
    yield f"FLOPs            {flops.scheduled:.3e}; {flops.saved:.1%} less than with a constant window"
    if flops.scoring:
        yield f"                 and {flops.scoring:.3e} ({flops.scoring / flops.scheduled:.0%}) to score tokens"
    yield f"memory per GPU   {gibibytes(plan.memory.total)} at least, of the fullest pipeline stage:"
    for name, size in vars(plan.memory).items():
        if name == "host" and not size:
            continue
        yield f"  {name:<14} {gibibytes(size):>10}"
    for line in uncounted(config):
        yield f"not counted      {line}"
    for line in warnings_of(config):
        yield f"warning          {line}"


def gibibytes(size: int) -> str:
    """Format a number of bytes in GiB, below one GiB in MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
