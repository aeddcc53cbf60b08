"""PyTorch's own variable-length flash attention (CUDA)."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.attention.interface import AttentionCall


def attend(query_tNH: Tensor, key_uGH: Tensor, value_uGH: Tensor, call: AttentionCall, scale: float) -> Tensor:
    """Attend as the call says, [t, N, H]: a window of (left, 0) is causal and aligned to the bottom right."""
    from torch.nn.attention.varlen import varlen_attn

    assert call.borders is not None
    out = varlen_attn(
        query_tNH,
        key_uGH,
        value_uGH,
        *call.borders,
        *call.max_seqlens,
        scale=scale,
        window_size=call.window_size,
        enable_gqa=query_tNH.shape[1] != key_uGH.shape[1],
    )
    assert isinstance(out, Tensor)
    return out
