"""Define the attention backends and their limits, and choose one for each call by the number of its segments and rows.

On CUDA `auto` chooses the first of these that can be used here, and whose limits the call does not exceed:

    flash_attn_4     if it is installed
    torch_varlen     torch's FlashAttention 2
    flash_attn       the package
    te_thd           Transformer Engine

On a CPU it chooses the reference. A name other than `auto` is used for every call. The first use of each backend is
logged. There is no silent fallback: a call that no backend supports raises an error with a remedy.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.attention import adapters, limits, reference
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.attention.limits import Heads, Limits
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.errors import UserError

logger = logging.getLogger(__name__)

LARGEST_HEAD = 256


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A kernel for packed attention and its limits.

    All but the reference run on CUDA, compute in half precision, and take heads of up to `LARGEST_HEAD` that 8 divides.
    """

    name: str  # the value of `--attention-backend`
    kernel: Attend
    capability: tuple[int, int] = (8, 0)  # the lowest one of CUDA
    sinks: bool = False  # whether it computes attention sinks, with exact gradients
    # (size of a key head, of a value head) -> whether value heads may be smaller than key heads, if 8 divides their
    # size; otherwise kernels get the smaller heads padded with zeros
    narrow_values: Callable[[int, int], bool] = lambda *_: False
    # returns what is not installed and how to get it; None if nothing is missing
    missing: Callable[[], str | None] = lambda: None
    # why it cannot compute a call, or any call of a run if that is None; see limits.py
    limits: Limits = lambda *_: None

    def objection(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_size: int,
        value_size: int = 0,
        *,
        sinks: bool = False,
        installed: bool = False,
    ) -> str | None:
        """Return why the backend cannot be used, with the remedy; None if it can.

        `value_size` 0 is the keys'. With `installed`, assume that packages are, and that the GPU has all kernels.
        """
        if self.name == "reference":
            return None
        missing = None if installed else self.missing()
        if missing is not None:
            return missing
        if device.type != "cuda":
            return f"runs on cuda, not on {device.type}; use --attention-backend reference"
        if not installed and limits.capability() < self.capability:
            return f"needs {limits.sm(self.capability)} or newer, this is {limits.sm()}; use reference"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"computes in half precision, not in {str(dtype).removeprefix('torch.')}; use --bf16"
        if head_size > LARGEST_HEAD or head_size % 8:
            return f"takes head sizes up to {LARGEST_HEAD} that 8 divides, not {head_size}; use reference"
        if sinks and not self.sinks:
            return "does not differentiate its log-sum-exp, which softmax_type learnable needs; use auto"
        if installed:
            return None
        return self.limits(Heads(head_size, value_size or head_size, sinks), None)


_BACKENDS = (  # in order of preference
    Backend(
        name="flash_attn_4",
        kernel=adapters.flash_attn_4,
        capability=(9, 0),
        sinks=True,
        narrow_values=limits.flash_attn_4_reads,
        missing=adapters.flash_attn_4_missing,
        limits=limits.flash_attn_4,
    ),
    Backend(
        name="torch_varlen",
        kernel=adapters.torch_varlen,
        sinks=True,
        missing=adapters.torch_varlen_missing,
        limits=limits.torch_varlen,
    ),
    Backend(
        name="flash_attn",
        kernel=adapters.flash_attn,
        missing=adapters.flash_attn_missing,
        limits=limits.flash_attn,
    ),
    Backend(
        name="te_thd",
        kernel=adapters.te_thd,
        sinks=True,
        missing=adapters.te_thd_missing,
        limits=limits.te_thd,
    ),
    Backend(name="reference", kernel=reference.attend),
)
BACKENDS = {backend.name: backend for backend in _BACKENDS}


def objections(*arguments: Any, **options: Any) -> dict[str, str | None]:
    """Return `Backend.objection` of each backend, by name."""
    return {name: backend.objection(*arguments, **options) for name, backend in BACKENDS.items()}


@dataclass(frozen=True)
class PerCall:
    """Runs each call on the backend that fits its shape, and logs each backend at its first use."""

    available: tuple[str, ...]
    logged: set[str] = field(default_factory=set)

    def __call__(self, inputs: QKV, call: AttentionCall, scale: float) -> Tensor:
        assert call.borders[0].device == inputs.query_tNH.device, "move the call to the device first"
        query_tNH, key_uGH, value_uGW, sink_N = inputs
        queries, size = query_tNH.shape[1:]
        groups, value_size = value_uGW.shape[1:]
        name = call.once(self.choose, Heads(size, value_size, sink_N is not None, queries, groups))
        if name not in self.logged:
            self.logged.add(name)
            logger.info(
                "attention: %s (first call: %d segments of at most %d queries and %d keys)",
                name, call.segments, *call.max_seqlens,
            )  # fmt: skip
        backend = BACKENDS[name]
        narrow = size > value_size and value_size % 8 == 0 and backend.narrow_values(size, value_size)
        if size == value_size or narrow:
            return backend.kernel(inputs, call, scale)
        whole = max(size, value_size)
        query, key, value = (_padded(x, whole) for x in (query_tNH, key_uGH, value_uGW))
        return backend.kernel(QKV(query, key, value, sink_N), call, scale)[..., :value_size]

    def choose(self, call: AttentionCall, heads: Heads) -> str:
        """Return the name of the backend for a call.

        Raises:
            UserError: no available backend can compute it; the message gives the reason for each.
        """
        reasons = {}
        for name in self.available:
            reason = BACKENDS[name].limits(heads, call)
            if reason is None:
                return name
            reasons[name] = reason
        raise UserError(
            f"attention_backend: got {int(call.cu_seqlens_q[-1])} queries in {call.segments} segments with "
            f"{heads.queries} heads of {heads}, but {_listed(reasons)}; use --attention-backend auto, or share heads "
            "or tokens over more ranks"
        )


def select(
    name: str, device: torch.device, dtype: torch.dtype, head_size: int, value_size: int = 0, *, sinks: bool = False
) -> Attend:
    """Return the attention function of a run: the named backend or, for `auto`, the best available one per call.

    `value_size` 0 is the size of keys. With `sinks`, it takes the sinks of the heads.

    Raises:
        UserError: the backend is unknown, or none is available; the message gives the reason for each.
    """
    reasons = objections(device, dtype, head_size, value_size, sinks=sinks)
    candidates = _candidates(name, device)
    available = tuple(candidate for candidate in candidates if reasons[candidate] is None)
    if not available:
        lacking = {candidate: reasons[candidate] for candidate in candidates}
        raise UserError(f"attention_backend: got {name!r}, which cannot serve: {_listed(lacking)}")
    logger.info("attention backend: %s on %s", " or ".join(available), device.type)
    return PerCall(available)


def suited(
    name: str, device: torch.device, dtype: torch.dtype, head_size: int, *, sinks: bool = False
) -> tuple[str, ...]:
    """Return the names that `select` would choose from if everything were installed; for plans of other machines."""
    reasons = objections(device, dtype, head_size, sinks=sinks, installed=True)
    return tuple(candidate for candidate in _candidates(name, device) if reasons[candidate] is None)


def _padded(x: Tensor, size: int) -> Tensor:
    """Pad heads with zeros to `size`; without padding, return x itself."""
    if x.shape[-1] == size:
        return x
    return F.pad(x, (0, size - x.shape[-1]))


def _listed(reasons: Mapping[str, str | None]) -> str:
    return "; ".join(f"{name} {reason}" for name, reason in reasons.items())


def _candidates(name: str, device: torch.device) -> list[str]:
    if name == "auto":
        if device.type == "cpu":
            return ["reference"]
        return [backend for backend in BACKENDS if backend != "reference"]
    if name not in BACKENDS:
        raise UserError(f"attention_backend: got {name!r}, needs one of {', '.join(['auto', *BACKENDS])}")
    return [name]
