"""Stand-ins for parts of Megatron-Core 0.16 that do not do what this package needs.

Each has its reason and the condition of its removal; tests/engine/test_compat.py fails when one is no longer
needed. `check_version` refuses a Megatron-Core that none of this was written for.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core
import megatron.core.dist_checkpointing.strategies.torch as megatron_checkpoints
import megatron.core.distributed.param_and_grad_buffer as megatron_buffers
import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as megatron_distributed
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_distributed
from megatron.core import parallel_state
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.errors import UserError

SUPPORTED = "0.16"
_COALESCING = ("group", "device", "async_ops")  # parameters of the manager that `one_by_one` stands in for


def check_version() -> None:
    """Raise UserError unless Megatron-Core is a version that this module was written for."""
    version = megatron.core.__version__
    if not version.startswith(SUPPORTED + "."):
        raise UserError(
            f"megatron-core: got {version}, needs {SUPPORTED}.x; pip install 'megatron-core~={SUPPORTED}.1'"
        )


class RMSNorm(torch.nn.RMSNorm):
    """Normalises in layers of the local layer spec.

    Megatron's own WrappedTorchNorm refuses sequence parallelism; under it the weight must be marked, or its
    gradient stays a part of the whole. Remove when WrappedTorchNorm marks it.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCentredRMSNorm(RMSNorm):
    """Multiplies by one more than its weight, in fp32 as transformers' Gemma; torch and Megatron's wrapper do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normalised over its last dimension, in the type of x."""
        normed = torch.nn.functional.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps)
        return normed.type_as(x)


class LayerNorm(torch.nn.LayerNorm):
    """Normalises in layers of the local layer spec, as `RMSNorm` does, and for the same reason."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class FusedAdam(torch.optim.Optimizer):
    """Does AdamW with the state layout of Apex and Transformer Engine: the step count lives in the group.

    torch's AdamW, Megatron's fallback, keeps a step per parameter, which DistributedOptimizer's checkpoints
    cannot load (KeyError 'step', then one step tensor shared by all). Remove when they can.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **unused: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do one step of decoupled AdamW on every parameter that has a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                group["step"] = group.get("step", 0) + 1
            for param in params:
                self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[param]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["exp_avg"].lerp_(param.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        corrected = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(state["exp_avg"], corrected, value=-group["lr"] / (1 - beta1 ** group["step"]))


def install_optimizer() -> None:
    """Put FusedAdam where Megatron found neither Transformer Engine nor Apex; otherwise do nothing."""
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
        megatron_distributed.Adam = FusedAdam
        megatron_distributed.HAVE_APEX_OR_TE = megatron_distributed.USING_APEX_OPTIMIZER = True


@contextlib.contextmanager
def one_by_one(
    group: torch.distributed.ProcessGroup, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Any]:
    """Issue each collective of the block by itself at its end; the handle waits for all of them.

    torch's `_coalescing_manager` joins them into one call. torch 2.13's gloo now and then corrupts the heap where many
    such asynchronous all-gathers are under way (2 of 16 runs with 300 of them; none of 14 without joining; the cause
    is not known). Remove when a torch does without (tests/engine/test_compat.py says how to see it).
    """
    assert device is None, device
    calls = torch_distributed._world.pg_coalesce_state.setdefault(group, [])  # where torch notes them meanwhile
    handle = torch_distributed._CoalescingManager()
    try:
        yield handle
    finally:
        torch_distributed._world.pg_coalesce_state.pop(group)
    for call in calls:
        tensors = [call.tensor] if call.dst_tensor is None else [call.dst_tensor, call.tensor]
        reduction = {} if call.redop is None else {"op": call.redop}
        handle.append(call.op(*tensors, group=group, async_op=async_ops, **reduction))


def install_one_by_one() -> None:
    """Put `one_by_one` where Megatron gathers parameters and reduces gradients on a CPU; beside CUDA do nothing."""
    if torch.cuda.is_available() or megatron_buffers._coalescing_manager is one_by_one:
        return
    parameters = tuple(inspect.signature(megatron_buffers._coalescing_manager).parameters)
    assert parameters == _COALESCING, parameters
    megatron_buffers._coalescing_manager = one_by_one


def process_groups() -> list[dist.ProcessGroup]:
    """List the groups that Megatron has made and not yet forgotten; none where a version keeps no such list.

    Its `destroy_model_parallel` drops them without destroying their communicators. Remove when it destroys them.
    """
    groups = getattr(parallel_state, "_global_process_group_list", None) or []
    return [group for group in groups if group is not None]


def write_tensor(transforms: Any, stream: Any, tensor: torch.Tensor, item: WriteItem, name: str) -> WriteResult:
    """Write one planned tensor to the open stream of file `name`, as torch's own writer does.

    Its public method opens, schedules and syncs files itself. Remove when it takes a stream that hashes.
    """
    return _write_item(transforms, stream, tensor, item, name, SerializationFormat.TORCH_SAVE)


def optimizer_states(optimizer: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return this process's run of a weight in a distributed optimizer: its master ("param") and its moments.

    The optimizer's public state dict has them by bucket, copied. Remove when it gives them by weight.
    """
    states: dict[str, torch.Tensor] = optimizer._get_main_param_and_optimizer_states(weight)
    return states


def install_reader(reader: Callable[[Any], Any]) -> None:
    """Let Megatron read checkpoints through `reader`, made from a folder.

    Its own reader unpickles `.metadata`. Remove when the reader is an argument of its load strategy.
    """
    megatron_checkpoints._get_filesystem_reader = lambda folder, cache_metadata=False: reader(folder)
