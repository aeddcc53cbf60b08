"""The attention backends: what each can do, and which of them a run may use.

`choice.py` chooses among those for each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_ext.attention import flash_attn, flash_attn_4, reference, te_thd, torch_varlen, triton_packed
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.attention.pieces import attend_consecutively

HALF = (torch.bfloat16, torch.float16)
ANY = (torch.float32, *HALF)
ANY_NUMBER = 2**31 - 1
# CUDA starts so many blocks at most along the second and third axis of a grid, where FlashAttention 2 counts segments
BLOCKS = 65_535
# FlashAttention 2 counts in int32 what its backward adds up in fp32, [t + GAP for each segment before, N, H rounded up]
COUNTED = 2**31


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Describes a kernel of packed attention and what it can do.

    Attributes:
        name: what `--attention-backend` takes.
        kernel: the kernel.
        devices: device types it runs on.
        capability: the least CUDA compute capability.
        dtypes: of queries, keys and values.
        largest_head: the largest head size.
        most_segments: that it takes in one launch; `attend` makes several of a call with more.
        counts_in_int32: its backward counts up to `COUNTED`; `attend` makes several calls of one beyond.
        tiles_of_longest: it starts as many blocks for every segment as for the longest, most of them empty where a
            long segment stands beside many short ones.
        locks_of_longest: under deterministic algorithms it keeps as many locks for every segment as for the longest.
        missing: says what is not installed and how to get it; None where all is there.
    """

    name: str
    kernel: Attend
    devices: tuple[str, ...] = ("cuda",)
    capability: tuple[int, int] = (8, 0)
    dtypes: tuple[torch.dtype, ...] = HALF
    largest_head: int = 256
    most_segments: int = ANY_NUMBER
    counts_in_int32: bool = False
    tiles_of_longest: bool = False
    locks_of_longest: bool = False
    missing: Callable[[], str | None] = lambda: None

    def attend(
        self, query_tNH: Tensor, key_uGH: Tensor, value_uGH: Tensor, call: AttentionCall, scale: float
    ) -> Tensor:
        """Attend as the call says; [t, N, H]."""
        attend, rows = self.kernel, self.most_rows(*query_tNH.shape[1:])
        if call.segments > self.most_segments or call.spread_rows > rows:
            attend = partial(attend_consecutively, self.kernel, most=self.most_segments, rows=rows)
        return attend(query_tNH, key_uGH, value_uGH, call, scale)

    def most_rows(self, heads: int, head_size: int) -> int:
        """Return how many rows (`AttentionCall.spread_rows`) of so many query heads it takes in one launch."""
        if not self.counts_in_int32:
            return ANY_NUMBER
        unit = 32 if head_size <= 128 else 64
        return COUNTED // (heads * -(-head_size // unit) * unit)

    def objection(
        self, device: torch.device, dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None = None
    ) -> str | None:
        """Say why it cannot serve, with the remedy; None where it can.

        `capability` is the device's; None where it is not known, as without a card.
        """
        return self.missing() or self.misfit(device, dtype, head_size, capability)

    def misfit(
        self, device: torch.device, dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None = None
    ) -> str | None:
        """Say the same of a machine where everything is installed."""
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {device.type}; use --attention-backend reference"
        if capability is not None and capability < self.capability:
            return f"needs sm_{_digits(self.capability)} or newer, this is sm_{_digits(capability)}; use reference"
        if dtype not in self.dtypes:
            return f"computes in half precision, not in {str(dtype).removeprefix('torch.')}; use --bf16"
        if head_size > self.largest_head or (head_size % 8 and self.dtypes == HALF):
            return f"takes head sizes up to {self.largest_head} that 8 divides, not {head_size}; use reference"
        return None


def _digits(capability: tuple[int, int]) -> str:
    return f"{capability[0]}{capability[1]}"


BACKENDS: tuple[Backend, ...] = (
    Backend(name="triton_packed", kernel=triton_packed.attend, missing=triton_packed.missing),
    Backend(
        name="flash_attn_4",
        kernel=flash_attn_4.attend,
        capability=(9, 0),
        locks_of_longest=True,
        missing=flash_attn_4.missing,
    ),
    Backend(
        name="torch_varlen",
        kernel=torch_varlen.attend,
        most_segments=BLOCKS,
        counts_in_int32=True,
        tiles_of_longest=True,
        missing=torch_varlen.missing,
    ),
    Backend(
        name="flash_attn",
        kernel=flash_attn.attend,
        most_segments=BLOCKS,
        counts_in_int32=True,
        tiles_of_longest=True,
        missing=flash_attn.missing,
    ),
    Backend(name="te_thd", kernel=te_thd.attend, tiles_of_longest=True, missing=te_thd.missing),
    Backend(
        name="reference",
        kernel=reference.attend,
        devices=("cpu", "cuda"),
        capability=(0, 0),
        dtypes=ANY,
        largest_head=ANY_NUMBER,
    ),
)


def objections(device: torch.device, dtype: torch.dtype, head_size: int) -> dict[str, str | None]:
    """Say of every backend why it cannot serve; None where it can."""
    known = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if known else None
    return {backend.name: backend.objection(device, dtype, head_size, capability) for backend in BACKENDS}
