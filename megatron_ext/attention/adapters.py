"""Call the attention kernels of other libraries (CUDA); each adapter is an `Attend` and returns [t, N, W].

All masks are causal, aligned to the bottom right. The functions `..._missing` return what is not installed and how to
get it, or None.
"""

import contextlib
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.torch_version import TorchVersion

from megatron_ext.attention.interface import AttentionCall
from megatron_ext.attention.sinks import attend_with_sink
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.errors import installed_version

_VARLEN_NEEDS = {"scale", "window_size"}  # new in torch 2.11; the causal mask of 2.10 is aligned to the top left
# arguments of the private operator for its gradients; torch 2.15 adds one with a default
_BACKWARD = "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size"
# Read in each forward call. If no fused kernel fits, Transformer Engine otherwise pads to [segments, longest, longest]
# without a word; versions from 2.15 on may take FlashAttention 4, which is a backend of its own here.
_TE_MASK = "padding_causal_bottom_right"
_TE_ENVIRONMENT = {"NVTE_UNFUSED_ATTN": "0", "NVTE_FLASH_ATTN_V4": "0"}


def flash_attn_4(inputs: QKV, call: AttentionCall, scale: float) -> Tensor:
    """Call FlashAttention 4 (Hopper and newer), compiled at first use."""
    from flash_attn.cute import flash_attn_varlen_func

    cu_seqlens_q, cu_seqlens_k = call.borders
    max_seqlen_q, max_seqlen_k = call.max_seqlens
    # Pass arguments by name: their order differs from FlashAttention 2. No limit is None, not -1.
    out, _ = flash_attn_varlen_func(
        q=inputs.query_tNH,
        k=inputs.key_uGH,
        v=inputs.value_uGW,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        window_size=(call.left_window, None if call.left_window is None else 0),
        learnable_sink=inputs.sink_N,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    assert isinstance(out, Tensor)
    return out


def flash_attn_4_missing() -> str | None:
    """Look for parts of FlashAttention 4 alone: flash-attn installs the same folder, and some versions a `cute`."""
    if installed_version("flash-attn-4") is None or find_spec("cutlass") is None:
        return "is not installed; pip install --pre 'flash-attn-4[cu13]'"
    needed = ["flash-attn-4>=4.0.0b36"]  # an older compiler than this one asks for truncates offsets beyond 2^31
    for package in ("flash-attn-4", "quack-kernels"):
        if installed_version(package):
            needed += metadata.requires(package) or []
    for name, minimum in re.findall(r"^([\w.-]+)[^;\n]*>=([\w.]+)[^;\n]*$", "\n".join(needed), re.MULTILINE):
        version = installed_version(name) or "0"
        if TorchVersion(version) < minimum:
            return f"needs {name} {minimum}, this is {version}; pip install --pre --upgrade 'flash-attn-4[cu13]'"
    return None


def torch_varlen(inputs: QKV, call: AttentionCall, scale: float) -> Tensor:
    """Call PyTorch's variable-length flash attention, in torch 2.11 and newer.

    Its backward adds with atomics, in any order, unless `torch.use_deterministic_algorithms(True)` is set.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    query_tNH, key_uGH, value_uGW, sink_N = inputs
    segments = *call.borders, *call.max_seqlens
    # torch 2.11 needs no argument for grouped-query attention; 2.12 and newer need `enable_gqa`
    options: dict[str, Any] = {"scale": scale, "window_size": call.window_size}
    if "enable_gqa" in varlen_parameters():
        options["enable_gqa"] = query_tNH.shape[1] != key_uGH.shape[1]
    if sink_N is None:
        out = varlen_attn(query_tNH, key_uGH, value_uGW, *segments, **options)
        assert isinstance(out, Tensor)
        return out

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return varlen_attn(query, key, value, *segments, return_aux=AuxRequest(lse=True), **options)

    def backward(grad: Tensor, *tensors: Tensor) -> Any:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        is_causal = call.window_size == (-1, 0)
        return torch.ops.torch_attn._varlen_attn_backward(
            grad.contiguous(), *tensors, *segments, is_causal, no_dropout, scale, list(call.window_size)
        )

    return attend_with_sink(query_tNH, key_uGH, value_uGW, sink_N, forward, backward)


def torch_varlen_missing() -> str | None:
    if varlen_parameters() >= _VARLEN_NEEDS:
        return None
    return f"needs torch 2.11 or newer, this is {torch.__version__}; pip install 'torch>=2.11'"


def torch_varlen_differentiates_sinks() -> bool:
    """Check the private operator that `torch_varlen` calls for the gradients of a call with attention sinks."""
    import torch.nn.attention.varlen  # registers it

    operator = getattr(torch.ops.torch_attn, "_varlen_attn_backward", None)
    if operator is None:
        return False
    needed = _BACKWARD.split()
    arguments = operator.default._schema.arguments
    if [argument.name for argument in arguments[: len(needed)]] != needed:
        return False
    return all(argument.has_default_value() for argument in arguments[len(needed) :])


@lru_cache
def varlen_parameters() -> frozenset[str]:
    """Return the names of varlen_attn's parameters in this version of torch; empty if it has none."""
    if find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention import varlen

    return frozenset(inspect.signature(varlen.varlen_attn).parameters)


def flash_attn(inputs: QKV, call: AttentionCall, scale: float) -> Tensor:
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
    """Look for `__init__.py`: FlashAttention 4 alone installs a folder of the same name without it."""
    module = find_spec("flash_attn")
    if module is None or module.origin is None:
        return "is not installed; pip install flash-attn, or use an NGC PyTorch image"
    return None


def te_thd(inputs: QKV, call: AttentionCall, scale: float) -> Tensor:
    """Call Transformer Engine's DotProductAttention in the THD format, without its own context parallelism."""
    query_tNH, key_uGH, value_uGW, sink_N = inputs
    tokens, heads, head_size = query_tNH.shape
    attention = _te_attention(heads, key_uGH.shape[1], head_size, scale, sink_N is not None, _te_deterministic())
    tensors = _at_start(query_tNH), _at_start(key_uGH), _at_start(value_uGW)
    options = {
        "cu_seqlens_q": call.borders[0],
        "cu_seqlens_kv": call.borders[1],
        "max_seqlen_q": call.max_seqlens[0],
        "max_seqlen_kv": call.max_seqlens[1],
        "window_size": call.window_size,
    }
    parameters = {}
    if sink_N is not None:
        parameters["softmax_offset"] = sink_N  # in place of the module's own
    with _te_environment():
        out: Tensor = functional_call(attention, parameters, tensors, options)
    return out.view(tokens, heads, head_size)


@contextlib.contextmanager
def _te_environment() -> Iterator[None]:
    before = {name: os.environ[name] for name in _TE_ENVIRONMENT if name in os.environ}
    os.environ.update(_TE_ENVIRONMENT)
    try:
        yield
    finally:
        for name in _TE_ENVIRONMENT:
            del os.environ[name]
        os.environ.update(before)


def _te_deterministic() -> bool:
    """Return whether Transformer Engine would have to be deterministic; a module asks when it is made."""
    return torch.are_deterministic_algorithms_enabled() or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"


def _at_start(x: Tensor) -> Tensor:
    """Return x, or a copy of it, contiguous from the start of its storage: Transformer Engine knows no other layout.

    It refuses rows of a longer tensor; it compares only the strides of keys and values, and then ignores them.
    """
    if x.storage_offset():
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous()


def te_thd_missing() -> str | None:
    if find_spec("transformer_engine"):
        return None
    return "is not installed; pip install --no-build-isolation -e '.[gpu]', or use an NGC PyTorch image"


def te_thd_kernel(
    heads: int, groups: int, head_size: int, sinks: bool, call: AttentionCall | None
) -> tuple[str | None, tuple[int, ...]]:
    """Ask Transformer Engine which kernel `te_thd` would run, for a call or, with None, for a small one.

    Returns:
        "cudnn" or the version of FlashAttention, or None if no kernel fits; and the version of cuDNN.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import utils
    from transformer_engine.pytorch.utils import get_cudnn_version

    arguments: dict[str, Any] = {
        "qkv_layout": "thd_thd_thd",
        "num_heads": heads,
        "num_gqa_groups": groups,
        "head_dim_qk": head_size,
        "head_dim_v": head_size,
        "attn_mask_type": _TE_MASK,
        "softmax_type": "learnable" if sinks else "vanilla",
        "deterministic": _te_deterministic(),
        "core_attention_bias_shape": None,
        "core_attention_bias_requires_grad": False,
    }
    if call is not None:
        arguments["batch_size"] = call.segments
        arguments["window_size"] = call.window_size
        arguments["max_seqlen_q"], arguments["max_seqlen_kv"] = call.max_seqlens
        tokens = {"num_tokens_q": int(call.cu_seqlens_q[-1]), "num_tokens_kv": int(call.cu_seqlens_kv[-1])}
        accepted = {field.name for field in fields(utils.AttentionParams)}
        arguments |= {name: count for name, count in tokens.items() if name in accepted}  # newer than 2.15
    with _te_environment():
        flash, version, cudnn, *_ = utils.get_attention_backend(utils.AttentionParams(**arguments))
    kernel = None
    if cudnn:
        kernel = "cudnn"
    elif flash:
        kernel = str(version)
    return kernel, get_cudnn_version()


@lru_cache
def _te_attention(heads: int, groups: int, head_size: int, scale: float, sinks: bool, deterministic: bool) -> Any:
    """Make the module, which fixes whether it is deterministic."""
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_attention_heads=heads,
        kv_channels=head_size,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type=_TE_MASK,
        softmax_scale=scale,
        softmax_type="learnable" if sinks else "vanilla",
    )
