"""Megatron's data-parallel wrapper and optimizer around the model chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.module import Float16Module

from megatron_ext.config import Config
from megatron_ext.engine import compat
from megatron_ext.engine.model import PackedGPT


def wrap(chunks: Sequence[PackedGPT], config: Config) -> list[DistributedDataParallel]:
    """Give each chunk its gradient buffers (always fp32) and their reduction over data x context ranks."""
    compat.install_one_by_one()
    parallel = config.parallel
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    return [
        DistributedDataParallel(chunk.config, ddp, in_precision(chunk, config), disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def in_precision(chunk: PackedGPT, config: Config) -> torch.nn.Module:
    """Return the chunk as it computes: in bfloat16 where the run does."""
    return Float16Module(chunk.config, chunk) if config.training.bf16 else chunk


def build_optimizer(model: list[DistributedDataParallel], config: Config) -> MegatronOptimizer:
    """Build AdamW over the wrapped chunks; biases and norms have weight decay only with `weight_decay_all`."""
    options = config.optimizer
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        # an infinite limit never clips, but the norm is measured
        clip_grad=options.clip_grad or math.inf,
        bf16=config.training.bf16,
        params_dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    # without a word Megatron takes biases and norms out of the decay; no override leaves them in
    overrides: dict[ParamKey, ParamGroupOverride] | None = {} if options.weight_decay_all else None
    return get_megatron_optimizer(settings, model, config_overrides=overrides, use_gloo_process_groups=False)


def set_learning_rate(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Set both for every parameter group, times the group's own factors (0 for a decay without norms and biases)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def settle_parameters(model: Sequence[DistributedDataParallel]) -> None:
    """Gather what the last optimizer step changed on other ranks, so that weights can be read outside a forward pass.

    With --overlap-param-gather that otherwise happens as the next forward pass calls each module. A collective.
    """
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def unwrap(model: Sequence[DistributedDataParallel]) -> Iterator[PackedGPT]:
    """Yield the chunks inside their wrappers."""
    for module in model:
        inner: Any = module.module
        while not isinstance(inner, PackedGPT):
            inner = inner.module
        yield inner
