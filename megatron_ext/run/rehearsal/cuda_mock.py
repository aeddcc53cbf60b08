"""Patch a CPU-only torch so that it behaves as if it had a GPU; each patch with its reason.

`install` is called in a process of its own, after `cuda_library.load` and before Megatron is imported, which imports
some of these functions by name. Nothing is restored.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.launch import read_launch

GPU = "NVIDIA H100 80GB HBM3"  # the name of the device
_GIB = 2**30
# what is patched, as types do not let it be
_cuda: Any = torch.cuda
_torch: Any = torch
_groups: Any = dist
_Tensor: Any = torch.Tensor
KERNELS = ("silu_backward", "silu_backward.grad_input", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
_KERNELS = torch.library.Library("aten", "IMPL")  # its registrations end with it
OnSync = Callable[[str], None]  # takes what the host would have waited for


def install(on_sync: OnSync) -> None:
    """Patch torch; `on_sync` is called for each wait of the host for the GPU that torch has a function for."""
    for patch in PATCHES:
        patch(on_sync)
    _fused_swiglu()


def _device(on_sync: OnSync) -> None:
    """Answer questions about the device, which torch.cuda hands to a library that a CPU-only build lacks."""
    properties = SimpleNamespace(name=GPU, major=9, minor=0, total_memory=80 * _GIB, multi_processor_count=132)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "get_device_name": GPU,
        "get_arch_list": ["sm_90"],
        "_lazy_init": None,
        "set_device": None,
        "empty_cache": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
    }
    for name, answer in answers.items():
        setattr(_cuda, name, _returning(answer))
    _cuda.synchronize = lambda device=None: on_sync("torch.cuda.synchronize")


def _returning(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


class _Stream:
    """Stands for a stream and for an event: work is done as it is called, so that nothing is ever waited for."""

    on_sync: OnSync

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream, self.device = 0, torch.device("cuda", 0)

    def wait_stream(self, other: Any = None) -> None:
        """Do nothing: this is a wait of the device."""

    wait_event = record = wait = record_stream = wait_stream

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return event or _Stream()

    def query(self) -> bool:
        """Say that all is done."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Return 0 milliseconds."""
        return 0.0

    def synchronize(self) -> None:
        """Note a wait of the host."""
        self.on_sync("stream or event .synchronize")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _streams(on_sync: OnSync) -> None:
    """Replace streams and events, whose classes do not exist in a CPU-only build."""
    _Stream.on_sync = staticmethod(on_sync)

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        yield

    _cuda.Stream = _cuda.Event = _Stream
    _cuda.current_stream = _cuda.default_stream = lambda device=None: _Stream()
    _cuda.stream, _cuda.set_stream = stream, _returning(None)
    _Tensor.record_stream = lambda self, stream: None


def _random_states(on_sync: OnSync) -> None:
    """Let the CPU's generator stand for the device's, whose state Megatron saves and sets around recomputation."""
    _cuda.default_generators = (torch.default_generator,)
    _cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    for owner in (_cuda, _cuda.random):
        owner.get_rng_state = lambda device="cuda": torch.default_generator.get_state()
        owner.set_rng_state = lambda state, device="cuda": None


def _type_names(on_sync: OnSync) -> None:
    """Name the types of fake CUDA tensors, which Megatron's optimizers compare with 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or self.device.type != "cuda":
            return original(self, *args, **kwargs)
        return original(torch.empty(0, dtype=self.dtype)).replace("torch.", "torch.cuda.")

    _Tensor.type = type_


def _processes(on_sync: OnSync) -> None:
    """Join groups without others: torch's fake backend does nothing and says that it is done."""
    original = dist.init_process_group

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        here = read_launch(os.environ)
        original("fake", store=FakeStore(), rank=here.rank, world_size=here.world_size)

    _groups.init_process_group = init_process_group


def _objects(on_sync: OnSync) -> None:
    """Give every rank's place this rank's object: pickles travel as bytes, which fake tensors do not hold."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        on_sync("all_gather_object")
        object_list[:] = [obj] * len(object_list)

    def broadcast_object_list(object_list: list[Any], src: int | None = None, **options: Any) -> None:
        on_sync("broadcast_object_list")

    _groups.all_gather_object, _groups.broadcast_object_list = all_gather_object, broadcast_object_list


def _lists(on_sync: OnSync) -> None:
    """Read a fake CUDA tensor into lists with one copy to the host, as a real one is, not number by number.

    One on the host becomes an array in the same way, as Megatron makes of the numbers of tokens sent to experts.
    """
    fake: Any = FakeTensor
    original = fake.tolist

    def tolist(self: Any) -> Any:
        return original(self.cpu() if self.device.type == "cuda" else self)

    def numpy(self: Any) -> Any:
        assert self.device.type == "cpu", "torch reads no CUDA tensor into an array"
        return np.array(original(self))

    fake.tolist, fake.numpy = tolist, numpy


def _literals(on_sync: OnSync) -> None:
    """Build torch.tensor(..., device="cuda") on the CPU and copy it, as torch itself does where it may not use CUDA.

    Tensors among the numbers are read one by one, as torch does, but where `on_sync` sees it.
    """
    _torch._C._set_only_lift_cpu_tensors(True)
    original = torch.tensor

    def read(data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return data.item() if data.dim() == 0 else data
        return [read(one) for one in data] if isinstance(data, list | tuple) else data

    @functools.wraps(original)
    def tensor(data: Any, **options: Any) -> torch.Tensor:
        return original(read(data), **options)

    _torch.tensor = tensor


def _kernels(on_sync: OnSync) -> None:
    """Say that CUDA has kernels where a CPU-only torch would compose operators of others, which keep more memory.

    Without them the backward of SiLU is seven operators and RMSNorm keeps fp32 copies of its input. They are never
    called: fake tensors need the shapes alone.
    """
    for name in KERNELS:
        _KERNELS.impl(name, _not_called, "CUDA")


def _not_called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kernel was called on a device that is not there")


def _storage_copies(on_sync: OnSync) -> None:
    """Let a storage be copied into another, as norms computed again are: torch would keep both of a fake for ever."""
    original = torch.UntypedStorage.copy_

    def copy_(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        return self if self.device.type == "meta" else original(self, source, non_blocking)

    storage: Any = torch.UntypedStorage
    storage.copy_ = copy_


def _module_moves(on_sync: OnSync) -> None:
    """Move and cast modules by new parameters where anything changes: torch would swap fake tensors, and cannot."""

    def apply(self: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        for module in self.modules() if recurse else (self,):
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                with torch.no_grad():
                    moved = function(tensor)
                if (moved.dtype, moved.device) == (tensor.dtype, tensor.device):
                    continue
                if isinstance(tensor, torch.nn.Parameter):
                    parameter = torch.nn.Parameter(moved, tensor.requires_grad)
                    parameter.__dict__.update(tensor.__dict__ | parameter.__dict__)
                    module._parameters[name] = parameter
                else:
                    module._buffers[name] = moved
        return self

    _torch.nn.Module._apply = apply


def _transformer_engine(on_sync: OnSync) -> None:
    """Hide Transformer Engine and other packages of kernels: they take no fake tensors."""
    modules: Any = sys.modules
    for package in ("transformer_engine", "transformer_engine_torch", "apex", "flash_attn", "flash_attn_2_cuda"):
        modules[package] = None


def _fused_swiglu() -> None:
    """Give the shapes of what Megatron's compiled SwiGLU gives: run as written it would keep temporaries of its own."""
    from megatron_ext.engine.compat import install_swiglu  # Megatron takes what is patched above by name

    def product(y: torch.Tensor) -> torch.Tensor:
        return y.new_empty((*y.shape[:-1], y.shape[-1] // 2))

    install_swiglu(
        product,
        lambda gradient, y: torch.empty_like(y),
        lambda y, weights: product(y),
        lambda gradient, y, weights: (torch.empty_like(y), torch.empty_like(weights)),
    )


PATCHES: tuple[Callable[[OnSync], None], ...] = (
    _device,
    _streams,
    _random_states,
    _type_names,
    _processes,
    _objects,
    _lists,
    _literals,
    _kernels,
    _storage_copies,
    _module_moves,
    _transformer_engine,
)
