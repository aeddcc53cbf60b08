"""Patch torch so that it behaves as if it had a GPU, in builds for the CPU and for CUDA; each patch states its reason.

`install` is called in a separate process, after `process.load_mock` and before Megatron is imported, which imports
some of these functions by name. Nothing is restored.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.launch import read_launch

# untyped, because types do not allow the patches
_torch: Any = torch
_cuda = _torch.cuda
# what FlashAttention 4 compiles for
HOPPER = {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
}
KERNELS = ("silu_backward", "silu_backward.grad_input", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
_KERNELS = torch.library.Library("aten", "IMPL")  # its registrations last as long as this object


def on_sync(cause: str) -> None:
    """Do nothing; a meter replaces this function, called for each host synchronization that has a function in torch."""


def install() -> None:
    """Patch torch, then Megatron."""
    _device()
    _processes()
    _values()
    _kernels()
    _storage_copies()
    _module_moves()
    _packages()
    _fused_swiglu()


class _Stream:
    """Replaces a stream or an event: work is done when it is called, so nothing ever waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: Any = None) -> None:
        """Do nothing: this is a wait of the device, not of the host."""

    wait_event = record = wait = record_stream = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def synchronize(self) -> None:
        on_sync("stream or event .synchronize")


def _device() -> None:
    """Replace what torch.cuda lacks without a GPU: the answers to its queries, and the classes of streams.

    The CPU's generator replaces the device's, whose state Megatron saves and sets around recomputation.
    """
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "_lazy_init": None,
        "set_device": None,
        "set_stream": None,
        "empty_cache": None,
    }
    for name, answer in answers.items():
        setattr(_cuda, name, lambda *args, answer=answer, **options: answer)
    _cuda.synchronize = lambda device=None: on_sync("torch.cuda.synchronize")
    _cuda.Stream = _cuda.Event = _Stream
    _cuda.current_stream = _cuda.default_stream = lambda device=None: _Stream()
    _cuda.stream = contextlib.nullcontext
    _torch.Tensor.record_stream = lambda self, stream: None
    _cuda.default_generators = (torch.default_generator,)
    _cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    for owner in (_cuda, _cuda.random):
        owner.get_rng_state = lambda device="cuda": torch.default_generator.get_state()
        owner.set_rng_state = lambda state, device="cuda": None


def _processes() -> None:
    """Join process groups without other processes: torch's fake backend does nothing and reports completion.

    All ranks have this rank's objects: objects are pickled to bytes, which fake tensors cannot store.
    """
    original = dist.init_process_group

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        here = read_launch()
        original("fake", store=FakeStore(), rank=here.rank, world_size=here.world_size)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        on_sync("all_gather_object")
        object_list[:] = [obj] * len(object_list)

    groups: Any = dist
    groups.init_process_group = init_process_group
    groups.all_gather_object = all_gather_object


def _values() -> None:
    """Read the values of a fake CUDA tensor through copies to the host that the meter sees, as with a real one.

    `tolist` copies a CUDA tensor once, not element by element. `numpy` reads a tensor of the host in the same way, as
    Megatron does with the token counts of experts. torch.tensor(..., device="cuda") is built on the CPU and copied, as
    torch does if it may not use CUDA; tensors among its values are read one by one.
    """
    fake: Any = FakeTensor
    to_list = fake.tolist
    literal = torch.tensor

    def tolist(self: Any) -> Any:
        if self.device.type == "cuda":
            return to_list(self.cpu())
        return to_list(self)

    def numpy(self: Any) -> Any:
        assert self.device.type == "cpu", "torch reads no CUDA tensor into an array"
        return np.array(to_list(self))

    def read(data: Any) -> Any:
        if isinstance(data, torch.Tensor) and data.dim() == 0:
            return data.item()
        if isinstance(data, list | tuple):
            return list(map(read, data))
        return data

    @functools.wraps(literal)
    def tensor(data: Any, **options: Any) -> torch.Tensor:
        return literal(read(data), **options)

    fake.tolist = tolist
    fake.numpy = numpy
    _torch.tensor = tensor
    _torch._C._set_only_lift_cpu_tensors(True)


def _kernels() -> None:
    """Register CUDA kernels for operators that a CPU-only torch would decompose, which keeps more memory.

    Without them the backward of SiLU is seven operators and RMSNorm keeps fp32 copies of its input. They are never
    called: fake tensors only need the shapes. The reference attention is composed: a build for CUDA would choose a
    kernel by asking the device.
    """

    def not_called(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel was called on a device that is not there")

    for name in KERNELS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _KERNELS.impl(name, not_called, "CUDA")
    functional = _torch.nn.functional
    functional.scaled_dot_product_attention = sdpa_kernel(SDPBackend.MATH)(functional.scaled_dot_product_attention)


def _storage_copies() -> None:
    """Support copies between storages, for recomputed norms: torch would keep both fake storages forever."""
    original = torch.UntypedStorage.copy_

    def copy_(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        if self.device.type == "meta":
            return self
        return original(self, source, non_blocking)

    _torch.UntypedStorage.copy_ = copy_


def _module_moves() -> None:
    """Move and cast modules by replacing parameters: torch would swap tensors, which fake tensors refuse."""

    def apply(self: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        for module in self.modules() if recurse else (self,):
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    with torch.no_grad():
                        moved = function(tensor)
                    if (moved.dtype, moved.device) == (tensor.dtype, tensor.device):
                        continue
                    if isinstance(tensor, torch.nn.Parameter):
                        moved = torch.nn.Parameter(moved, tensor.requires_grad)
                        moved.__dict__.update(tensor.__dict__ | moved.__dict__)
                    tensors[name] = moved
        return self

    _torch.nn.Module._apply = apply


def _packages() -> None:
    """Hide packages whose kernels do not support fake tensors, and choose Hopper for FlashAttention 4, which does.

    On fake tensors FlashAttention 4 compiles its kernels and allocates what they write. It keeps them in a cache.
    """
    from megatron_ext.attention import adapters

    hidden = ["transformer_engine", "transformer_engine_torch", "apex", "flash_attn_2_cuda"]
    if adapters.flash_attn_4_missing() is not None:
        hidden.append("flash_attn")
    for package in hidden:
        sys.modules[package] = None  # type: ignore[assignment]
    for name, value in HOPPER.items():
        os.environ.setdefault(name, value)


def _fused_swiglu() -> None:
    """Replace Megatron's compiled SwiGLU by its output shapes: run eagerly it would keep temporaries."""
    from megatron_ext.engine.compat import install_swiglu

    def product(y: torch.Tensor) -> torch.Tensor:
        return y.new_empty((*y.shape[:-1], y.shape[-1] // 2))

    install_swiglu(
        product,
        lambda gradient, y: torch.empty_like(y),
        lambda y, weights: product(y),
        lambda gradient, y, weights: (torch.empty_like(y), torch.empty_like(weights)),
    )
