"""Count the FLOPs and bytes sent by one rank in a step, from the same layers as the time model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.planning.step_time import Work, _layer, _recomputed


@dataclass(frozen=True)
class RankWork:
    """Including recomputation; attention is counted by (query, key) pairs, experts are balanced."""

    flops: float
    tensor_bytes: float
    context_bytes: float
    expert_bytes: float


def rank_work(work: Work, *, head: bool) -> RankWork:
    """Count a rank's work; `head`: its pipeline stage is the last one."""
    layer, again, model = _layer(work), _recomputed(work), work.model
    flops = layer.products * (3 + again.products) + layer.expert_products * (3 + again.experts)
    flops += layer.attention * (3.5 + again.attention)
    t = work.micro * work.row / work.cp / work.tp
    outputs = 8 * model.hidden_size * (model.vocab_size or 0) * t if head else 0.0  # backward recomputes the logits
    # backward gathers its inputs again; tensors gathered for experts are kept
    tensor = layer.tensor * (2.5 + again.tensor) + layer.expert_tensor * (2 + again.experts)
    layers = work.microbatches * model.num_layers / work.pp
    return RankWork(
        flops=layers * flops + work.microbatches * outputs,
        tensor_bytes=layers * tensor,
        context_bytes=layers * layer.context * (2 + again.context),  # backward returns gradients
        expert_bytes=layers * layer.experts * (2 + again.experts),
    )
