"""FlashAttention 4 (CUDA, Hopper and newer), compiled at first use."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.attention.interface import AttentionCall
from megatron_ext.errors import installed_version


def attend(query_tNH: Tensor, key_uGH: Tensor, value_uGH: Tensor, call: AttentionCall, scale: float) -> Tensor:
    """Return the attention output, [t, N, H]."""
    from flash_attn.cute import flash_attn_varlen_func

    assert call.borders is not None
    (cu_seqlens_q, cu_seqlens_k), (max_q, max_k) = call.borders, call.max_seqlens
    # Pass arguments by name: their order differs from FlashAttention 2. No limit is None, not -1.
    out, _ = flash_attn_varlen_func(
        q=query_tNH,
        k=key_uGH,
        v=value_uGH,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        causal=True,
        window_size=(call.left_window, 0 if call.left_window is not None else None),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    assert isinstance(out, Tensor)
    return out


def missing() -> str | None:
    """Return how to install the package if it is missing.

    FlashAttention 2 may install the same folder without `cute`.
    """
    found = find_spec("flash_attn")
    folders = (found.submodule_search_locations or []) if found is not None else []
    here = any((Path(folder) / "cute" / "__init__.py").is_file() for folder in folders)
    here = here and installed_version("flash-attn-4") is not None and find_spec("cutlass") is not None
    return None if here else "is not installed; pip install --pre flash-attn-4"
