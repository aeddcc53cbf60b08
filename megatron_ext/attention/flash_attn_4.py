"""FlashAttention 4 (CUDA, Hopper and newer), compiled at first use."""

from __future__ import annotations

import inspect
from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_ext.attention.inputs import Inputs
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.errors import installed_version


def attend(inputs: Inputs, call: AttentionCall, scale: float) -> Tensor:
    """Return the attention output, [t, N, W]."""
    from flash_attn.cute import flash_attn_varlen_func

    (cu_seqlens_q, cu_seqlens_k), (max_q, max_k) = call.borders, call.max_seqlens
    # Pass arguments by name: their order differs from FlashAttention 2. No limit is None, not -1.
    out, _ = flash_attn_varlen_func(
        q=inputs.query_tNH,
        k=inputs.key_uGH,
        v=inputs.value_uGW,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        causal=True,
        window_size=(call.left_window, 0 if call.left_window is not None else None),
        learnable_sink=inputs.sink_N,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    assert isinstance(out, Tensor)
    return out


def sinks_missing() -> str | None:
    """Return how to get a version whose backward pass has the gradient of `learnable_sink`; None if this is one."""
    from flash_attn.cute import interface

    if "learnable_sink" in inspect.signature(interface._flash_attn_bwd).parameters:
        return None
    return "has no gradient of attention sinks in this version; pip install --pre --upgrade 'flash-attn-4[cu13]'"


def missing() -> str | None:
    """Return how to install the package if it is missing.

    The package flash-attn installs the same folder, in some versions with a `cute` of its own.
    """
    if installed_version("flash-attn-4") is not None and find_spec("cutlass") is not None:
        return None
    return "is not installed; pip install --pre 'flash-attn-4[cu13]'"
