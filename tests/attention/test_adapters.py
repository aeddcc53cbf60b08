"""The adapters of CUDA kernels, against stand-ins that have the real ones' signatures and traps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from megatron_ext.attention import adapters, backends, reference
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.device import moved
from tests.attention.kernels import assert_right, call_of, inputs_of
from tests.engine.fake_modules import fake

CUDA = torch.device("cuda")


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    scale: float,
    left_window: int,
    sink: Any = None,
) -> Tensor:
    """Compute what such a kernel does with a window of (left, 0)."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    call = AttentionCall.of(cu_q.numpy(), cu_k.numpy(), None if left_window == -1 else left_window)
    return reference.attend(QKV(query, key, value, sink), call, scale)


def test_the_borders_of_a_call_are_two_tensors() -> None:
    """varlen_attn in torch 2.15 prefers cuDNN to FlashAttention for a shared one; the limits are FlashAttention's."""
    call = call_of([(5, 5), (9, 9)])
    for borders in (call.borders, moved(call, torch.device("cpu")).borders):
        assert borders[0] is not borders[1]


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


# FlashAttention 2 and 4, whose packages share a folder


def flash_attn_varlen_func_of_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert causal
    assert dropout_p == 0
    assert not return_attn_probs
    assert (max_seqlen_q, max_seqlen_k) == (3, 5)
    assert window_size in ((-1, 0), (2, 0))
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size[0])


@pytest.mark.parametrize("left_window", [None, 2])
def test_flash_attn_2_is_called_as_its_signature_says(monkeypatch: pytest.MonkeyPatch, left_window: int | None) -> None:
    fake(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func_of_2)
    call = call_of([(3, 3), (2, 5), (1, 1)], left_window)
    assert_right(adapters.flash_attn, inputs_of(call), call)


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
    left_window = -1 if window_size[0] is None else window_size[0]
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, left_window, learnable_sink), None


@pytest.mark.parametrize("left_window", [None, 2])
def test_flash_attn_4_is_called_by_names(monkeypatch: pytest.MonkeyPatch, left_window: int | None) -> None:
    """It differentiates sinks itself."""
    fake(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=flash_attn_varlen_func_of_4)
    call = call_of([(3, 3), (2, 5), (1, 1)], left_window)
    for sinks in ([], [torch.tensor([-9.0, -0.5, 0.7, 6.0])]):
        assert_right(adapters.flash_attn_4, [*inputs_of(call), *sinks], call)


def install(folder: Path, files: Sequence[str], needs: Mapping[str, str]) -> None:
    """Write files; `needs`: distributions as NAME-VERSION, and what each requires."""
    lines = {name: f"Name: {name.rpartition('-')[0]}\nVersion: {name.rpartition('-')[2]}\n" for name in needs}
    metadata = {
        f"{name.replace('-', '_', name.count('-') - 1)}.dist-info/METADATA": text
        + "".join(f"Requires-Dist: {requirement}\n" for requirement in needs[name].split(" & ") if requirement)
        for name, text in lines.items()
    }
    for name, text in (dict.fromkeys(files, "") | metadata).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


FA2 = ("flash_attn/__init__.py",)
FA4 = ("flash_attn/cute/__init__.py", "cutlass/__init__.py")
QUACK = {"quack-kernels-0.6.5": "torch & nvidia-cutlass-dsl>=4.7"}
DSL = {"nvidia-cutlass-dsl-4.8.1": ""}
NEEDS = {
    "flash-attn-4-4.0.0b36": 'nvidia-cutlass-dsl>=4.6.2 & torch & quack-kernels<1,>=0.5.3 & x[cu13]>=9; extra == "cu13"'
}


@pytest.mark.parametrize(
    ("files", "needs", "fa2", "fa4"),
    [
        ((), {}, False, "is not installed"),
        (FA4, NEEDS | QUACK | DSL, False, None),
        ((*FA2, *FA4), NEEDS | QUACK | DSL, True, None),
        ((*FA2, *FA4), {}, True, "is not installed"),
        (FA4[:1], NEEDS | QUACK | DSL, False, "is not installed"),
        (FA4, NEEDS | QUACK | {"nvidia-cutlass-dsl-4.10.0": ""}, False, None),
        # what an image has already
        (FA4, NEEDS | QUACK | {"nvidia-cutlass-dsl-4.5.0": ""}, False, "needs nvidia-cutlass-dsl 4.6.2, this is 4.5.0"),
        (FA4, NEEDS | QUACK | {"nvidia-cutlass-dsl-4.6.2": ""}, False, "needs nvidia-cutlass-dsl 4.7, this is 4.6.2"),
        (FA4, NEEDS | DSL, False, "needs quack-kernels 0.5.3, this is 0; pip"),
        (FA4, {"flash-attn-4-4.0.0b5": ""}, False, "needs flash-attn-4 4.0.0b36, this is 4.0.0b5; pip"),
    ],
)
def test_which_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files, needs, fa2: bool, fa4) -> None:
    if any(map(adapters.installed_version, ("flash-attn", "flash-attn-4"))):
        pytest.skip("FlashAttention is installed")
    install(tmp_path, files, needs)
    monkeypatch.syspath_prepend(tmp_path)
    reasons = backends.objections(CUDA, torch.bfloat16, 64)
    assert (reasons["flash_attn"] is None) == fa2
    assert fa4 is None if (reason := reasons["flash_attn_4"]) is None else str(fa4) in reason
