"""The attention backends: what each can do, and which one a run takes.

Nothing falls back silently: `select` says its choice once, and refuses with a remedy what cannot be done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from megatron_ext.attention import flash_attn, reference, te_thd, torch_varlen
from megatron_ext.attention.interface import Attend
from megatron_ext.errors import UserError

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
ANY = (torch.float32, *HALF)


@dataclass(frozen=True)
class Backend:
    """Describes a kernel of packed attention and what it can do.

    Attributes:
        name: what `--attention-backend` takes.
        attend: the kernel.
        devices: device types it runs on.
        dtypes: of queries, keys and values.
        largest_head: the largest head size.
        installed: tells whether its package can be imported.
        remedy: how to get it.
    """

    name: str
    attend: Attend
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    largest_head: int
    installed: Callable[[], bool]
    remedy: str

    def objection(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        """Say why it cannot serve, with the remedy; None where it can."""
        if not self.installed():
            return f"is not installed; {self.remedy}"
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {device.type}; use --attention-backend reference"
        if dtype not in self.dtypes:
            return f"computes in half precision, not in {str(dtype).removeprefix('torch.')}; use --bf16"
        if head_size > self.largest_head or (head_size % 8 and self.dtypes == HALF):
            return f"takes head sizes up to {self.largest_head} that 8 divides, not {head_size}; use reference"
        return None


# in the order in which `auto` asks them
BACKENDS: tuple[Backend, ...] = (
    Backend(
        "te_thd",
        te_thd.attend,
        ("cuda",),
        HALF,
        256,
        lambda: find_spec("transformer_engine") is not None,
        "pip install transformer-engine[pytorch], or use an NGC PyTorch image",
    ),
    Backend(
        "torch_varlen",
        torch_varlen.attend,
        ("cuda",),
        HALF,
        256,
        lambda: find_spec("torch.nn.attention.varlen") is not None,
        "it comes with torch 2.10 and newer",
    ),
    Backend(
        "flash_attn",
        flash_attn.attend,
        ("cuda",),
        HALF,
        256,
        lambda: find_spec("flash_attn") is not None,
        "pip install flash-attn, or use an NGC PyTorch image",
    ),
    Backend("reference", reference.attend, ("cpu", "cuda"), ANY, 2**31, lambda: True, "it is always here"),
)


def objections(device: torch.device, dtype: torch.dtype, head_size: int) -> dict[str, str | None]:
    """Say of every backend why it cannot serve; None where it can."""
    return {backend.name: backend.objection(device, dtype, head_size) for backend in BACKENDS}


def select(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Attend:
    """Choose the backend and say so once.

    `auto` takes the reference on a CPU and the first kernel that can serve on CUDA; there, it never takes the
    reference.

    Raises:
        UserError: no such backend, or none that can serve; with what each lacks.
    """
    by_name = {backend.name: backend for backend in BACKENDS}
    if name != "auto" and name not in by_name:
        raise UserError(f"attention_backend: got {name!r}, needs one of {', '.join(['auto', *by_name])}")
    if name == "auto":
        candidates = [b for b in BACKENDS if (b.name == "reference") == (device.type == "cpu")]
    else:
        candidates = [by_name[name]]
    reasons = objections(device, dtype, head_size)
    for backend in candidates:
        if reasons[backend.name] is None:
            logger.info("attention backend: %s on %s", backend.name, device.type)
            return backend.attend
    lacking = "; ".join(f"{backend.name} {reasons[backend.name]}" for backend in candidates)
    raise UserError(f"attention_backend: got {name!r}, which cannot serve: {lacking}")
