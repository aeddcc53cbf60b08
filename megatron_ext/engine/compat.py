"""Patches of Megatron-Core 0.16.1 to 0.19, and functions that use private names of it.

Each states its reason and when to remove it: "Remove with 0.16." marks what later series do not need.
tests/engine/test_compat.py fails when one is no longer needed. Branches ask for a name, never for a version.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron.core
import megatron.core.distributed.param_and_grad_buffer as megatron_buffers
import megatron.core.fusions.fused_bias_swiglu as megatron_swiglu
import megatron.core.models.common.embeddings.rope_utils as megatron_rotation
import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as megatron_distributed
import megatron.core.optimizer.optimizer as megatron_mixed_precision
import megatron.core.tensor_parallel.layers as megatron_layers
import megatron.core.tensor_parallel.mappings as megatron_mappings
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as megatron_experts
import megatron.core.transformer.moe.router as megatron_router
import megatron.core.transformer.transformer_block as megatron_block
import megatron.core.utils as megatron_utils
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_distributed
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_ext.engine.adam import FusedAdam
from megatron_ext.errors import UserError


def install() -> None:
    """Apply the patches that a run may always have, when a process chooses its device. Repeating it changes nothing."""
    install_optimizer()
    install_without_transformer_engine()
    if hasattr(megatron_random, "_get_share_storage"):
        _replace(megatron_random, "_get_share_storage", lambda: copy_storage)
    _replace(megatron_rotation, "_apply_rotary_pos_emb_bshd", rotate)
    if not torch.cuda.is_available():
        install_gloo()
        _replace(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", counts_on_host)
        megatron_block.get_cpu_offload_context = None  # Transformer Engine 2.9's makes a stream, also if nothing moves
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"  # the dispatcher creates a stream if this is None


def install_gloo() -> None:
    """Replace the collectives that Megatron calls for NCCL and that gloo lacks."""
    _replace(megatron_buffers, "_coalescing_manager", one_by_one)
    _replace(megatron_mappings, "_gather_along_first_dim", uneven_gather)
    _replace(megatron_mappings, "_reduce_scatter_along_first_dim", uneven_reduce_scatter)


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of Megatron by one that has parameters of the same names.

    One with keyword-only parameters and `**others` has Megatron's first ones: the rest may differ between versions.
    """
    theirs, ours = (inspect.signature(function).parameters for function in (getattr(owner, name), replacement))
    first = [parameter.name for parameter in ours.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert first == list(theirs)[: len(first)], (owner, name, theirs, ours)
    assert len(first) == len(theirs) or list(ours)[-1] == "others", (owner, name, theirs, ours)
    setattr(owner, name, replacement)


def require_transformer_engine() -> None:
    """Check that Megatron uses the Transformer Engine that is installed, whose layers the model is built of.

    Raises:
        UserError: Megatron did not find what it imports from it, which it does not report.
    """
    from megatron.core.extensions import transformer_engine

    if not (transformer_engine.HAVE_TE and megatron_random.HAVE_TE):
        raise UserError(
            f"transformer-engine: got {megatron_utils.get_te_version()}, from which Megatron-Core "
            f"{megatron.core.__version__} could not import what it uses; install a version of docs/versions.md"
        )


def copy_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Copy a recomputed tensor's values to the storage of the discarded output, which all its views share.

    Megatron lets the two tensors share one storage, by a C++ function that torch compiles in the first backward pass:
    every node would need a compiler and ninja. Remove when Megatron ships it compiled.
    """
    output.untyped_storage().resize_(recomputed.untyped_storage().size())
    output.untyped_storage().copy_(recomputed.untyped_storage())


def install_without_transformer_engine() -> None:
    """Define the names that Megatron imports from Transformer Engine or Apex, except those that it has imported.

    `--recompute-modules layernorm`: the default of CheckpointWithoutOutput for fp8 is False, with which it calls
    Transformer Engine; None disables fp8. Remove when its default is None.

    The router of experts refers to a function name that is undefined; it expects None. Remove with 0.16.

    `--optimizer-cpu-offload` compares the version of Transformer Engine, which is None if it is missing; 0 is below all
    others. Remove with 0.16.

    `gradient_accumulation_fusion`: Megatron refuses to build its own layers without Apex's extension. The only one that
    is built with this option and without Apex is the output layer next to Transformer Engine's layers, and it is never
    run: `PackedGPT` only uses its matrix. Remove when the layer checks for the extension in its computation.
    """
    if not hasattr(megatron_random, "FP8GlobalStateManager"):
        megatron_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)
    if not hasattr(megatron_experts, "te_general_gemm"):
        megatron_experts.te_general_gemm = None
    if megatron_utils.get_te_version() is None:
        megatron_utils._te_version = megatron_utils.PkgVersion("0")
    megatron_layers._grad_accum_fusion_available = True


def install_optimizer() -> None:
    """Replace Megatron's Adam by FusedAdam if there is neither Transformer Engine nor Apex, or if there is no CUDA.

    Megatron uses their optimizer and multi-tensor kernels whenever they can be imported, as in a GPU image, although
    they run only on CUDA. Without CUDA, Megatron's own functions replace these kernels. Remove that part when Megatron
    checks the tensors' device.
    """
    cuda = torch.cuda.is_available()
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER or not cuda:
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        megatron_optimizer.Adam = megatron_distributed.Adam = FusedAdam
    if not cuda:
        megatron_mixed_precision.multi_tensor_applier = megatron_utils.local_multi_tensor_applier
        megatron_mixed_precision.multi_tensor_scale_impl = megatron_utils.local_multi_tensor_scale


def check_muon() -> None:
    """Raise UserError unless Megatron can build Muon, of which earlier versions have another implementation."""
    if not (hasattr(megatron_optimizer, "_EMERGING_OPTIMIZERS") and megatron_optimizer.HAVE_EMERGING_OPTIMIZERS):
        raise UserError(
            f"optimizer: got muon, needs emerging-optimizers and Megatron-Core 0.18 or later, got "
            f"{megatron.core.__version__}; on Python 3.12, pip install emerging-optimizers 'megatron-core>=0.18,<0.20'"
        )


@contextlib.contextmanager
def one_by_one(
    group: torch.distributed.ProcessGroup, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Any]:
    """Run each collective of the block separately at its end; the handle waits for all of them.

    Megatron uses it without CUDA, where it gathers parameters and reduces gradients. torch's `_coalescing_manager`
    merges them into one call. With many such asynchronous all-gathers in flight, gloo in torch 2.13 occasionally
    corrupts the heap (2 of 16 runs with 300 of them; none of 14 without merging; cause unknown). Remove when the oldest
    supported torch does not (tests/engine/test_compat.py describes how to reproduce it).
    """
    assert device is None, device
    calls = torch_distributed._world.pg_coalesce_state.setdefault(group, [])  # torch records the calls here
    handle = torch_distributed._CoalescingManager()
    try:
        yield handle
    finally:
        torch_distributed._world.pg_coalesce_state.pop(group)
    for call in calls:
        tensors = [call.tensor]
        if call.dst_tensor is not None:
            tensors.insert(0, call.dst_tensor)
        reduction = {}
        if call.redop is not None:
            reduction["op"] = call.redop
        handle.append(call.op(*tensors, group=group, async_op=async_ops, **reduction))


class _Rotate(torch.autograd.Function):
    """Rotates the first dimensions of each head in the half-split layout: x [..., H] by cos and sin [..., R / 2]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second, plain = x.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    return torch.cat(((first * cos).sub_(second * sin), (second * cos).add_(first * sin), plain), dim=-1)


def rotate(
    t: torch.Tensor, freqs: torch.Tensor, rotary_interleaved: bool = False, *, mscale: float = 1.0, **others: bool
) -> torch.Tensor:
    """Rotate the first R dimensions of each head, t [t, 1, N, H] by angles [t, 1, 1, R], in the half-split layout.

    It equals Megatron's unfused rotation, which concatenates each head twice in forward and twice in backward. All
    other arguments must keep their defaults, 1 and False. Remove when Megatron concatenates once.
    """
    assert mscale == 1.0
    assert not any((rotary_interleaved, *others.values())), others
    angles = freqs[..., : freqs.shape[-1] // 2]  # both halves have the same angles
    rotated: torch.Tensor = _Rotate.apply(t, angles.cos().to(t.dtype), angles.sin().to(t.dtype))
    return rotated


def counts_on_host(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """Convert the token counts of experts to arrays, once the dispatcher has computed them.

    Megatron's dispatcher copies them to the host on a separate CUDA stream; without CUDA they are there already. Remove
    when it creates the stream only on CUDA.
    """
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(self, name)
            if isinstance(counts, torch.Tensor):
                setattr(self, name, counts.numpy())
    return tokens_per_expert


_gather = megatron_mappings._gather_along_first_dim
_reduce_scatter = megatron_mappings._reduce_scatter_along_first_dim


def uneven_gather(
    input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """Gather rows of the tensor-parallel ranks of experts; `output_split_sizes` gives the number of each rank's rows.

    torch.distributed gathers and reduces tensors of different sizes over NCCL but not over gloo, whose all-to-all
    supports them. Remove both functions when gloo supports them.
    """
    if output_split_sizes is None or group.size() == 1:
        return _gather(input_, group, output_split_sizes, use_global_buffer)
    gathered = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
    sent = [len(input_)] * group.size()
    dist.all_to_all_single(gathered, torch.cat([input_] * group.size()), output_split_sizes, sent, group=group)
    return gathered


def uneven_reduce_scatter(
    input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """Sum the ranks' rows and return the rows of this rank; `input_split_sizes` gives the number of rows of each."""
    if input_split_sizes is None or group.size() == 1:
        return _reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
    rows = input_split_sizes[group.rank()]
    parts = input_.new_empty(group.size() * rows, *input_.shape[1:])
    dist.all_to_all_single(parts, input_.contiguous(), [rows] * group.size(), input_split_sizes, group=group)
    return parts.unflatten(0, (group.size(), rows)).sum(dim=0)


def process_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that Megatron has created and still references.

    Megatron's `destroy_model_parallel` drops them without destroying their communicators. Remove when it destroys them.
    """
    return [group for group in parallel_state._global_process_group_list or [] if group is not None]


def install_swiglu(
    forward: Callable[[Any], Any],
    backward: Callable[[Any, Any], Any],
    weighted: Callable[[Any, Any], Any],
    weighted_backward: Callable[[Any, Any, Any], Any],
) -> None:
    """Replace Megatron's compiled SwiGLU of y [t, 1, 2 F], its gradient, and the weighted versions used by experts.

    The weighted versions multiply an expert's y [t, 2 F] by weights [t, 1]. A rehearsal has no device to compile them
    for. Remove when Megatron calls torch operators instead.
    """
    megatron_swiglu.swiglu = forward
    megatron_swiglu.swiglu_back = backward
    megatron_swiglu.weighted_swiglu = weighted
    megatron_swiglu.weighted_swiglu_back = weighted_backward


def observe_routing(observe: Callable[[torch.Tensor], None]) -> None:
    """Call a function with each routing map, bool [t, E], that Megatron's router computes.

    In a rehearsal the map has no values, but they determine the shapes of what follows. Remove when Megatron has a hook
    for this.
    """
    original = megatron_router.topk_routing_with_score_function

    @functools.wraps(original)
    def route(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights_tE, chosen_tE = original(*args, **options)
        observe(chosen_tE)
        return weights_tE, chosen_tE

    megatron_router.topk_routing_with_score_function = route


def dump_flight_recorder(path: Path) -> None:
    """Write torch's flight recorder of this rank's collectives, in the format of `torchfrtrace`.

    It records if TORCH_FR_BUFFER_SIZE is set. torch writes it only when NCCL's timeout expires, which is later than
    ours; `_dump_fr_trace` is the recorder of other backends. Remove when torch has a public function for this.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        path.write_bytes(torch._C._distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]
