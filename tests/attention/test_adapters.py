"""The adapters of CUDA kernels, against stand-ins that have the real ones' signatures and traps."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from attention.kernels import assert_right, call_of, inputs_of
from megatron_ext.attention import adapters, backends, reference
from megatron_ext.attention.exchange import Inputs
from megatron_ext.attention.interface import AttentionCall

CUDA = torch.device("cuda")


def packed(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, left: int) -> Tensor:
    """What such a kernel computes with a window of (left, 0)."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    left_window = None if left == -1 else left
    return reference.attend(Inputs(query, key, value), AttentionCall(cu_q.numpy(), cu_k.numpy(), left_window), scale)


# varlen_attn with the signatures of torch 2.10, 2.11, and 2.12 and 2.13


def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    raise AssertionError("aligned to the top left: not what we ask for")


def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    assert window_size[1] == 0
    return packed(query, key, value, cu_seq_q, cu_seq_k, scale, window_size[0])


def of_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads; use enable_gqa=True")
    return of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.fixture
def torch_has(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Gives torch another varlen_attn."""

    def put(function: Callable[..., Any]) -> None:
        adapters.varlen_parameters.cache_clear()
        monkeypatch.setattr(varlen, "varlen_attn", function)

    yield put
    adapters.varlen_parameters.cache_clear()


@pytest.mark.parametrize("function", [of_2_11, of_2_12])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("left_window", [None, 2])
def test_torch_varlen_by_signature(torch_has: Any, function: Any, groups: int, left_window: int | None) -> None:
    torch_has(function)
    assert adapters.torch_varlen_missing() is None
    call = call_of([(3, 3), (2, 5), (1, 1)], left_window)
    assert_right(adapters.torch_varlen, inputs_of(call, groups=groups), call)


def test_torch_varlen_of_2_10_is_refused(torch_has: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_has(of_2_10)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert backends.objections(CUDA, torch.bfloat16, 64)["torch_varlen"] == (
        "needs torch 2.11 or newer, this is 2.10.0; pip install 'torch>=2.11'"
    )
    torch_has(of_2_11)
    assert backends.objections(CUDA, torch.bfloat16, 64)["torch_varlen"] is None


# Transformer Engine


class Dense:
    """TE's DotProductAttention, as far as its layouts go: it reads each tensor as if its rows lay side by side."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
        query, key, value = (self.raw(x) for x in (query, key, value))
        assert call["attn_mask_type"] == "padding_causal_bottom_right"
        assert call["window_size"][1] == 0
        borders = call["cu_seqlens_q"], call["cu_seqlens_kv"]
        out = packed(query, key, value, *borders, self.options["softmax_scale"], call["window_size"][0])
        return out.flatten(1)

    @staticmethod
    def raw(x: Tensor) -> Tensor:
        """The numbers from the first on."""
        return x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))


@pytest.fixture
def dense_te(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = Dense  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    adapters._te_attention.cache_clear()
    yield
    adapters._te_attention.cache_clear()


@pytest.mark.usefixtures("dense_te")
@pytest.mark.parametrize("part", [0, 1])
def test_te_thd_with_heads_of_a_wider_tensor(part: int) -> None:
    """As the exchange in parts hands them over: heads cut out of tensors of more heads."""
    call = call_of([(3, 3), (2, 5), (1, 1)])
    wide = inputs_of(call, heads=8, groups=4)
    inputs = [x.chunk(2, dim=1)[part] for x in wide]
    assert not inputs[0].is_contiguous()
    assert_right(adapters.te_thd, inputs, call)


@pytest.mark.usefixtures("dense_te")
@pytest.mark.parametrize("users", [None, "1"])
def test_te_may_not_fall_back(users: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVTE_UNFUSED_ATTN is 0 during a call, whatever the user set."""
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", users or "")
    if users is None:
        monkeypatch.delenv("NVTE_UNFUSED_ATTN")
    seen: list[str | None] = []
    monkeypatch.setattr(Dense, "raw", lambda self, x: seen.append(os.environ.get("NVTE_UNFUSED_ATTN")) or x)
    call = call_of([(3, 3), (2, 5)])
    adapters.te_thd(Inputs(*inputs_of(call)[:3]), call, 1.0)
    assert set(seen) == {"0"}


# FlashAttention 2 and 4, whose packages share a folder


def flash_attn_varlen_func_of_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    assert qv is None
    assert causal
    assert (max_seqlen_q, max_seqlen_k) == (3, 5)
    assert window_size in ((None, None), (2, 0))
    left = -1 if window_size[0] is None else window_size[0]
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, left), None


@pytest.mark.parametrize("left_window", [None, 2])
def test_flash_attn_4_is_called_by_names(monkeypatch: pytest.MonkeyPatch, left_window: int | None) -> None:
    module = ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = flash_attn_varlen_func_of_4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    call = call_of([(3, 3), (2, 5), (1, 1)], left_window)
    assert_right(adapters.flash_attn_4, inputs_of(call), call)


def install(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("Name: flash-attn-4\nVersion: 4\n" if name.endswith("METADATA") else "")


FA2 = ("flash_attn/__init__.py",)
FA4 = (
    "flash_attn/cute/__init__.py",
    "flash_attn_4-4.dist-info/METADATA",
    "cutlass/__init__.py",
)


@pytest.mark.parametrize(
    ("files", "fa2", "fa4"),
    [
        ((), False, "is not installed"),
        (FA4, False, None),
        (FA2, True, "is not installed"),
        ((*FA2, *FA4), True, None),
        ((*FA2, FA4[0]), True, "is not installed"),
    ],
)
def test_which_flash_attention_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], fa2: bool, fa4: str | None
) -> None:
    install(tmp_path, *files)
    monkeypatch.syspath_prepend(tmp_path)
    if adapters.flash_attn_4_missing() is None and fa4 is not None:
        pytest.skip("FlashAttention 4 is installed")
    reasons = backends.objections(CUDA, torch.bfloat16, 64)
    assert (reasons["flash_attn"] is None) == fa2
    if fa4 is None:
        assert reasons["flash_attn_4"] is None
    else:
        assert fa4 in (reasons["flash_attn_4"] or "")
