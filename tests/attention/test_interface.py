"""How a backend is chosen, and what it is called with."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from megatron_ext.attention.interface import AttentionCall, BackendName, select
from megatron_ext.attention.reference import reference_attention
from megatron_ext.errors import UserError
from megatron_ext.layout import build_layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", *[backend.value for backend in BackendName]])
def test_every_name_gives_a_backend_that_attends(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, heads, 4, generator=generator) for n, heads in ((3, 4), (7, 2), (7, 2)))
    call = AttentionCall(np.array([0, 2, 2, 3], dtype=np.int32), np.array([0, 4, 6, 7], dtype=np.int32))
    out = select(name, CPU)(query, key, value, call, 0.3)
    wanted = reference_attention(query, key, value, call.cu_seqlens_q, call.cu_seqlens_kv, 0.3)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_the_choice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megatron_ext"):
        backend = select("auto", CPU)
        call = AttentionCall.of_layout(build_layout(2, [], 2))
        backend(torch.zeros(2, 1, 2), torch.zeros(2, 1, 2), torch.zeros(2, 1, 2), call, 1.0)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("megatron_ext")]
    assert len(said) == 1
    assert said[0].startswith("attention backend: reference on cpu")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        select("refrence", CPU)
    text = str(caught.value)
    assert text.startswith("attention_backend: got 'refrence', needs one of auto, ")
    assert "\n" not in text
    assert all(backend.value in text for backend in BackendName)
    assert callable(select("reference", CPU))


def test_whole_segments_have_equal_queries_and_keys() -> None:
    layout = build_layout(12, [3, 10], 4)
    call = AttentionCall.of_layout(layout)
    assert call.cu_seqlens_q.tolist() == call.cu_seqlens_kv.tolist() == [0, 3, 4, 8, 10, 12]
