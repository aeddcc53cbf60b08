"""How a backend is chosen, and what it is called with."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.kernels import assert_right, call_of, inputs_of
from megatron_ext.attention import backends, choice, reference
from megatron_ext.attention.backends import BACKENDS, Backend
from megatron_ext.attention.choice import Choice, PerCall, choose, select
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.attention.pieces import attend_by_length
from megatron_ext.attention.reference import reference_attention
from megatron_ext.errors import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_the_choice_on_a_cpu_attends(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, heads, 4, generator=generator) for n, heads in ((3, 4), (7, 2), (7, 2)))
    call = AttentionCall(np.array([0, 2, 2, 3], dtype=np.int32), np.array([0, 4, 6, 7], dtype=np.int32))
    out = select(name, CPU, torch.float32, 4)(query, key, value, call, 0.3)
    wanted = reference_attention(query, key, value, call.cu_seqlens_q, call.cu_seqlens_kv, 0.3)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)


def test_the_choice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megatron_ext"):
        select("auto", CPU, torch.float32, 64)
    assert [record.getMessage() for record in caplog.records] == ["attention backend: reference on cpu"]


@pytest.mark.parametrize(
    ("arguments", "text", "neighbour"),
    [
        (
            ("refrence", CPU, torch.float32, 64),
            "attention_backend: got 'refrence', needs one of auto, triton_packed, ",
            "reference",
        ),
        (
            ("torch_varlen", CPU, torch.bfloat16, 64),
            "runs on cuda, not on cpu; use --attention-backend reference",
            "auto",
        ),
        (("torch_varlen", CUDA, torch.float32, 64), "half precision, not in float32; use --bf16", "reference"),
        (("torch_varlen", CUDA, torch.bfloat16, 512), "head sizes up to 256 that 8 divides, not 512", "reference"),
        (("auto", CUDA, torch.float32, 64), "torch_varlen computes in half precision", "reference"),
    ],
)
def test_refusals_name_the_remedy(
    arguments: tuple[str, torch.device, torch.dtype, int], text: str, neighbour: str
) -> None:
    with pytest.raises(UserError) as caught:
        select(*arguments)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert callable(select(neighbour, *arguments[1:]))


ALL = tuple(backend.name for backend in BACKENDS if backend.name != "reference")
FA2 = ("torch_varlen", "flash_attn")


def test_on_cuda_auto_never_takes_the_reference() -> None:
    found = select("auto", CUDA, torch.bfloat16, 128)
    assert isinstance(found, PerCall)
    assert "torch_varlen" in found.able
    assert "reference" not in found.able


@pytest.mark.parametrize(
    ("lengths", "reach", "able", "wanted"),
    [
        ([(128, 128)] * 4, None, ALL, Choice("triton_packed")),
        ([(128, 129)] * 4, None, ALL, Choice("flash_attn_4")),
        ([(4096, 4096)], 127, ALL, Choice("triton_packed")),
        ([(4096, 4096)], 128, ALL, Choice("flash_attn_4")),
        ([(4096, 4096)], None, FA2, Choice("torch_varlen")),
        ([(8, 8)] * 512, None, FA2, Choice("torch_varlen")),  # nothing is gained by parting equals
        ([(4096, 4096)] * 8, None, ("flash_attn", "te_thd"), Choice("flash_attn")),
        ([(4096, 4096)], None, ("te_thd", "triton_packed"), Choice("te_thd")),
        ([(4096, 4096)], None, ("triton_packed",), Choice("triton_packed")),
        # one long document beside many short ones
        ([(100, 100)] * 200 + [(32768, 32768)], None, FA2, Choice("torch_varlen", 100, "torch_varlen")),
        ([(100, 100)] * 200 + [(32768, 32768)], None, ALL, Choice("flash_attn_4")),
        (
            [(100, 100)] * 200 + [(32768, 32768)],
            None,
            (*FA2, "triton_packed"),
            Choice("torch_varlen", 100, "triton_packed"),
        ),
        ([(300, 300), (32768, 32768)] * 4, None, FA2, Choice("torch_varlen")),  # few empty blocks
    ],
)
def test_the_choice_follows_the_lengths(
    lengths: list[tuple[int, int]], reach: int | None, able: tuple[str, ...], wanted: Choice
) -> None:
    assert choose(call_of(lengths, reach), able) == wanted
    backwards = choose(call_of(lengths[::-1], reach), able)
    assert backwards == wanted


def test_deterministic_locks_part_long_segments_from_short_ones() -> None:
    call = call_of([(300, 300)] * 2000 + [(524_288, 524_288)])
    assert choose(call, ALL) == Choice("flash_attn_4")
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(call, ALL) == Choice("flash_attn_4", 300, "flash_attn_4")
    finally:
        torch.use_deterministic_algorithms(False)


def blocks(lengths: list[int]) -> int:
    return len(lengths) * -(-max(lengths, default=0) // 128)


@given(st.lists(st.sampled_from([0, 1, 64, 127, 128, 129, 500, 4000, 30000]), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_cut_is_the_best_and_worth_its_moving(lengths: list[int]) -> None:
    choice = choose(call_of([(n, n) for n in lengths]), FA2)
    apart = {cut: blocks([n for n in lengths if n <= cut]) + blocks([n for n in lengths if n > cut]) for cut in lengths}
    saved = blocks(lengths) - min(apart.values())
    if choice.cut is None:
        assert saved <= 8 * -(-sum(lengths) // 128)
    else:
        assert blocks(lengths) - apart[choice.cut] == saved > 0


LENGTHS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 4)).map(lambda n: (n[0], sum(n))), min_size=1, max_size=8
)


@given(lengths=LENGTHS, cut=st.integers(0, 10), reach=st.sampled_from([None, 0, 2]))
@example(lengths=[(0, 0)], cut=3, reach=None)
@example(lengths=[(0, 5), (2, 2)], cut=3, reach=None)
@settings(max_examples=100, deadline=None)
def test_two_calls_are_one(lengths: list[tuple[int, int]], cut: int, reach: int | None) -> None:
    """Long and short segments in any order, attended apart."""
    longest: dict[str, int] = {}

    def noting(name: str) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scale: float) -> Tensor:
            assert call.borders is not None
            assert [border.tolist() for border in call.borders] == [
                call.cu_seqlens_q.tolist(),
                call.cu_seqlens_kv.tolist(),
            ]
            assert {border.dtype for border in call.borders} == {torch.int32}
            longest[name] = call.max_seqlens[1]
            return reference.attend(query, key, value, call, scale)

        return attend

    call = call_of(lengths, reach)
    attend = partial(attend_by_length, (noting("long"), noting("short")), cut=cut)
    assert_right(attend, inputs_of(call), call)
    assert longest.get("short", 0) <= cut < longest.get("long", cut + 1)


def test_a_choice_is_said_once_for_each_kind(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS:
        stand_in = replace(backend, kernel=lambda query, *unused: query)
        monkeypatch.setitem(choice.BY_NAME, backend.name, stand_in)
    attend = PerCall((*FA2, "triton_packed"))
    mixed = [(100, 100)] * 200 + [(32768, 32768)]
    with caplog.at_level(logging.INFO, logger="megatron_ext"):
        for lengths in ([(3, 3)] * 2, [(4, 4)], [(130, 130)], [(131, 131)], mixed, mixed):
            call = call_of(lengths)
            inputs = [x[:, :, :1] for x in inputs_of(call, heads=1, groups=1, size=1)]
            attend(*inputs[:3], call, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: triton_packed (from 2 segments of at most 3 keys on)",
        "attention: torch_varlen (from 1 segments of at most 130 keys on)",
        "attention: torch_varlen for segments of more than 100 keys, triton_packed for shorter ones"
        " (from 201 segments of at most 32768 keys on)",
    ]


def test_a_segment_too_long_for_a_backend_goes_to_another(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "COUNTED", 140 * 32)
    for backend in BACKENDS:
        monkeypatch.setitem(choice.BY_NAME, backend.name, replace(backend, kernel=lambda query, *unused: query))
    short, long = (call_of([(queries, 150)]) for queries in (140, 141))
    query, key, value, _ = inputs_of(long, heads=1, groups=1, size=32)
    with caplog.at_level(logging.INFO, logger="megatron_ext"):
        for able in ((*FA2, "te_thd"), FA2):
            PerCall(able)(query[:140], key, value, short, 1.0)
        PerCall((*FA2, "te_thd"))(query, key, value, long, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: torch_varlen (from 1 segments of at most 150 keys on)",
        "attention: torch_varlen (from 1 segments of at most 150 keys on)",
        "attention: te_thd (from 1 segments of at most 150 keys and 141 queries,"
        " too many for torch_varlen and flash_attn, on)",
    ]
    with pytest.raises(UserError) as caught:
        PerCall(("torch_varlen",))(query, key, value, long, 1.0)
    assert str(caught.value) == (
        "attention_backend: torch_varlen cannot count a segment of 141 queries with 1 heads of 32; "
        "use --attention-backend auto, or share heads or tokens over more ranks"
    )


def test_a_card_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Backend(name="fake", kernel=reference.attend, capability=(9, 0))
    assert made.objection(CUDA, torch.bfloat16, 64, (8, 0)) == "needs sm_90 or newer, this is sm_80; use reference"
    assert made.objection(CUDA, torch.bfloat16, 64, (9, 0)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match=r"torch_varlen needs sm_80 or newer, this is sm_75; use reference"):
        select("auto", CUDA, torch.bfloat16, 64)
    assert callable(select("reference", CUDA, torch.bfloat16, 64))


def test_borders_go_to_the_device_as_int32() -> None:
    call = AttentionCall(np.array([0, 2, 3], dtype=np.int32), np.array([0, 4, 7], dtype=np.int32)).to(CPU)
    assert call.borders is not None
    assert [border.tolist() for border in call.borders] == [[0, 2, 3], [0, 4, 7]]
    assert {border.dtype for border in call.borders} == {torch.int32}
    assert call.max_seqlens == (2, 4)
