"""Which stage and which rank of a configuration the memory estimate says needs most."""

from megatron_ext.config import Config
from megatron_ext.planning.memory import rank_memories, stage_memory


def fullest_stage(config: Config, world_size: int, vocab_size: int) -> int:
    stages = range(config.parallel.pipeline_model_parallel_size)
    return max(stages, key=lambda stage: stage_memory(config, world_size, vocab_size, stage).total)


def fullest_rank(config: Config, world_size: int, vocab_size: int) -> int:
    """The lowest rank of those that need most under the widest window."""
    stage, parallel = fullest_stage(config, world_size, vocab_size), config.parallel
    totals = [memory.total for memory in rank_memories(config, world_size, vocab_size, stage)]
    first = stage * (world_size // parallel.pipeline_model_parallel_size)
    return first + totals.index(max(totals)) * parallel.tensor_model_parallel_size
