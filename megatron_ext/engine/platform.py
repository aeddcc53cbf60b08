"""Choose the platform of a run: CUDA, or a CPU patched so that Megatron-Core runs on it.

Megatron-Core hard-codes CUDA in about a dozen places. Without a CUDA device, `install_cpu` replaces exactly the
torch functions that it calls there; otherwise it does nothing. Remove a patch when Megatron-Core takes the device from
its configuration (tests/engine/test_platform.py runs without each patch to show whether it is needed).
"""

import functools
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megatron_ext.engine import compat
from megatron_ext.errors import UserError, first_line
from megatron_ext.launch import LaunchError, read_launch

logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_replaced: list[tuple[Any, str, Any, bool]] = []  # owner, name, original function, whether it is the owner's attribute


@dataclass(frozen=True)
class Platform:
    """The platform on which a process computes."""

    device: torch.device
    communication: str  # the backend of torch.distributed
    transformer_engine: bool  # whether layers come from Transformer Engine

    @property
    def steps_ahead(self) -> int:
        """Number of steps launched before the host reads results; 0 on a CPU, which computes synchronously."""
        return int(self.device.type == "cuda")


def find(device: str) -> Platform:
    """Find the device of this process; a CUDA device becomes the current one.

    Raises:
        UserError: CUDA is requested but not available, or the CPU is requested although a CUDA device is visible;
            torch sees none of the GPUs of a Slurm job; LOCAL_RANK is the number of no GPU; or the import of an
            installed Transformer Engine fails.
    """
    # kernels start in program order, so that tensor parallelism overlaps with its communication; CUDA reads it at start
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise UserError("device: got cuda, needs a CUDA device that torch can see; use --device cpu")
    if device == "cpu" and cuda:
        raise UserError(
            "device: got cpu, but Megatron-Core would use the visible CUDA device; "
            "hide it with CUDA_VISIBLE_DEVICES= or use --device cuda"
        )
    if not cuda:
        gpus_of_job = os.environ.get("SLURM_GPUS_ON_NODE", "0")
        user_hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        if device == "auto" and gpus_of_job != "0" and not user_hides_gpus:
            raise UserError(
                f"device: got auto in a job with {gpus_of_job} GPUs on a node, but torch {torch.__version__} sees "
                "none; nvidia-smi prints the newest CUDA of the driver; use --device cpu to train on the CPUs"
            )
        return Platform(_CPU, "gloo", transformer_engine=False)
    number = read_launch().local_rank
    gpus = torch.cuda.device_count()
    if number >= gpus:
        raise LaunchError(f"LOCAL_RANK: got {number}, but this process sees {gpus} GPUs; start one process for each")
    local = torch.device("cuda", number)
    torch.cuda.set_device(local)
    if find_spec("transformer_engine") is None:
        return Platform(local, "nccl", transformer_engine=False)
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"transformer-engine: is installed, but its import fails ({first_line(error)}); install one that was built "
            "for this torch, or uninstall it to train with Megatron-Core's layers"
        ) from None
    return Platform(local, "nccl", transformer_engine=True)


def choose(device: str) -> Platform:
    """Find the device of this process and prepare Megatron-Core to run on it.

    Raises:
        UserError: as in `find`; or Triton would find no compiler; or the version of Megatron-Core, or of Transformer
            Engine with it, is not supported.
    """
    platform = find(device)
    if platform.device.type == "cuda" and compiler() is None:
        raise UserError(
            "CC: is not set, and neither gcc nor clang is in PATH; Triton needs a C compiler at first use, install gcc"
        )
    compat.install()
    if platform.device.type == "cuda" and not python_header().is_file():
        logger.warning(
            "warning: there is no %s, which Triton needs at first use if CPATH does not lead to another one; install "
            "python3-dev", python_header(),
        )  # fmt: skip
    if platform.device.type == "cpu":
        install_cpu()
    else:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # lets run/watchdog.py write the collectives of a hang
    if platform.transformer_engine:
        compat.require_transformer_engine()
    return platform


def compiler() -> str | None:
    """Return the C compiler that Triton would use, or None."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def python_header() -> Path:
    """Return the header that Triton's C code includes, where Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's, whose own headers are elsewhere
        scheme = "posix_prefix"
    return Path(sysconfig.get_path("include", scheme), "Python.h")


def install_cpu() -> None:
    """Apply the patches below, if they are not installed and there is no CUDA device."""
    if not torch.cuda.is_available() and not _replaced:
        for patch in PATCHES.values():
            patch()


def uninstall_cpu() -> None:
    """Restore every replaced function."""
    while _replaced:
        owner, name, original, was_defined = _replaced.pop()
        if was_defined:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name), name in vars(owner)))
    setattr(owner, name, value)


def _factories() -> None:
    """Redirect literal `device="cuda"` and `pin_memory=True` in schedules, optimizer and gradient clipping."""
    with torch.device("cpu"):  # torch caches the functions to redirect at the first such block
        torch.empty(0)
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        _replace(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


class _TypeName(str):
    """A string 'torch.FloatTensor' that also equals 'torch.cuda.FloatTensor'."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _type_names() -> None:
    """Make the optimizers' comparison of `param.type()` with 'torch.cuda.FloatTensor' succeed."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str):
            return _TypeName(answer)
        return answer

    _replace(torch.Tensor, "type", type_)


def _random_state() -> None:
    """Make the tensor-parallel RNG tracker use the CPU's generator; the tracker imports two helpers by name."""
    import megatron.core.tensor_parallel.random as tracker

    _replace(torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))
    names = {torch.cuda: "{}_rng_state", torch.cuda.random: "{}_rng_state", tracker: "_{}_cuda_rng_state"}
    for owner, name in names.items():
        # new functions for each owner: torch._dynamo does not accept one object under two names
        _replace(owner, name.format("get"), lambda *args, **kwargs: torch.get_rng_state())
        _replace(owner, name.format("set"), lambda state, *args, **kwargs: torch.set_rng_state(state))


PATCHES: dict[str, Callable[[], None]] = {
    # called by tensor_parallel, pipeline communication and optimizer
    "current_device": lambda: _replace(torch.cuda, "current_device", lambda: _CPU),
    # called before gradients are reduced, for CUDA graphs that may still add to them (from 0.19 on)
    "current_stream": lambda: _replace(torch.cuda, "current_stream", lambda: None),
    "factories": _factories,
    # called for the tied embedding of the first and the last pipeline stage
    "move_to_cuda": lambda: _replace(torch.Tensor, "cuda", lambda self: self),
    "type_names": _type_names,
    "random_state": _random_state,
}
