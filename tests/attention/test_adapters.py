"""The adapters of CUDA kernels, against stand-ins that have the real ones' signatures and traps."""

from __future__ import annotations

import inspect
import os
import subprocess
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
from megatron_ext.attention import backends, flash_attn, flash_attn_4, te_thd, torch_varlen
from megatron_ext.attention.reference import reference_attention

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")


def packed(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, left: int) -> Tensor:
    """What such a kernel computes with a window of (left, 0)."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    reach = None if left == -1 else left
    return reference_attention(query, key, value, cu_q.numpy(), cu_k.numpy(), scale, reach)


# varlen_attn with the signatures of torch 2.10, 2.11, 2.12 and 2.13


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


of_2_13 = of_2_12


@pytest.fixture
def torch_has(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Gives torch another varlen_attn."""

    def put(function: Callable[..., Any]) -> None:
        torch_varlen.parameters.cache_clear()
        monkeypatch.setattr(varlen, "varlen_attn", function)

    yield put
    torch_varlen.parameters.cache_clear()


@pytest.mark.parametrize("function", [of_2_11, of_2_12, of_2_13])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("reach", [None, 2])
def test_torch_varlen_by_signature(torch_has: Any, function: Any, groups: int, reach: int | None) -> None:
    torch_has(function)
    assert torch_varlen.missing() is None
    call = call_of([(3, 3), (2, 5), (1, 1)], reach)
    assert_right(torch_varlen.attend, inputs_of(call, groups=groups), call)


def test_torch_varlen_of_2_10_is_refused(torch_has: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_has(of_2_10)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert backends.objections(CUDA, torch.bfloat16, 64)["torch_varlen"] == (
        "needs torch 2.11 or newer, this is 2.10.0; pip install 'torch>=2.11'"
    )
    torch_has(of_2_11)
    assert backends.objections(CUDA, torch.bfloat16, 64)["torch_varlen"] is None


def test_the_stored_signature_is_the_one_here() -> None:
    here = inspect.signature(varlen.varlen_attn).parameters
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    stored = {(2, 11): of_2_11, (2, 12): of_2_12, (2, 13): of_2_13}
    if version not in stored:
        pytest.skip(f"no signature of torch {torch.__version__} is stored")
    assert list(here) == list(inspect.signature(stored[version]).parameters)


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
    te_thd._attention.cache_clear()
    yield
    te_thd._attention.cache_clear()


@pytest.mark.usefixtures("dense_te")
@pytest.mark.parametrize("part", [0, 1])
def test_te_thd_with_heads_of_a_wider_tensor(part: int) -> None:
    """As the exchange in parts hands them over: heads cut out of tensors of more heads."""
    call = call_of([(3, 3), (2, 5), (1, 1)])
    wide = inputs_of(call, heads=8, groups=4)
    inputs = [x.chunk(2, dim=1)[part] for x in wide]
    assert not inputs[0].is_contiguous()
    assert_right(te_thd.attend, inputs, call)


def test_te_may_not_fall_back() -> None:
    """The setting is there when TE is imported, first by Megatron; the user's own stays."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/tests/engine/pretend:{ROOT}"}
    environment.pop("NVTE_UNFUSED_ATTN", None)
    said = "; import transformer_engine; print('unfused', transformer_engine.UNFUSED)"
    for module, users, wanted in (
        ("megatron_ext.engine.model", {}, "0"),
        ("megatron_ext.engine", {"NVTE_UNFUSED_ATTN": "1"}, "1"),
    ):
        command = [sys.executable, "-c", f"import {module}{said}"]
        done = subprocess.run(command, env=environment | users, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == f"unfused {wanted}"


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


@pytest.mark.parametrize("reach", [None, 2])
def test_flash_attn_4_is_called_by_names(monkeypatch: pytest.MonkeyPatch, reach: int | None) -> None:
    module = ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = flash_attn_varlen_func_of_4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    call = call_of([(3, 3), (2, 5), (1, 1)], reach)
    assert_right(flash_attn_4.attend, inputs_of(call), call)


def install(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("Name: flash-attn-4\nVersion: 4\n" if name.endswith("METADATA") else "")


FA2 = ("flash_attn/__init__.py",)
FA4 = ("flash_attn/cute/__init__.py", "flash_attn_4-4.dist-info/METADATA", "cutlass/__init__.py")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((), {"flash_attn": False, "flash_attn_4": False}),
        (FA4, {"flash_attn": False, "flash_attn_4": True}),
        (FA2, {"flash_attn": True, "flash_attn_4": False}),
        ((*FA2, *FA4), {"flash_attn": True, "flash_attn_4": True}),
        ((*FA2, FA4[0]), {"flash_attn": True, "flash_attn_4": False}),
        (FA4[:2], {"flash_attn": False, "flash_attn_4": False}),
    ],
)
def test_which_flash_attention_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], found: dict[str, bool]
) -> None:
    install(tmp_path, *files)
    monkeypatch.syspath_prepend(tmp_path)
    assert {
        "flash_attn": flash_attn.missing() is None,
        "flash_attn_4": flash_attn_4.missing() is None,
    } == found
    reasons = backends.objections(CUDA, torch.bfloat16, 64)
    assert all((reasons[name] is None) == there for name, there in found.items())


# more segments than a kernel takes


def refusing(most: int, launches: list[int]) -> Callable[..., Tensor]:
    """A kernel that puts segments along an axis of its grid."""

    def attend(query: Tensor, key: Tensor, value: Tensor, call: Any, scale: float) -> Tensor:
        q, kv = call.borders
        if len(q) - 1 > most:
            raise RuntimeError("CUDA error: invalid configuration argument")
        assert q.tolist() == call.cu_seqlens_q.tolist()
        assert kv.tolist() == call.cu_seqlens_kv.tolist()
        assert len(query)
        launches.append(len(q) - 1)
        return packed(query, key, value, q, kv, scale, call.window_size[0])

    return attend


@pytest.mark.parametrize("most", [1, 2, 3, 5, 9])
def test_segments_in_several_launches(most: int) -> None:
    lengths = [(2, 2), (0, 3), (1, 4), (3, 3), (0, 0), (0, 1), (2, 5)]
    launches: list[int] = []
    backend = backends.Backend(name="fake", kernel=refusing(most, launches), most_segments=most)
    for reach in (None, 1):
        call = call_of(lengths, reach)
        assert_right(backend.attend, inputs_of(call), call)
    assert max(launches) <= most


def test_65536_segments() -> None:
    """512K tokens at a window of 8, here of 1."""
    for backend in backends.BACKENDS:
        if backend.name in ("torch_varlen", "flash_attn"):
            assert backend.most_segments == 65_535
    launches: list[int] = []
    fake = backends.Backend(name="fake", kernel=refusing(65_535, launches), most_segments=65_535)
    call = call_of([(1, 1)] * 65_536)
    query, key, value, out_grad = (x[:, :1, :4] for x in inputs_of(call, 1, 1, 4))
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = fake.attend(*leaves, call, 1.0)
    out.backward(out_grad)
    assert launches == [65_535, 1]
    assert torch.equal(out, value)
    assert torch.equal(leaves[2].grad, out_grad)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="invalid configuration"):
        fake.kernel(query, key, value, call, 1.0)


def counting(numbers: int, launches: list[int]) -> Callable[..., Tensor]:
    """A kernel that counts what FlashAttention 2's backward does: rows of 32 numbers a head, 128 rows apart."""

    def attend(query: Tensor, key: Tensor, value: Tensor, call: Any, scale: float) -> Tensor:
        heads = query.shape[1]
        starts, ends = call.cu_seqlens_q[:-1], call.cu_seqlens_q[1:]
        last = max(int(end) - 1 + 128 * place for place, end in enumerate(ends) if end > starts[place])
        assert last * heads * 32 + (heads - 1) * 32 + 31 < numbers
        launches.append(call.segments)
        return packed(query, key, value, *call.borders, scale, call.window_size[0])

    return attend


@pytest.mark.parametrize("rows", [9, 10, 137, 138, 265, 4000])
def test_rows_in_several_launches(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [(9, 9), (0, 3), (1, 4), (3, 3), (0, 0), (0, 1), (9, 11), (2, 5)]
    monkeypatch.setattr(backends, "COUNTED", rows * 4 * 32)
    launches: list[int] = []
    backend = backends.Backend(name="fake", kernel=counting(rows * 4 * 32, launches), counts_in_int32=True)
    for reach in (None, 1):
        call = call_of(lengths, reach)
        assert_right(backend.attend, inputs_of(call), call)
    assert (max(launches) == len(lengths)) == (rows == 4000)


@pytest.mark.parametrize(
    ("heads", "size", "rows"), [(32, 128, 524_288), (16, 96, 1_398_101), (1, 72, 22_369_621), (8, 160, 1_398_101)]
)
def test_the_rows_that_flash_attention_2_counts(heads: int, size: int, rows: int) -> None:
    for backend in backends.BACKENDS:
        if backend.name in ("torch_varlen", "flash_attn"):
            assert backend.most_rows(heads, size) == rows
    fake = backends.Backend(name="fake", kernel=lambda query, *unused: query, counts_in_int32=True)
    query = torch.empty(1, device="meta").expand(rows, heads, size)
    for lengths, parts in (([rows], 1), ([rows // 2, rows - rows // 2 - 128], 1), ([rows // 2, rows - rows // 2], 2)):
        call = call_of([(n, n) for n in lengths])
        fake.attend(query, query, query, call, 1.0)
        assert len(next(iter(call.made.values()), [call])) == parts


def test_pieces_are_made_once_for_all_layers() -> None:
    launches: list[int] = []
    backend = backends.Backend(name="fake", kernel=refusing(2, launches), most_segments=2)
    call = call_of([(2, 2)] * 4)
    inputs = inputs_of(call)
    backend.attend(*inputs[:3], call, 1.0)
    made = dict(call.made)
    backend.attend(*inputs[:3], call, 1.0)
    assert made
    assert all(call.made[key] is value for key, value in made.items())
