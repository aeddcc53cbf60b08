"""Chunks of the short context, token by token against their definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.layout import PackedLayout, build_layout
from megatron_ext.masks import AttentionMask, LayerMasks, MaskOptions
from megatron_ext.short_context import Chunks, ShortContext, distribute, short_chunks


@st.composite
def cases(draw: st.DrawFn) -> tuple[LayerMasks, ShortContext]:
    length, layers = draw(st.integers(1, 30)), draw(st.integers(1, 3))
    options = MaskOptions(
        document_mask=True,
        window_mask=draw(st.sampled_from(["grid", "sliding"])),
        local_window=draw(st.none() | st.integers(1, 12)),
        global_every=draw(st.none() | st.integers(2, 3)),
        num_layers=layers,
    )
    ends = st.lists(st.integers(0, length), max_size=4).map(lambda found: np.array(found, dtype=np.int64))
    masks = options.at(length, [draw(ends) for _ in range(draw(st.integers(1, 3)))], draw(st.integers(1, 40)))
    n = draw(st.integers(1, 20))
    return masks, ShortContext(n, draw(st.integers(1, n)), draw(st.booleans()))


def contexts_of(masks: LayerMasks, short: ShortContext, token: int) -> tuple[int, int]:
    """The first token on which `token` depends: in the long context, and in the chunk that scores it."""
    length = masks.widest.row_length
    row, place = divmod(token, length)
    # chunk k scores the places n + (k-1) s .. n + k s - 1
    chunk = 0 if place < short.length else (place - short.length) // short.stride + 1
    first = int(masks.first_dependencies()[token])
    return first, max(first, row * length + chunk * short.stride)


def chunks_of(masks: LayerMasks, short: ShortContext) -> Chunks:
    return short_chunks(masks.widest.row_length, masks.first_dependencies(), short)


def of_layout(layout: PackedLayout) -> LayerMasks:
    return LayerMasks(AttentionMask(layout))


@given(cases())
def test_nothing_is_computed_that_no_score_needs(case: tuple[LayerMasks, ShortContext]) -> None:
    masks, short = case
    chunks = chunks_of(masks, short)
    for start, scored in zip(chunks.start, chunks.scored, strict=True):
        assert start == contexts_of(masks, short, scored)[1]  # a chunk begins where its first scored token looks


def test_the_drawn_example() -> None:
    layout = build_layout(16, [], 16)
    drawn = chunks_of(of_layout(layout), ShortContext(6, 4, every_token=True))
    assert (drawn.start.tolist(), drawn.end.tolist()) == ([0, 4, 8, 12], [6, 10, 14, 16])
    assert drawn.scored.tolist() == [0, 6, 10, 14]
    unfrozen = chunks_of(of_layout(layout), ShortContext(6, 4))
    assert unfrozen.start.tolist() == [4, 8, 12]


def test_documents_inside_chunks_are_not_computed_again() -> None:
    """Where documents are shorter than the short context only those that cross into a chunk are left."""
    layout = build_layout(4096, range(0, 4096, 100), 4096)
    chunks = chunks_of(of_layout(layout), ShortContext(1024, 768))
    assert len(chunks.start) <= 5
    assert chunks.lengths.sum() < 500
    aligned = build_layout(4096, range(0, 4096, 256), 4096)  # every chunk starts with a document
    assert not len(chunks_of(of_layout(aligned), ShortContext(1024, 768)).start)


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
    nothing = np.empty(0, dtype=np.int64)
    layout = Chunks(nothing, nothing, nothing).layout(build_layout(8, [], 8), padding)
    assert layout.cu_seqlens.tolist() == ([0, 2] if padding else [0])
