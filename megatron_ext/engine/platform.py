"""Where the run computes: CUDA as Megatron-Core expects it, or a CPU made to look so where it asks.

Megatron-Core 0.16 names CUDA literally in about a dozen places. Without a CUDA device, `install_cpu` replaces
exactly the torch entry points it calls there; with one it does nothing. Remove a patch when Megatron-Core
takes the device from its configuration (tests/engine/test_platform.py runs without each and says so).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.launch import read_launch

_CPU = torch.device("cpu")
_replaced: list[tuple[Any, str, Any, bool]] = []


@dataclass(frozen=True)
class Platform:
    """Says what the run computes on.

    Attributes:
        device: this process's device.
        communication: torch.distributed's backend.
        transformer_engine: layers come from Transformer Engine.
    """

    device: torch.device
    communication: str
    transformer_engine: bool

    @property
    def steps_ahead(self) -> int:
        """Steps that the device has been given and the host knows no result of: a CPU's results are there at once."""
        return 1 if self.device.type == "cuda" else 0


def choose(device: str) -> Platform:
    """Settle the device of this process and make Megatron-Core run on it.

    Raises:
        UserError: CUDA is asked for and there is none, or the CPU is asked for beside a CUDA device; a LOCAL_RANK
            that is no number.
    """
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise UserError("device: got cuda, needs a CUDA device that torch can see; use --device cpu")
    if device == "cpu" and cuda:
        raise UserError(
            "device: got cpu beside a visible CUDA device, Megatron-Core would take the latter; "
            "hide it with CUDA_VISIBLE_DEVICES= or use --device cuda"
        )
    if not cuda:
        install_cpu()
        return Platform(_CPU, "gloo", transformer_engine=False)
    local = torch.device("cuda", read_launch(os.environ).local_rank)
    torch.cuda.set_device(local)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that run/watchdog.py can write when one hangs
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return Platform(local, "nccl", transformer_engine=False)
    return Platform(local, "nccl", transformer_engine=True)


def install_cpu(without: Collection[str] = ()) -> None:
    """Apply the patches below once, except those named in `without` (for the test of their need)."""
    if torch.cuda.is_available() or _replaced:
        return
    for name, patch in PATCHES.items():
        if name not in without:
            patch()


def uninstall_cpu() -> None:
    """Put every replaced entry point back."""
    while _replaced:
        owner, name, original, own = _replaced.pop()
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name), name in vars(owner)))
    setattr(owner, name, value)


def _current_device() -> None:
    """Answer `device=torch.cuda.current_device()` in tensor_parallel, pipeline communication and optimizer."""
    _replace(torch.cuda, "current_device", lambda: _CPU)


def _returning(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` in a new function object: torch._dynamo refuses one object under two names."""
    return lambda *args, **kwargs: function(*args)


def _factories() -> None:
    """Redirect literal `device="cuda"` and `pin_memory=True` in schedules, optimizer and gradient clipping."""
    with torch.device("cpu"):  # from the first such block on torch remembers the functions it redirects: not these
        torch.empty(0)
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        _replace(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _move_to_cuda() -> None:
    """Undo `.cuda()` on the tied embedding of the first and the last pipeline stage."""
    _replace(torch.Tensor, "cuda", lambda self: self)


class _TypeName(str):
    """Is 'torch.FloatTensor', and also equals 'torch.cuda.FloatTensor'."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _type_names() -> None:
    """Pass the optimizers' comparison of `param.type()` with 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return _TypeName(answer) if isinstance(answer, str) else answer

    _replace(torch.Tensor, "type", type_)


def _random_state() -> None:
    """Let the tensor-parallel RNG tracker work on the CPU's generator; it imports two helpers by name."""
    import megatron.core.tensor_parallel.random as tracker

    _replace(torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))
    names = {torch.cuda: "{}_rng_state", torch.cuda.random: "{}_rng_state", tracker: "_{}_cuda_rng_state"}
    for owner, name in names.items():
        _replace(owner, name.format("get"), _returning(lambda *args: torch.get_rng_state()))
        _replace(owner, name.format("set"), _returning(lambda state, *args: torch.set_rng_state(state)))


PATCHES: dict[str, Callable[[], None]] = {
    "current_device": _current_device,
    "factories": _factories,
    "move_to_cuda": _move_to_cuda,
    "type_names": _type_names,
    "random_state": _random_state,
}
