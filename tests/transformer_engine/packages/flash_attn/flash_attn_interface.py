"""The functions that Transformer Engine imports; the one that is called here is computed by attention.py."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.transformer_engine.attention import Kernel, Segments


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Any:
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[-1] == k.shape[-1] <= 256
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert causal
    assert dropout_p == softcap == 0
    assert alibi_slopes is block_table is None
    borders = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    lengths_q, lengths_k = ([end - start for start, end in pairwise(borders_of_kind)] for borders_of_kind in borders)
    assert max(lengths_q) <= max_seqlen_q
    assert max(lengths_k) <= max_seqlen_k
    segments = Segments(
        scale=softmax_scale or q.shape[-1] ** -0.5,
        starts_q=borders[0][:-1],
        starts_k=borders[1][:-1],
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        left=window_size[0],
        bottom_right=True,
    )
    out, lse = Kernel.apply(q, k, v, segments)
    return (out, lse, None) if return_attn_probs else out


def _not_emulated(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("not emulated")


flash_attn_func = flash_attn_with_kvcache = flash_attn_varlen_qkvpacked_func = _not_emulated
_flash_attn_forward = _flash_attn_backward = _not_emulated
_flash_attn_varlen_forward = _flash_attn_varlen_backward = _not_emulated
