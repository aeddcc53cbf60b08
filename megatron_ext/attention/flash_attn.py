"""The flash-attn package (CUDA); since 2.1 its causal mask is aligned to the bottom right, as the call asks."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.attention.interface import AttentionCall


def attend(query_tNH: Tensor, key_uGH: Tensor, value_uGH: Tensor, call: AttentionCall, scale: float) -> Tensor:
    """Attend as the call says; [t, N, H]."""
    from flash_attn import flash_attn_varlen_func

    assert call.borders is not None
    out: Tensor = flash_attn_varlen_func(
        query_tNH,
        key_uGH,
        value_uGH,
        *call.borders,
        *call.max_seqlens,
        softmax_scale=scale,
        causal=True,
        window_size=call.window_size,
    )
    return out
