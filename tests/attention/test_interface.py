"""What a backend is given."""

from __future__ import annotations

from megatron_ext.attention.interface import AttentionCall
from megatron_ext.layout import build_layout


def test_whole_segments_have_equal_queries_and_keys() -> None:
    layout = build_layout(12, [3, 10], 4)
    call = AttentionCall.of_layout(layout)
    assert call.cu_seqlens_q.tolist() == call.cu_seqlens_kv.tolist() == [0, 3, 4, 8, 10, 12]
