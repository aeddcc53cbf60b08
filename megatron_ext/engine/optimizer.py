"""Wrap the model chunks in Megatron's data parallelism; build the optimizer; clip gradients and update weights.

`MegatronOptimizer.step` reads the gradient norm on the host to decide whether to clip, so the host waits for the whole
backward pass and the device then waits for the host. Here the norm stays on the device, with each rank's part summed in
float64; gradients are multiplied by min(1, limit / (norm + 1e-6)), which is exact where it is 1. Everything else uses
Megatron's public methods. `log_num_zeros_in_grad` and fp16's loss scale, which would read from the device, are options
of Megatron that this package does not set.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_ext.config import Config
from megatron_ext.config.options import GradientSharing
from megatron_ext.engine import compat
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.transformer import weight_dtype

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def gradient_sharing(config: Config) -> GradientSharing:
    return config.gradient_sharing(torch.cuda.is_available(), dist.get_world_size())


def wrap(chunks: Sequence[PackedGPT], config: Config) -> list[DistributedDataParallel]:
    """Wrap each chunk in Megatron's DDP, with gradient buffers (fp32 by default) reduced over data x context ranks."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.optimizer.main_grads_dtype == "fp32", **asdict(gradient_sharing(config))
    )
    return [
        DistributedDataParallel(chunk.config, ddp, in_precision(chunk, config), disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def in_precision(chunk: PackedGPT, config: Config) -> torch.nn.Module:
    if config.training.bf16:
        return Float16Module(chunk.config, chunk)
    return chunk


def build_optimizer(model: list[DistributedDataParallel], config: Config) -> MegatronOptimizer:
    """Build AdamW or Muon over the wrapped chunks; biases and norms have weight decay only with `weight_decay_all`.

    Raises:
        UserError: Megatron has no Muon here.
    """
    options = config.optimizer
    sharing = gradient_sharing(config)
    muon: dict[str, Any] = {}
    if options.optimizer == "muon":
        compat.check_muon()
        # each tensor-parallel rank orthogonalizes whole matrices; Megatron's default orthogonalizes each rank's part
        muon = {name: value for name, value in vars(options).items() if name.startswith("muon_")}
        muon["muon_tp_mode"] = "duplicated"
    settings = MegatronOptimizerConfig(
        optimizer=options.optimizer,
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        # an infinite limit never clips, but the norm is still computed
        clip_grad=options.clip_grad or math.inf,
        bf16=config.training.bf16,
        params_dtype=weight_dtype(config),
        use_distributed_optimizer=sharing.use_distributed_optimizer,
        overlap_param_gather=sharing.overlap_param_gather,
        fp8_recipe=config.training.fp8_recipe if config.training.fp8_format else None,
        use_precision_aware_optimizer=options.use_precision_aware_optimizer,
        store_param_remainders=False,  # store full master weights, because checkpoints contain them for every optimizer
        main_grads_dtype=_TYPES[options.main_grads_dtype],
        main_params_dtype=_TYPES[options.main_params_dtype],
        exp_avg_dtype=_TYPES[options.exp_avg_dtype],
        exp_avg_sq_dtype=_TYPES[options.exp_avg_sq_dtype],
        optimizer_cpu_offload=options.optimizer_cpu_offload,
        optimizer_offload_fraction=options.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=options.optimizer_cpu_offload,
        **muon,
    )
    # by default Megatron excludes biases and norms from weight decay; empty overrides include them
    overrides: dict[ParamKey, ParamGroupOverride] | None = None
    if options.weight_decay_all:
        overrides = {}
    return get_megatron_optimizer(settings, model, config_overrides=overrides, use_gloo_process_groups=False)


def set_learning_rate(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Set both for every parameter group, times the group's own factors (0 for groups without weight decay)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizer itself, or its parts: experts have their own, and what Muon leaves to Adam."""
    if isinstance(optimizer, ChainedOptimizer):
        return list(optimizer.chained_optimizers)
    return [optimizer]


@torch.no_grad()
def squared_gradient_norm(optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
    """Return the squared norm of all gradients on all ranks, float32 [] on the device. Collective."""
    # The ranks over which gradients are distributed. The experts' optimizer, if it is not a distributed one, has
    # another group: the one in which each expert occurs once.
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    optimizer.prepare_grads()
    for part in parts_of(optimizer):
        # the second is the method's earlier name. Remove with 0.18.
        gradients = getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm
        by_group.setdefault(part.get_grad_stats_parallel_group(), []).extend(gradients())
    squared = torch.zeros((), device=device)
    for group, grads in by_group.items():
        share: Tensor = torch.zeros((), device=device)
        if grads:
            # in float64: torch's `get_total_norm` rounds to the gradients' dtype, and on a CPU it sums ten million
            # squares sequentially, which makes the norm 4e-4 too small in float32
            norms = [norm.to(device) for norm in torch._foreach_norm(grads, 2.0, torch.float64)]
            share = (torch.linalg.vector_norm(torch.stack(norms)) ** 2.0).float()
        dist.all_reduce(share, group=group)
        squared += share
    return squared


@torch.no_grad()
def clip_and_update(optimizer: MegatronOptimizer, squared_norm: Tensor) -> None:
    """Clip the gradients to the optimizer's limit and update the weights."""
    limit = optimizer.config.clip_grad
    if math.isfinite(limit):
        factor = (limit / (squared_norm.double().sqrt() + 1e-6)).clamp(max=1.0).float()
        # the gradients that the update reads, as in `clip_grad_by_total_norm_fp32`
        name = "grad"
        if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            name = "decoupled_grad"
        parameters = [parameter for part in parts_of(optimizer) for parameter in part.get_parameters()]
        grads = [getattr(parameter, name) for parameter in parameters if getattr(parameter, name, None) is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
    optimizer.step_with_ready_grads()


def sync_params(model: Sequence[DistributedDataParallel]) -> None:
    """Gather the parameters that the last optimizer step changed on other ranks. Collective.

    With --overlap-param-gather this otherwise happens when the next forward pass calls each module; call this function
    to read weights outside a forward pass.
    """
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def unwrap(model: Sequence[DistributedDataParallel]) -> Iterator[PackedGPT]:
    for module in model:
        inner: Any = module.module
        while not isinstance(inner, PackedGPT):
            inner = inner.module
        yield inner
