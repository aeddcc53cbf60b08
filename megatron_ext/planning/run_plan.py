"""Describe a run from its configuration and a number of processes, as a dry run shows it."""

from collections.abc import Iterator

from megatron_ext.checkpoint.parameters import count_active_parameters, count_parameters
from megatron_ext.config import Config
from megatron_ext.config.checks import WARNINGS, broken
from megatron_ext.planning.flops import run_flops
from megatron_ext.planning.memory import estimate, uncounted

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)


def describe(config: Config, world_size: int, vocab_size: int) -> Iterator[str]:
    """Yield the lines that a dry run prints: sizes, the schedules of window and learning rate, costs, warnings.

    `checks.check` must accept the configuration.
    """
    yield from _sizes(config, world_size, vocab_size)
    yield from _schedules(config)
    yield from _costs(config, world_size, vocab_size)
    for line in broken(WARNINGS, config):
        yield f"warning          {line}"


def _sizes(config: Config, world_size: int, vocab_size: int) -> Iterator[str]:
    parallel = config.parallel
    data = config.data
    dp = config.data_parallel_size(world_size)
    parameters = count_parameters(config.model, vocab_size)
    active = count_active_parameters(config.model, vocab_size)
    line = f"parameters       {parameters:,}"
    if active < parameters:
        line += f", of which a token meets {active:,}"
    yield line
    line = (
        f"processes        {world_size:,}: TP {parallel.tensor_model_parallel_size} x "
        f"PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} x DP {dp}"
    )
    if config.model.num_experts:
        line += f", experts over {parallel.expert_model_parallel_size}"
    yield line
    if parallel.pipeline_model_parallel_layout is not None:
        chunks = parallel.layers_of_chunks(config.model.num_layers)
        pp = parallel.pipeline_model_parallel_size
        stages = " ".join("+".join(map(str, chunks[stage::pp])) for stage in range(pp))
        yield f"layers           {stages} on the pipeline stages"
    tokens = data.global_batch_size * data.seq_length
    yield (
        f"batch            {tokens:,} tokens: {data.global_batch_size:,} rows of {data.seq_length:,}; "
        f"{config.microbatches(world_size):,} micro-batches of {data.micro_batch_size} on each of {dp} replicas"
    )
    yield f"tokens           {tokens * config.training.train_iters:,} in {config.training.train_iters:,} steps"


def _schedules(config: Config) -> Iterator[str]:
    schedule = config.window_schedule()
    rate = config.learning_rate_schedule()
    last = config.training.train_iters - 1
    full = schedule.expansion_steps  # from here on the window stays the last one
    line = f"window           {config.window.window_schedule}, {config.window.window_mask}"
    if config.window.document_mask:
        line += ", inside documents"
    reached = f"full from step {full:,} on" if full <= last else "never full in this run"
    yield f"{line}; {reached}"
    turns = {step for step in (full, config.optimizer.lr_warmup_iters) if step <= last}
    for step in sorted({*(round(share * last) for share in _SHARES), *turns, last}):
        window = schedule.window_at(step)
        line = f"  step {step:>9,}   window {window:>9,}   learning rate {rate.at(step):.3e}"
        if config.model.rope_window_bases:
            line += f"   rotary base {config.model.rotary_base_at(window):>12,.0f}"
        yield line


def _costs(config: Config, world_size: int, vocab_size: int) -> Iterator[str]:
    flops = run_flops(config, vocab_size)
    memory = estimate(config, world_size, vocab_size)
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


def gibibytes(size: int) -> str:
    """Format a number of bytes in GiB, below one GiB in MiB."""
    if size < 2**30:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**30:.2f} GiB"
