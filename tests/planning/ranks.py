"""What the planner says of one rank: whether it needs most memory, and its FLOPs and bytes sent in a step."""

from dataclasses import dataclass

from megatron_ext.config import Config
from megatron_ext.planning.memory import rank_memories, stage_memory
from megatron_ext.planning.sampled_rows import AttentionLoad
from megatron_ext.planning.step_time import layer_work


@dataclass(frozen=True)
class RankWork:
    """Including recomputation; attention is counted by (query, key) pairs, experts are balanced."""

    flops: float
    tensor_bytes: float
    context_bytes: float
    expert_bytes: float


def rank_work(config: Config, load: AttentionLoad, gpus: int, vocab_size: int, *, head: bool) -> RankWork:
    """Count a rank's work; `head`: its pipeline stage is the last one."""
    layer = layer_work(config, load)
    parallel = config.parallel
    data = config.data
    flops = layer.products.times(3) + layer.expert_products.times(3) + layer.attention.times(3.5)
    t = data.micro_batch_size * data.seq_length / parallel.context_parallel_size / parallel.tensor_model_parallel_size
    outputs = 8 * config.model.hidden_size * vocab_size * t if head else 0.0  # backward recomputes the logits
    layers = config.microbatches(gpus) * config.model.num_layers / parallel.pipeline_model_parallel_size
    return RankWork(
        flops=layers * flops + config.microbatches(gpus) * outputs,
        # backward gathers its inputs again; tensors gathered for experts are kept
        tensor_bytes=layers * (layer.tensor.times(2.5) + layer.expert_tensor.times(2)),
        context_bytes=layers * (layer.context.times(2) + layer.ulysses.times(2)),  # backward returns gradients
        expert_bytes=layers * layer.experts.times(2),
    )


def fullest_stage(config: Config, world_size: int, vocab_size: int) -> int:
    stages = range(config.parallel.pipeline_model_parallel_size)
    return max(stages, key=lambda stage: stage_memory(config, world_size, vocab_size, stage).total)


def fullest_rank(config: Config, world_size: int, vocab_size: int) -> int:
    """The lowest rank of those that need most under the widest window."""
    stage = fullest_stage(config, world_size, vocab_size)
    parallel = config.parallel
    totals = [memory.total for memory in rank_memories(config, world_size, vocab_size, stage)]
    first = stage * (world_size // parallel.pipeline_model_parallel_size)
    return first + totals.index(max(totals)) * parallel.tensor_model_parallel_size
