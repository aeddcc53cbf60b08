"""Define the attention backends and their limits. `choice.py` picks one for each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_ext.attention import flash_attn, flash_attn_4, reference, te_thd, torch_varlen, triton_packed
from megatron_ext.attention.interface import Attend, AttentionCall

HALF = (torch.bfloat16, torch.float16)
ANY = (torch.float32, *HALF)
ANY_NUMBER = 2**31 - 1
# FlashAttention 2 puts segments along the second or third axis of a CUDA grid, at most 65,535 blocks. Its backward
# indexes an fp32 buffer [rows, N, H rounded up] in int32; rows are the queries and 128 more between segments.
FA2_SEGMENTS = 65_535
FA2_NUMBERS = 2**31
FA2_GAP = 128


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A kernel for packed attention and its limits.

    Attributes:
        name: the value of `--attention-backend`.
        devices: device types it runs on.
        capability: the lowest CUDA compute capability.
        dtypes: of queries, keys and values.
        largest_head: the largest head size.
        flash_attention_2: whether FlashAttention 2's limits apply; see `takes`.
        sinks: whether it computes attention sinks, with exact gradients.
        narrow_values: whether value heads may be smaller than key heads, if 8 divides their size; otherwise kernels get
            values padded with zeros.
        missing: returns what is not installed and how to get it; None if nothing is missing.
        sinks_missing: the same of attention sinks.
    """

    name: str
    kernel: Attend
    devices: tuple[str, ...] = ("cuda",)
    capability: tuple[int, int] = (8, 0)
    dtypes: tuple[torch.dtype, ...] = HALF
    largest_head: int = 256
    flash_attention_2: bool = False
    sinks: bool = False
    narrow_values: bool = False
    missing: Callable[[], str | None] = lambda: None
    sinks_missing: Callable[[], str | None] = lambda: None

    def takes(self, call: AttentionCall, heads: int, head_size: int) -> bool:
        """Return whether the call's segments and rows are within the kernel's index limits."""
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
        capability: tuple[int, int] | None = None,
        *,
        sinks: bool = False,
        installed: bool = False,
    ) -> str | None:
        """Return why the backend cannot be used, with the remedy; None if it can.

        Args:
            device, dtype, head_size: of the call.
            capability: of the device; None if unknown, as on a machine without a GPU.
            sinks: whether heads have sinks.
            installed: assume that everything is installed.
        """
        if not installed and (missing := self.missing()):
            return missing
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {device.type}; use --attention-backend reference"
        if capability is not None and capability < self.capability:
            needed, found = (f"sm_{major}{minor}" for major, minor in (self.capability, capability))
            return f"needs {needed} or newer, this is {found}; use reference"
        if dtype not in self.dtypes:
            return f"computes in half precision, not in {str(dtype).removeprefix('torch.')}; use --bf16"
        if head_size > self.largest_head or (head_size % 8 and self.dtypes == HALF):
            return f"takes head sizes up to {self.largest_head} that 8 divides, not {head_size}; use reference"
        if sinks and not self.sinks:
            return "does not differentiate its log-sum-exp, which softmax_type learnable needs; use auto"
        return self.sinks_missing() if sinks and not installed else None


BACKENDS: tuple[Backend, ...] = (
    Backend(name="triton_packed", kernel=triton_packed.attend, sinks=True, missing=triton_packed.missing),
    Backend(
        name="flash_attn_4",
        kernel=flash_attn_4.attend,
        capability=(9, 0),
        sinks=True,
        narrow_values=True,
        missing=flash_attn_4.missing,
        sinks_missing=flash_attn_4.sinks_missing,
    ),
    Backend(
        name="torch_varlen",
        kernel=torch_varlen.attend,
        flash_attention_2=True,
        sinks=True,
        missing=torch_varlen.missing,
    ),
    Backend(name="flash_attn", kernel=flash_attn.attend, flash_attention_2=True, missing=flash_attn.missing),
    Backend(name="te_thd", kernel=te_thd.attend, missing=te_thd.missing),
    Backend(
        name="reference",
        kernel=reference.attend,
        devices=("cpu", "cuda"),
        capability=(0, 0),
        dtypes=ANY,
        largest_head=ANY_NUMBER,
        sinks=True,
    ),
)


def objections(
    device: torch.device, dtype: torch.dtype, head_size: int, *, sinks: bool = False
) -> dict[str, str | None]:
    """Return, for each backend, why it cannot be used; None if it can."""
    known = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if known else None
    return {backend.name: backend.objection(device, dtype, head_size, capability, sinks=sinks) for backend in BACKENDS}
