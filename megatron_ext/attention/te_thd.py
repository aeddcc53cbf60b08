"""Transformer Engine's DotProductAttention in the THD format (CUDA), without its own context parallelism."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from megatron_ext.attention.inputs import Inputs
from megatron_ext.attention.interface import AttentionCall

_MASK = "padding_causal_bottom_right"


def attend(inputs: Inputs, call: AttentionCall, scale: float) -> Tensor:
    """Return the attention output, [t, N, H]."""
    query_tNH, key_uGH, value_uGW, sink_N = inputs
    assert sink_N is None
    (cu_seqlens_q, cu_seqlens_kv), (max_q, max_kv) = call.borders, call.max_seqlens
    attention = _attention(query_tNH.shape[1], key_uGH.shape[1], query_tNH.shape[2], scale)
    # Otherwise, if no fused kernel fits, Transformer Engine silently pads to [segments, longest, longest]. It reads the
    # variable in each forward call.
    os.environ["NVTE_UNFUSED_ATTN"] = "0"
    # Transformer Engine compares only the strides of keys and values, and then reads all three as contiguous.
    out: Tensor = attention(
        query_tNH.contiguous(),
        key_uGH.contiguous(),
        value_uGW.contiguous(),
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_seqlen_q=max_q,
        max_seqlen_kv=max_kv,
        attn_mask_type=_MASK,
        window_size=call.window_size,
    )
    return out.view(query_tNH.shape)


def missing() -> str | None:
    """Return how to install the package if it is missing."""
    if find_spec("transformer_engine") is not None:
        return None
    return "is not installed; pip install --no-build-isolation '.[gpu]', or use an NGC PyTorch image"


@lru_cache
def _attention(heads: int, groups: int, head_size: int, scale: float) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_attention_heads=heads,
        kv_channels=head_size,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type=_MASK,
        softmax_scale=scale,
    )
