"""FlashAttention 2 from the flash-attn package (CUDA). Since 2.1 its causal mask is aligned to the bottom right."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_ext.attention.inputs import Inputs
from megatron_ext.attention.interface import AttentionCall


def attend(inputs: Inputs, call: AttentionCall, scale: float) -> Tensor:
    """Return the attention output, [t, N, H]."""
    from flash_attn import flash_attn_varlen_func

    assert inputs.sink_N is None
    out: Tensor = flash_attn_varlen_func(
        *inputs[:3],
        *call.borders,
        *call.max_seqlens,
        softmax_scale=scale,
        causal=True,
        window_size=call.window_size,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def missing() -> str | None:
    """Return how to install the package if it is missing.

    FlashAttention 4 alone installs a folder of the same name, without `__init__.py`.
    """
    found = find_spec("flash_attn")
    if found is not None and found.origin is not None:
        return None
    return "is not installed; pip install flash-attn, or use an NGC PyTorch image"
