"""Count the FLOPs and bytes sent by one rank in a step, from the same layers as the time model."""

from dataclasses import dataclass

from megatron_ext.config import Config
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
    layer, parallel, data = layer_work(config, load), config.parallel, config.data
    flops = layer.products.times(3) + layer.expert_products.times(3) + layer.attention.times(3.5)
    t = data.micro_batch_size * data.seq_length / parallel.context_parallel_size / parallel.tensor_model_parallel_size
    outputs = 8 * config.model.hidden_size * vocab_size * t if head else 0.0  # backward recomputes the logits
    layers = config.microbatches(gpus) * config.model.num_layers / parallel.pipeline_model_parallel_size
    return RankWork(
        flops=layers * flops + config.microbatches(gpus) * outputs,
        # backward gathers its inputs again; tensors gathered for experts are kept
        tensor_bytes=layers * (layer.tensor.times(2.5) + layer.expert_tensor.times(2)),
        context_bytes=layers * layer.context.times(2),  # backward returns gradients
        expert_bytes=layers * layer.experts.times(2),
    )
