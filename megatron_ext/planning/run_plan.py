"""Describe a run from its configuration and a number of processes, as a dry run shows it."""

from collections.abc import Iterator

from megatron_ext.checkpoint.hf.names import count_active_parameters, count_parameters
from megatron_ext.config import Config
from megatron_ext.config.checks import WARNINGS, broken
from megatron_ext.planning.flops import run_flops
from megatron_ext.planning.memory import estimate, uncounted

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)


def describe(config: Config, world_size: int, vocab_size: int) -> Iterator[str]:
    """Yield the lines that a dry run prints: sizes, the schedules of window and learning rate, costs, warnings.

    `checks.check` must accept the configuration.
    """
    parallel, data, window = config.parallel, config.data, config.window
    dp, steps = config.data_parallel_size(world_size), config.training.train_iters
    parameters, active = count_parameters(config.model, vocab_size), count_active_parameters(config.model, vocab_size)
    met = f", of which a token meets {active:,}" if active < parameters else ""
    yield f"parameters       {parameters:,}{met}"
    yield (
        f"processes        {world_size:,}: TP {parallel.tensor_model_parallel_size} x "
        f"PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} x DP {dp}"
        + (f", experts over {parallel.expert_model_parallel_size}" if config.model.num_experts else "")
    )
    if parallel.pipeline_model_parallel_layout is not None:
        chunks, pp = parallel.layers_of_chunks(config.model.num_layers), parallel.pipeline_model_parallel_size
        stages = " ".join("+".join(map(str, chunks[stage::pp])) for stage in range(pp))
        yield f"layers           {stages} on the pipeline stages"
    tokens = data.global_batch_size * data.seq_length
    yield (
        f"batch            {tokens:,} tokens: {data.global_batch_size:,} rows of {data.seq_length:,}; "
        f"{config.microbatches(world_size):,} micro-batches of {data.micro_batch_size} on each of {dp} replicas"
    )
    yield f"tokens           {tokens * steps:,} in {steps:,} steps"

    schedule, rate, last = config.window_schedule(), config.learning_rate_schedule(), steps - 1
    full = schedule.expansion_steps  # from here on the window stays the last one
    reached = f"full from step {full:,} on" if full < steps else "never full in this run"
    documents = ", inside documents" if window.document_mask else ""
    yield f"window           {window.window_schedule}, {window.window_mask}{documents}; {reached}"
    turns = {step for step in (full, config.optimizer.lr_warmup_iters) if step <= last}
    for step in sorted({*(round(share * last) for share in _SHARES), *turns, last}):
        at = schedule.window_at(step)
        base = f"   rotary base {config.model.rotary_base_at(at):>12,.0f}" if config.model.rope_window_bases else ""
        yield f"  step {step:>9,}   window {at:>9,}   learning rate {rate.at(step):.3e}{base}"

    flops, memory = run_flops(config, vocab_size), estimate(config, world_size, vocab_size)
    saved = 1 - flops.scheduled / flops.constant
    yield f"FLOPs            {flops.scheduled:.3e}; {saved:.1%} less than with a constant window"
    if flops.scoring:
        yield f"                 and {flops.scoring:.3e} ({flops.scoring / flops.scheduled:.0%}) to score tokens"
    yield f"memory per GPU   {gibibytes(memory.total)} at least, of the fullest pipeline stage:"
    for name, size in vars(memory).items():
        if size or name != "host":
            yield f"  {name:<14} {gibibytes(size):>10}"
    for line in uncounted(config):
        yield f"not counted      {line}"
    for line in broken(WARNINGS, config):
        yield f"warning          {line}"


def gibibytes(size: int) -> str:
    """Format a number of bytes in GiB, below one GiB in MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
