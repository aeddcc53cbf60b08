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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.attention import adapters, reference
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.errors import UserError

logger = logging.getLogger(__name__)

LARGEST_HEAD = 256
# FlashAttention 2 puts segments along the second or third axis of a CUDA grid, at most 65,535 blocks. Its backward
# indexes an fp32 buffer [rows, N, H rounded up] in int32; rows are the queries and 128 more between segments.
FA2_SEGMENTS = 65_535
FA2_NUMBERS = 2**31
FA2_GAP = 128
# FlashAttention 4's deterministic backward has int32 [segments, N, longest / 64], and up to three times that for keys.
FA4_SEMAPHORES = 2**27


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A kernel for packed attention and its limits.

    All but the reference run on CUDA, compute in half precision, and take heads of up to `LARGEST_HEAD` that 8 divides.
    """

    name: str  # the value of `--attention-backend`
    kernel: Attend
    capability: tuple[int, int] = (8, 0)  # the lowest one of CUDA
    flash_attention_2: bool = False  # whether FlashAttention 2's limits apply; see `takes`
    semaphores: bool = False  # whether FlashAttention 4's bound of its deterministic mode applies; see `takes`
    sinks: bool = False  # whether it computes attention sinks, with exact gradients
    # whether value heads may be smaller than key heads, if 8 divides their size; otherwise kernels get the smaller
    # heads padded with zeros
    narrow_values: bool = False
    # returns what is not installed and how to get it; None if nothing is missing
    missing: Callable[[], str | None] = lambda: None
    sinks_missing: Callable[[], str | None] = lambda: None  # the same of attention sinks
    # (compute capability, size of a key head, of a value head, sinks) -> why its kernels do not fit; None if they do
    limits: Callable[[tuple[int, int], int, int, bool], str | None] = lambda *_: None

    def takes(self, call: AttentionCall, heads: int, head_size: int) -> bool:
        """Return whether the call's segments and rows are within the kernel's limits of indices and memory."""
        if self.semaphores and torch.are_deterministic_algorithms_enabled():
            return call.segments * heads * -(-call.max_seqlens[0] // 64) <= FA4_SEMAPHORES
        if not self.flash_attention_2:
            return True
        rows = int(call.cu_seqlens_q[-1]) + FA2_GAP * (call.segments - 1)
        unit = 32 if head_size <= 128 else 64
        return call.segments <= FA2_SEGMENTS and rows * heads * -(-head_size // unit) * unit <= FA2_NUMBERS

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

        `value_size` 0 is that of keys. With `installed`, assume that packages are, and that the GPU has all kernels.
        """
        if self.name == "reference":
            return None
        if not installed and (missing := self.missing()):
            return missing
        if device.type != "cuda":
            return f"runs on cuda, not on {device.type}; use --attention-backend reference"
        if not installed and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(device)
            if capability < self.capability:
                needed, found = (f"sm_{major}{minor}" for major, minor in (self.capability, capability))
                return f"needs {needed} or newer, this is {found}; use reference"
            if limit := self.limits(capability, head_size, value_size or head_size, sinks):
                return limit
        if dtype not in (torch.bfloat16, torch.float16):
            return f"computes in half precision, not in {str(dtype).removeprefix('torch.')}; use --bf16"
        if head_size > LARGEST_HEAD or head_size % 8:
            return f"takes head sizes up to {LARGEST_HEAD} that 8 divides, not {head_size}; use reference"
        if sinks and not self.sinks:
            return "does not differentiate its log-sum-exp, which softmax_type learnable needs; use auto"
        return self.sinks_missing() if sinks and not installed else None


_BACKENDS = (  # in order of preference
    Backend(
        name="flash_attn_4",
        kernel=adapters.flash_attn_4,
        capability=(9, 0),
        semaphores=True,
        sinks=True,
        narrow_values=True,
        limits=adapters.flash_attn_4_limits,
        missing=adapters.flash_attn_4_missing,
    ),
    Backend(
        name="torch_varlen",
        kernel=adapters.torch_varlen,
        flash_attention_2=True,
        sinks=True,
        missing=adapters.torch_varlen_missing,
        sinks_missing=adapters.torch_varlen_sinks_missing,
    ),
    Backend(name="flash_attn", kernel=adapters.flash_attn, flash_attention_2=True, missing=adapters.flash_attn_missing),
    Backend(
        name="te_thd",
        kernel=adapters.te_thd,
        sinks=True,
        missing=adapters.te_thd_missing,
        sinks_missing=adapters.te_thd_sinks_missing,
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
        size, width = inputs.key_uGH.shape[-1], inputs.value_uGW.shape[-1]
        whole = max(size, width)
        name = call.once(self.choose, inputs.query_tNH.shape[1], whole)
        if name not in self.logged:
            self.logged.add(name)
            queries, keys = call.max_seqlens
            logger.info(
                "attention: %s (first call: %d segments of at most %d queries and %d keys)",
                name, call.segments, queries, keys,
            )  # fmt: skip
        backend = BACKENDS[name]
        if size == width or (size > width and backend.narrow_values and width % 8 == 0):
            return backend.kernel(inputs, call, scale)
        query, key, value = (x if x.shape[-1] == whole else F.pad(x, (0, whole - x.shape[-1])) for x in inputs[:3])
        return backend.kernel(QKV(query, key, value, inputs.sink_N), call, scale)[..., :width]

    def choose(self, call: AttentionCall, heads: int, head_size: int) -> str:
        """Return the name of the backend for a call.

        Raises:
            UserError: no available backend supports this many rows or segments.
        """
        fitting = [name for name in self.available if BACKENDS[name].takes(call, heads, head_size)]
        if not fitting:
            names, queries = " and ".join(self.available), int(call.cu_seqlens_q[-1])
            raise UserError(
                f"attention_backend: {names} cannot count {queries} queries in "
                f"{call.segments} segments with {heads} heads of {head_size}; use --attention-backend auto, "
                "or share heads or tokens over more ranks"
            )
        return fitting[0]


def select(
    name: str, device: torch.device, dtype: torch.dtype, head_size: int, value_size: int = 0, *, sinks: bool = False
) -> Attend:
    """Return the attention function of a run: the named backend or, for `auto`, the best available one per call.

    `value_size` 0 is that of keys. With `sinks`, it takes the sinks of the heads.

    Raises:
        UserError: the backend is unknown, or none is available; the message gives the reason for each.
    """
    reasons = objections(device, dtype, head_size, value_size, sinks=sinks)
    candidates = _candidates(name, device)
    available = tuple(one for one in candidates if reasons[one] is None)
    if not available:
        lacking = "; ".join(f"{one} {reasons[one]}" for one in candidates)
        raise UserError(f"attention_backend: got {name!r}, which cannot serve: {lacking}")
    logger.info("attention backend: %s on %s", " or ".join(available), device.type)
    return PerCall(available)


def suited(
    name: str, device: torch.device, dtype: torch.dtype, head_size: int, *, sinks: bool = False
) -> tuple[str, ...]:
    """Return the names that `select` would choose from if everything were installed; for plans of other machines."""
    reasons = objections(device, dtype, head_size, sinks=sinks, installed=True)
    return tuple(one for one in _candidates(name, device) if reasons[one] is None)


def _candidates(name: str, device: torch.device) -> list[str]:
    if name == "auto":
        return [one for one in BACKENDS if (one == "reference") == (device.type == "cpu")]
    if name not in BACKENDS:
        raise UserError(f"attention_backend: got {name!r}, needs one of {', '.join(['auto', *BACKENDS])}")
    return [name]
