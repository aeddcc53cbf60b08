"""How a backend is chosen, and what it is called with."""

from __future__ import annotations

import inspect
import logging

import numpy as np
import pytest
import torch

from megatron_ext.attention.backends import BACKENDS, select
from megatron_ext.attention.interface import AttentionCall
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
            "attention_backend: got 'refrence', needs one of auto, te_thd, ",
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


def test_on_cuda_auto_takes_a_kernel_and_never_the_reference() -> None:
    reference = next(backend for backend in BACKENDS if backend.name == "reference")
    assert select("auto", CUDA, torch.bfloat16, 128) is not reference.attend


def test_torch_varlen_takes_the_arguments_that_we_give() -> None:
    from torch.nn.attention.varlen import varlen_attn

    inspect.signature(varlen_attn).bind(*["tensor"] * 5, 3, 7, scale=0.1, window_size=(-1, 0), enable_gqa=True)


def test_borders_go_to_the_device_as_int32() -> None:
    call = AttentionCall(np.array([0, 2, 3], dtype=np.int32), np.array([0, 4, 7], dtype=np.int32)).to(CPU)
    assert call.borders is not None
    assert [border.tolist() for border in call.borders] == [[0, 2, 3], [0, 4, 7]]
    assert {border.dtype for border in call.borders} == {torch.int32}
    assert call.max_seqlens == (2, 4)
