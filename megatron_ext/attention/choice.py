"""Choose the attention backend of each call: short and long segments need different kernels.

On CUDA `auto` chooses

    triton_packed    if no query sees more than 128 keys, because its tiles span segments and so short segments fill
                     them; also if FlashAttention 4 is not installed and the rows exceed FlashAttention 2's int32 limit
    flash_attn_4     otherwise, if it is installed
    torch_varlen     otherwise

On a CPU it chooses the reference. A name other than `auto` is used for every call. The first use of each backend is
logged. There is no silent fallback: a call that no backend supports raises an error with a remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.attention.backends import BACKENDS, Backend, objections
from megatron_ext.attention.inputs import Inputs
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.errors import UserError

logger = logging.getLogger(__name__)

BY_NAME = {backend.name: backend for backend in BACKENDS}
SHORT = 128  # triton_packed serves queries that see up to this many keys
LONG = ("flash_attn_4", "torch_varlen", "flash_attn", "triton_packed", "te_thd")  # in order of preference


def by_keys(keys: int, left_window: int | None, available: Sequence[str]) -> str:
    """Return the name of the preferred backend for segments of at most `keys` keys.

    Args:
        keys: the number of keys of the longest segment.
        left_window: the most tokens before itself that a query sees; None for its whole segment.
        available: names to choose from.
    """
    seen = keys if left_window is None else min(keys, left_window + 1)
    if seen <= SHORT and "triton_packed" in available:
        return "triton_packed"
    return next((name for name in LONG if name in available), "reference")


@dataclass(frozen=True)
class PerCall:
    """Runs each call on the backend that fits its shape, and logs each backend at its first use.

    Attributes:
        available: names of the backends to choose from.
        logged: the backends logged so far.
    """

    available: tuple[str, ...]
    logged: set[str] = field(default_factory=set)

    def __call__(self, inputs: Inputs, call: AttentionCall, scale: float) -> Tensor:
        """Return the attention output, [t, N, W]."""
        name = call.once(self.choose, *inputs.query_tNH.shape[1:])
        if name not in self.logged:
            self.logged.add(name)
            queries, keys = call.max_seqlens
            logger.info(
                "attention: %s (first call: %d segments of at most %d queries and %d keys)",
                name, call.segments, queries, keys,
            )  # fmt: skip
        backend, width = BY_NAME[name], inputs.value_uGW.shape[-1]
        missing = inputs.key_uGH.shape[-1] - width
        if not missing or (backend.narrow_values and width % 8 == 0):
            return backend.kernel(inputs, call, scale)
        padded = inputs._replace(value_uGW=F.pad(inputs.value_uGW, (0, missing)))
        return backend.kernel(padded, call, scale)[..., :width]

    def choose(self, call: AttentionCall, heads: int, head_size: int) -> str:
        """Return the name of the backend for a call.

        Raises:
            UserError: no available backend supports this many rows or segments.
        """
        fitting = [name for name in self.available if BY_NAME[name].takes(call, heads, head_size)]
        if not fitting:
            names, queries = " and ".join(self.available), int(call.cu_seqlens_q[-1])
            raise UserError(
                f"attention_backend: {names} cannot count {queries} queries in "
                f"{call.segments} segments with {heads} heads of {head_size}; use --attention-backend auto, "
                "or share heads or tokens over more ranks"
            )
        return by_keys(call.max_seqlens[1], call.left_window, fitting)


def select(name: str, device: torch.device, dtype: torch.dtype, head_size: int, *, sinks: bool = False) -> Attend:
    """Return the attention function of a run: the named backend or, for `auto`, the best available one per call.

    With `sinks`, it takes the sinks of the heads.

    Raises:
        UserError: the backend is unknown, or none is available; the message gives the reason for each.
    """
    candidates = _candidates(name, device)
    reasons = objections(device, dtype, head_size, sinks=sinks)
    available = tuple(backend.name for backend in candidates if reasons[backend.name] is None)
    if not available:
        lacking = "; ".join(f"{backend.name} {reasons[backend.name]}" for backend in candidates)
        raise UserError(f"attention_backend: got {name!r}, which cannot serve: {lacking}")
    logger.info("attention backend: %s on %s", " or ".join(available), device.type)
    return PerCall(available)


def suited(
    name: str, device: torch.device, dtype: torch.dtype, head_size: int, *, sinks: bool = False
) -> tuple[str, ...]:
    """Return the names that `select` would choose from if everything were installed; for planning runs on other
    machines.

    Raises:
        UserError: unknown backend.
    """
    candidates = _candidates(name, device)
    return tuple(
        one.name for one in candidates if one.objection(device, dtype, head_size, sinks=sinks, installed=True) is None
    )


def _candidates(name: str, device: torch.device) -> list[Backend]:
    if name == "auto":
        return [backend for backend in BACKENDS if (backend.name == "reference") == (device.type == "cpu")]
    if name not in BY_NAME:
        raise UserError(f"attention_backend: got {name!r}, needs one of {', '.join(['auto', *BY_NAME])}")
    return [BY_NAME[name]]
