"""Checks of the options for mixtures of experts, against each other and against what does not know experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.errors import UserError

_NEEDS_EXPERTS: tuple[tuple[str, str], ...] = (
    ("model", "moe_router_topk"),
    ("model", "moe_ffn_hidden_size"),
    ("parallel", "expert_model_parallel_size"),
    ("parallel", "moe_grouped_gemm"),
    ("training", "moe_aux_loss_coeff"),
    ("training", "moe_router_load_balancing_type"),
)
_DEFAULTS = {"model": ModelConfig(), "parallel": ParallelConfig(), "training": TrainingConfig()}
# what transformers has no mixture of experts with
_OTHER_MODELS = ("add_qkv_bias", "no_rope_freq")


def expert_mistakes(config: Config, world_size: int) -> Iterator[str]:
    """Yield one line for each thing that a mixture of experts, or a model without, cannot have."""
    if config.model.num_experts is None:
        for section, name in _NEEDS_EXPERTS:
            value = getattr(getattr(config, section), name)
            if value != getattr(_DEFAULTS[section], name):
                yield f"{name}: got {value} without num_experts, needs them; add --num-experts N or leave it out"
        return
    yield from _model(config.model)
    yield from _layout(config, world_size)
    yield from _loss(config)
    for name, value in (
        ("compile", config.parallel.compile),
        ("tp_comm_overlap", config.parallel.tp_comm_overlap),
        ("cpu_offloading", config.parallel.cpu_offloading),
        ("optimizer_cpu_offload", config.optimizer.optimizer_cpu_offload),
        ("fp8_format", config.training.fp8_format),
    ):
        if value:
            yield f"{name}: got {value} with num_experts {config.model.num_experts}, needs none of them; leave one out"


def check_same_texts(parallel: ParallelConfig) -> None:
    """Refuse to share experts between ranks that take texts at their own pace, each as many as come to it.

    Raises:
        UserError: expert-parallel ranks are not all ranks of one text.
    """
    ep, cp = parallel.expert_model_parallel_size, parallel.context_parallel_size
    if cp % ep:
        raise UserError(
            f"expert_model_parallel_size: got {ep}, outside training it needs a divisor of context_parallel_size {cp}: "
            "ranks that share experts must compute the same texts; change one of them"
        )


def _model(model: ModelConfig) -> Iterator[str]:
    if model.block != "llama":
        yield f"num_experts: got {model.num_experts} with block {model.block}, needs block llama; leave one of them out"
    for name in _OTHER_MODELS:
        value = getattr(model, name)
        if value:
            yield (
                f"{name}: got {value} with num_experts {model.num_experts}, needs a model without: transformers has "
                "none with both; leave one out"
            )
    assert model.num_experts is not None
    if not 2 <= model.moe_router_topk <= model.num_experts:
        yield (
            f"moe_router_topk: got {model.moe_router_topk}, needs 2..num_experts {model.num_experts}: the weights of a "
            "token's experts add up to 1, so that the router would learn nothing from one alone"
        )


def _layout(config: Config, world_size: int) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    experts, ep, tp = model.num_experts, parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    assert experts is not None
    if experts % ep:
        yield f"num_experts: got {experts}, needs a multiple of expert_model_parallel_size {ep}; lower the latter"
    if model.expert_width % tp:
        yield f"moe_ffn_hidden_size: got {model.expert_width}, needs a multiple of tensor_model_parallel_size {tp}"
    if tp > 1 and not parallel.sequence_parallel:
        yield (
            f"sequence_parallel: got false with num_experts {experts} and tensor_model_parallel_size {tp}, needs true: "
            "each token goes to its experts once; add --sequence-parallel"
        )
    replicas = world_size // tp // parallel.pipeline_model_parallel_size
    if world_size % parallel.model_parallel_size == 0 and replicas % ep:
        yield (
            f"expert_model_parallel_size: got {ep}, needs a divisor of the {replicas} data- and context-parallel ranks "
            f"of {world_size} processes; change it or start more"
        )


def _loss(config: Config) -> Iterator[str]:
    weighting, coefficient = config.weighting, config.training.moe_aux_loss_coeff
    if coefficient and weighting.loss_denominator == "weights" and weighting.token_weighting in ("unfrozen", "frozen"):
        yield (
            f"loss_denominator: got weights with token_weighting {weighting.token_weighting} and moe_aux_loss_coeff "
            f"{coefficient}, whose gradients need the denominator before the weights are known; use tokens"
        )
