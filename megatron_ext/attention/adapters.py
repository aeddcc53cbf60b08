"""Call the attention kernels of other libraries (CUDA); each adapter is an `Attend` and returns [t, N, W].

All masks are causal, aligned to the bottom right. The functions `..._missing` return what is not installed and how to
get it, or None.
"""

import inspect
import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_ext.attention.exchange import Inputs
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.attention.sinks import attend_with_sink
from megatron_ext.errors import installed_version

_VARLEN_NEEDS = {"scale", "window_size"}  # new in torch 2.11; the causal mask of 2.10 is aligned to the top left
# arguments of the private operator for its gradients; torch 2.15 adds one with a default
_BACKWARD = "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size"
_TE_MASK = "padding_causal_bottom_right"


def flash_attn_4(inputs: Inputs, call: AttentionCall, scale: float) -> Tensor:
    """Call FlashAttention 4 (Hopper and newer), compiled at first use."""
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


def flash_attn_4_missing() -> str | None:
    """Look for its own parts: flash-attn installs the same folder, in some versions with a `cute` of its own."""
    if installed_version("flash-attn-4") is not None and find_spec("cutlass") is not None:
        return None
    return "is not installed; pip install --pre 'flash-attn-4[cu13]'"


def flash_attn_4_sinks_missing() -> str | None:
    from flash_attn.cute import interface

    if "learnable_sink" in inspect.signature(interface._flash_attn_bwd).parameters:
        return None
    return "has no gradient of attention sinks in this version; pip install --pre --upgrade 'flash-attn-4[cu13]'"


def torch_varlen(inputs: Inputs, call: AttentionCall, scale: float) -> Tensor:
    """Call PyTorch's variable-length flash attention, in torch 2.11 and newer.

    Its backward adds with atomics, in any order, unless `torch.use_deterministic_algorithms(True)` is set.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    query_tNH, key_uGH, value_uGW, sink_N = inputs
    borders, lengths = call.borders, call.max_seqlens
    # torch 2.11 needs no argument for grouped-query attention; 2.12 and newer need `enable_gqa`
    options: dict[str, Any] = {"scale": scale, "window_size": call.window_size}
    if "enable_gqa" in varlen_parameters():
        options["enable_gqa"] = query_tNH.shape[1] != key_uGH.shape[1]
    if sink_N is None:
        out = varlen_attn(query_tNH, key_uGH, value_uGW, *borders, *lengths, **options)
        assert isinstance(out, Tensor)
        return out

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return varlen_attn(query, key, value, *borders, *lengths, return_aux=AuxRequest(lse=True), **options)

    def backward(grad: Tensor, *tensors: Tensor) -> Any:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        causal, window = call.window_size == (-1, 0), list(call.window_size)
        return torch.ops.torch_attn._varlen_attn_backward(
            grad.contiguous(), *tensors, *borders, *lengths, causal, no_dropout, scale, window
        )

    return attend_with_sink(query_tNH, key_uGH, value_uGW, sink_N, forward, backward)


def torch_varlen_missing() -> str | None:
    if varlen_parameters() >= _VARLEN_NEEDS:
        return None
    return f"needs torch 2.11 or newer, this is {torch.__version__}; pip install 'torch>=2.11'"


def torch_varlen_sinks_missing() -> str | None:
    """Check the private operator that `torch_varlen` calls for the gradients of a call with attention sinks."""
    import torch.nn.attention.varlen  # registers it

    operator = getattr(torch.ops.torch_attn, "_varlen_attn_backward", None)
    arguments = [] if operator is None else operator.default._schema.arguments
    known, more = _BACKWARD.split(), arguments[14:]
    if [one.name for one in arguments[:14]] == known and all(one.has_default_value() for one in more):
        return None
    return f"cannot differentiate attention sinks in torch {torch.__version__}, whose operator for it differs; use auto"


@lru_cache
def varlen_parameters() -> frozenset[str]:
    """Return the names of varlen_attn's parameters in this version of torch; empty if it has none."""
    if find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention import varlen

    return frozenset(inspect.signature(varlen.varlen_attn).parameters)


def flash_attn(inputs: Inputs, call: AttentionCall, scale: float) -> Tensor:
    """Call FlashAttention 2 from the flash-attn package; its mask is aligned to the bottom right since 2.1."""
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


def flash_attn_missing() -> str | None:
    """Look for a module: FlashAttention 4 alone installs a folder of the same name, without `__init__.py`."""
    found = find_spec("flash_attn")
    if found is not None and found.origin is not None:
        return None
    return "is not installed; pip install flash-attn, or use an NGC PyTorch image"


def te_thd(inputs: Inputs, call: AttentionCall, scale: float) -> Tensor:
    """Call Transformer Engine's DotProductAttention in the THD format, without its own context parallelism."""
    query_tNH, key_uGH, value_uGW, sink_N = inputs
    assert sink_N is None
    (cu_seqlens_q, cu_seqlens_kv), (max_q, max_kv) = call.borders, call.max_seqlens
    attention = _te_attention(query_tNH.shape[1], key_uGH.shape[1], query_tNH.shape[2], scale)
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
        attn_mask_type=_TE_MASK,
        window_size=call.window_size,
    )
    return out.view(query_tNH.shape)


def te_thd_missing() -> str | None:
    if find_spec("transformer_engine") is not None:
        return None
    return "is not installed; pip install --no-build-isolation '.[gpu]', or use an NGC PyTorch image"


@lru_cache
def _te_attention(heads: int, groups: int, head_size: int, scale: float) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_attention_heads=heads,
        kv_channels=head_size,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type=_TE_MASK,
        softmax_scale=scale,
    )
