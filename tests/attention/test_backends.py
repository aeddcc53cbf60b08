"""How a backend is chosen, and what it is called with."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.attention import limits, reference
from megatron_ext.attention.backends import BACKENDS, Backend, PerCall, select
from megatron_ext.attention.limits import Heads
from megatron_ext.context_parallel.exchange import QKV
from tests.attention.kernels import assert_right, call_of, inputs_of
from tests.conftest import refused

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("arguments", "text", "neighbour"),
    [
        (("refrence", CPU, torch.float32, 64), "got 'refrence', needs one of auto, flash_attn_4, ", "reference"),
        (("torch_varlen", CPU, torch.bfloat16, 64), "cuda, not on cpu; use --attention-backend reference", "auto"),
        (("torch_varlen", CUDA, torch.float32, 64), "half precision, not in float32; use --bf16", "reference"),
        (("torch_varlen", CUDA, torch.bfloat16, 512), "head sizes up to 256 that 8 divides, not 512", "reference"),
        (("auto", CUDA, torch.float32, 64), "torch_varlen computes in half precision", "reference"),
    ],
)
def test_refusals_name_the_remedy(arguments: tuple[Any, ...], text: str, neighbour: str) -> None:
    assert text in refused(select, *arguments)
    assert callable(select(neighbour, *arguments[1:]))


ALL = tuple(name for name in BACKENDS if name != "reference")
FA2 = ("torch_varlen", "flash_attn")


@pytest.mark.parametrize(
    ("lengths", "available", "wanted"),
    [
        ([(128, 128)] * 4, ALL, "flash_attn_4"),
        ([(8, 8)] * 512, FA2, "torch_varlen"),
        ([(4096, 4096)], ("flash_attn", "te_thd"), "flash_attn"),
        ([(4096, 4096)], ("te_thd",), "te_thd"),
        ([(1, 1)] * 65_536 + [(200, 200)], (*FA2, "te_thd"), "te_thd"),
        ([(1, 1)] * 65_536 + [(200, 200)], ALL, "flash_attn_4"),
    ],
)
def test_the_choice_follows_the_lengths(lengths: list[Any], available: tuple[str, ...], wanted: str) -> None:
    for segments in (lengths, lengths[::-1]):
        assert PerCall(available).choose(call_of(segments), Heads(128, 128)) == wanted


@pytest.mark.parametrize(
    ("heads", "size", "rows"), [(32, 128, 524_288), (16, 96, 1_398_101), (1, 72, 22_369_621), (8, 160, 1_398_101)]
)
def test_flash_attention_2_counts_rows_in_int32(
    heads: int, size: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward has an fp32 buffer of the queries, with 128 rows more between segments and heads rounded up."""
    monkeypatch.setattr(limits, "installed_version", {"flash-attn": "2.8.3"}.get)
    attend = PerCall((*FA2, "te_thd"))
    shape = Heads(size, size, queries=heads)
    for lengths, wanted in (
        ([rows], "torch_varlen"),
        ([rows + 1], "te_thd"),
        ([rows // 2, rows - rows // 2 - 128], "torch_varlen"),
        ([rows // 2, rows - rows // 2], "te_thd"),
    ):
        assert attend.choose(call_of([(n, n) for n in lengths]), shape) == wanted
    message = refused(PerCall(("torch_varlen",)).choose, call_of([(rows + 1, rows + 1)]), shape)
    assert message.startswith(f"attention_backend: got {rows + 1} queries in 1 segments")


def test_newer_versions_of_flash_attn_count_rows_in_int64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on segments stays."""
    attend = PerCall(FA2)
    long_segments = call_of([(300_000, 300_000)] * 2)  # the second one begins before the bound, and ends behind it
    many_segments = call_of([(1, 1)] * 65_536)
    for version in ("2.7.4.post1", "2.8.3", "2.8.3.post2"):
        monkeypatch.setattr(limits, "installed_version", {"flash-attn": version}.get)
        if version == "2.8.3.post2":
            assert attend.choose(long_segments, Heads(128, 128, queries=32)) == "flash_attn"
        else:
            refused(attend.choose, long_segments, Heads(128, 128, queries=32))
        assert "at most 65,535 segments" in refused(attend.choose, many_segments, Heads(128, 128))


def test_flash_attention_4_counts_what_its_deterministic_backward_allocates() -> None:
    """int32 [segments, heads, longest / 64]: half a GiB for the queries."""
    attend = PerCall(("flash_attn_4", "te_thd"))
    heads = Heads(128, 128, queries=32)
    few_segments, many_segments = ([(32_768, 32_768)] + [(1, 1)] * count for count in (8191, 8192))
    for deterministic, wanted in ((False, "flash_attn_4"), (True, "te_thd")):
        torch.use_deterministic_algorithms(deterministic)
        try:
            assert attend.choose(call_of(few_segments), heads) == "flash_attn_4"
            assert attend.choose(call_of(many_segments), heads) == wanted
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets the GPU's compute capability."""

    def put(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    return put


@pytest.mark.parametrize(
    ("capability", "sizes", "sinks", "deterministic", "taken"),
    [
        ((9, 0), (256, 256), True, True, True),
        ((10, 0), (128, 128), True, True, True),
        ((10, 3), (192, 128), True, True, True),
        ((10, 0), (192, 192), False, False, False),
        ((10, 0), (256, 256), False, True, True),
        ((10, 0), (256, 256), True, False, False),
        ((12, 0), (128, 128), False, False, True),
        ((12, 0), (64, 64), True, False, False),
        ((12, 0), (64, 64), False, True, False),
    ],
)
def test_flash_attention_4_lacks_kernels_on_blackwell(
    monkeypatch: pytest.MonkeyPatch, card, capability, sizes, sinks: bool, deterministic: bool, taken: bool
) -> None:
    """`auto` then takes another, and a run that names it is refused at its start."""
    card(*capability)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setitem(BACKENDS, "flash_attn_4", replace(BACKENDS["flash_attn_4"], missing=lambda: None))
    attend = select("auto", CUDA, torch.bfloat16, *sizes, sinks=sinks)
    assert isinstance(attend, PerCall)
    assert ("flash_attn_4" in attend.available) == taken
    if not taken:
        assert "; use auto" in refused(select, "flash_attn_4", CUDA, torch.bfloat16, *sizes, sinks=sinks)


@pytest.mark.parametrize(
    ("capability", "size", "window", "wanted"),
    [
        ((9, 0), 256, 17, "flash_attn_4"),
        ((10, 0), 256, None, "flash_attn_4"),
        ((10, 0), 256, 17, "torch_varlen"),  # the local layers of Gemma 3
        ((10, 0), 128, 17, "flash_attn_4"),
    ],
)
def test_flash_attention_4_lacks_windows_of_large_heads_on_blackwell(card, capability, size, window, wanted) -> None:
    card(*capability)
    call = call_of([(128, 128)], window)
    assert PerCall(("flash_attn_4", "torch_varlen")).choose(call, Heads(size, size)) == wanted


@pytest.mark.parametrize(
    ("capability", "sizes", "reads"),
    [
        ((9, 0), (128, 96), True),
        ((10, 0), (128, 96), False),
        ((10, 3), (128, 80), False),
        ((10, 0), (128, 64), True),
        ((10, 0), (192, 128), True),
        ((10, 0), (96, 80), True),
    ],
)
def test_flash_attention_4_misreads_some_narrow_values_on_blackwell(card, capability, sizes, reads: bool) -> None:
    """Transformer Engine 2.20 refuses them too: gradients of values would be wrong."""
    card(*capability)
    assert BACKENDS["flash_attn_4"].narrow_values(*sizes) == reads


def test_a_card_too_old_is_refused(card) -> None:
    backend = Backend(name="fake", kernel=reference.attend, capability=(9, 0))
    card(9, 0)
    assert backend.objection(CUDA, torch.bfloat16, 64) is None
    card(7, 5)
    assert "needs sm_80 or newer, this is sm_75; use reference" in refused(select, "auto", CUDA, torch.bfloat16, 64)
    assert callable(select("reference", CUDA, torch.bfloat16, 64))


@pytest.mark.parametrize(
    ("narrow_values", "size", "width", "given"),
    [(True, 16, 8, (16, 8)), (True, 16, 10, (16, 16)), (False, 16, 8, (16, 16)), (True, 8, 16, (16, 16))],
)
def test_smaller_heads_are_padded(narrow_values, size, width, given, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels need queries, keys and values of one head size."""
    call = call_of([(3, 3), (2, 5), (1, 1)])
    query, key, value, grad = inputs_of(call)
    sizes = []

    def kernel(inputs: QKV, *call_arguments: Any) -> Tensor:
        assert inputs.query_tNH.shape[-1] == inputs.key_uGH.shape[-1]
        sizes.append((inputs.key_uGH.shape[-1], inputs.value_uGW.shape[-1]))
        return reference.attend(inputs, *call_arguments)

    fake = Backend(name="te_thd", kernel=kernel, narrow_values=lambda *_: narrow_values)
    monkeypatch.setitem(BACKENDS, "te_thd", fake)
    inputs = [query[..., :size], key[..., :size], value[..., :width], grad[..., :width]]
    assert_right(PerCall(("te_thd",)), inputs, call)
    assert sizes == [given]
