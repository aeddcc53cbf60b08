"""Make torch answer as on a node of 8 H100s, while every tensor stays on the CPU and NCCL is gloo.

A request for a CUDA device gets the CPU, in torch's functions that take a device; results are those of the CPU's
operators. Streams do their work at once. `install` comes first in a process, and nothing is restored.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

GPUS = 8
MEMORY = 80 * 2**30
MACHINE = SimpleNamespace(capability=(9, 0), cudnn=92600)
CPU = torch.device("cpu")
DEVICE = torch.device  # torch's own class, which `install` replaces

DRAWN = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like")
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")
FACTORIES = ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "empty_strided")
METHODS = ("to", "new_tensor", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
INERT = ("_lazy_init", "init", "set_device", "set_stream", "empty_cache", "synchronize", "ipc_collect")
MEASURES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def install() -> None:
    """Replace what this module replaces."""
    with torch.device("cpu"):  # torch caches the functions to redirect at the first such block
        torch.empty(0)
    _queries()
    _streams()
    _random_states()
    _tensors()
    _processes()
    torch.backends.cudnn.version = lambda: MACHINE.cudnn  # type: ignore[assignment]
    torch.version.cuda = "13.0"
    torch.device = _Device("device", (), {})  # type: ignore[misc]


def change(**facts: Any) -> None:
    """Change facts of MACHINE, and make Transformer Engine forget those that it remembers."""
    vars(MACHINE).update(facts)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine."):
            for function in vars(module).values():
                getattr(function, "cache_clear", _always(None))()


class _Device(type):
    """Stands for torch.device; a number is a CUDA device even where there is none."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return DEVICE("cuda", args[0]) if type(args[0]) is int else DEVICE(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return type(value) is DEVICE


def _queries() -> None:
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "device_count": GPUS,
        "current_device": 0,
        "get_device_name": "NVIDIA H100 80GB HBM3, emulated",
        "memory_stats": {},
        "mem_get_info": (MEMORY, MEMORY),
    }
    answers |= dict.fromkeys((*INERT, "reset_peak_memory_stats"))
    answers |= dict.fromkeys(MEASURES, 0)
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.get_device_capability = lambda device=None: MACHINE.capability
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(  # type: ignore[assignment]
        name=torch.cuda.get_device_name(),
        major=MACHINE.capability[0],
        minor=MACHINE.capability[1],
        total_memory=MEMORY,
        multi_processor_count=132,
        warp_size=32,
        L2_cache_size=50 * 2**20,
    )
    torch.cuda.nccl.version = lambda: (2, 30, 4)  # type: ignore[assignment]
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _always(None))


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


class Stream:
    """A stream or an event."""

    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream: Any = None) -> None:
        """Do nothing: the work is done."""

    wait_event = record = wait = record_stream = synchronize = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, event: Any) -> float:
        return 0.0


def _streams() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream()
    cuda.stream = cuda.device = lambda *args, **kwargs: contextlib.nullcontext()


def _random_states() -> None:
    cuda: Any = torch.cuda
    generator = torch.default_generator
    cuda.default_generators = (generator,) * GPUS
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: generator.manual_seed(int(seed))
    for owner in (cuda, cuda.random):
        owner.get_rng_state = lambda device="cuda": generator.get_state()
        owner.set_rng_state = lambda state, device="cuda": generator.set_state(state)
        owner.get_rng_state_all = lambda: [generator.get_state()]


def _names_cuda(value: Any) -> bool:
    if type(value) is DEVICE:
        return value.type == "cuda"
    return type(value) is int or (isinstance(value, str) and value.split(":")[0] == "cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Redirect a function's device to the CPU; pinned memory is ordinary memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if function.__name__ == "to":
            args = (args[0], *(CPU if _names_cuda(argument) else argument for argument in args[1:]))
        return function(*args, **kwargs)

    return call


class _TypeName(str):
    """A string 'torch.FloatTensor' that equals 'torch.cuda.FloatTensor' alone."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _tensors() -> None:
    tensor: Any = torch.Tensor
    for name in (*FACTORIES, *LIKE, *DRAWN):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in METHODS:
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    tensor._make_wrapper_subclass = staticmethod(_on_cpu(tensor._make_wrapper_subclass))
    tensor.is_cuda = property(lambda self: True)
    tensor.cuda = tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.is_pinned = _always(False)
    tensor.record_stream = _always(None)
    type_of = tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return _TypeName(answer) if isinstance(answer, str) else answer

    tensor.type = type_


def _processes() -> None:
    groups: Any = dist
    begin, new, barrier = dist.init_process_group, dist.new_group, dist.barrier

    @functools.wraps(begin)
    def init_process_group(backend: str | None = None, **options: Any) -> None:
        options.pop("device_id", None)
        begin("gloo" if backend and "nccl" in backend else backend, **options)

    @functools.wraps(new)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **unused: Any
    ) -> Any:
        return new(ranks, timeout, "gloo" if backend == "nccl" else backend, None, **unused)

    groups.is_nccl_available = _always(True)
    groups.init_process_group = init_process_group
    groups.new_group = dist.distributed_c10d.new_group = new_group
    groups.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
