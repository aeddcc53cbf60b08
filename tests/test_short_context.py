"""Chunks of the short context, token by token against their definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.layout import PackedLayout, build_layout
from megatron_ext.masks import AttentionMask, LayerMasks
from megatron_ext.short_context import Chunks, ShortContext, distribute, short_chunks


def chunks_of(layout: PackedLayout, short: ShortContext) -> Chunks:
    return short_chunks(layout.row_length, LayerMasks((AttentionMask(layout),)).first_dependencies(), short)


def test_the_drawn_example() -> None:
    layout = build_layout(16, [], 16)
    drawn = chunks_of(layout, ShortContext(6, 4, every_token=True))
    assert (drawn.start.tolist(), drawn.end.tolist()) == ([0, 4, 8, 12], [6, 10, 14, 16])
    assert drawn.scored.tolist() == [0, 6, 10, 14]
    unfrozen = chunks_of(layout, ShortContext(6, 4))
    assert unfrozen.start.tolist() == [4, 8, 12]


def test_documents_inside_chunks_are_not_computed_again() -> None:
    """Only documents that cross into a chunk are left where documents are shorter than the short context."""
    layout = build_layout(4096, range(0, 4096, 100), 4096)
    chunks = chunks_of(layout, ShortContext(1024, 768))
    assert len(chunks.start) <= 5
    assert chunks.lengths.sum() < 500
    aligned = build_layout(4096, range(0, 4096, 256), 4096)  # every chunk starts with a document
    assert not len(chunks_of(aligned, ShortContext(1024, 768)).start)


@given(lengths=st.lists(st.integers(1, 20), max_size=30), capacity=st.integers(1, 60), multiple=st.integers(1, 4))
def test_every_chunk_is_dealt_once_and_evenly(lengths: list[int], capacity: int, multiple: int) -> None:
    shares = distribute(np.array(lengths, dtype=np.int64), capacity, multiple)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert len(shares) % multiple == 0
    if lengths:
        loads = [sum(lengths[index] for index in share) for share in shares]
        fewest = -(-sum(lengths) // capacity)
        assert fewest <= len(shares) < fewest + multiple
        assert max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize("padding", [0, 2])
def test_layout_without_chunks_is_padding_alone(padding: int) -> None:
    no_chunks = np.empty(0, dtype=np.int64)
    layout = Chunks(no_chunks, no_chunks, no_chunks).layout(build_layout(8, [], 8), padding)
    assert layout.cu_seqlens.tolist() == ([0, 2] if padding else [0])
