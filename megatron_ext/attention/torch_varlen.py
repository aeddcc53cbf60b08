"""PyTorch's variable-length flash attention (CUDA), in torch 2.11 and newer.

Its backward adds with atomics, in any order, unless `torch.use_deterministic_algorithms(True)` is set.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_ext.attention.inputs import Inputs
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.attention.sinks import attend_with_sink

_NEEDED = {"scale", "window_size"}  # new in torch 2.11; the causal mask of 2.10 is always aligned to the top left


def attend(inputs: Inputs, call: AttentionCall, scale: float) -> Tensor:
    """Return the attention output, [t, N, H]; a window of (left, 0) is causal and aligned to the bottom right."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    query_tNH, key_uGH, value_uGW, sink_N = inputs
    borders, lengths = call.borders, call.max_seqlens
    # torch 2.11 needs no argument for grouped-query attention; 2.12 and newer need `enable_gqa`
    options: dict[str, Any] = {"scale": scale, "window_size": call.window_size}
    if "enable_gqa" in parameters():
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


def missing() -> str | None:
    """Return what this version of torch lacks; None if nothing."""
    if parameters() >= _NEEDED:
        return None
    return f"needs torch 2.11 or newer, this is {torch.__version__}; pip install 'torch>=2.11'"


@lru_cache
def parameters() -> frozenset[str]:
    """Return the names of varlen_attn's parameters in this version of torch; empty if it has none."""
    if find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention import varlen

    return frozenset(inspect.signature(varlen.varlen_attn).parameters)
