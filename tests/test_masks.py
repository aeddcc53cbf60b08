"""Masks of layers against the papers' formulas, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.layout import build_layout
from megatron_ext.masks import AttentionMask, LayerMasks, MaskOptions


def seen(mask: AttentionMask) -> np.ndarray:
    """bool [T, T] from segments and reach."""
    i, j = np.arange(mask.layout.tokens)[:, None], np.arange(mask.layout.tokens)[None, :]
    segment = np.searchsorted(mask.layout.cu_seqlens, np.arange(mask.layout.tokens), side="right")
    visible = (segment[:, None] == segment[None, :]) & (j <= i)
    return visible if mask.reach is None else visible & (i - j <= mask.reach)


def formula(length: int, ends: list[int], options: MaskOptions, window: int, local: bool) -> np.ndarray:
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    if local:
        visible = i - j < (options.local_window or 0)
    elif options.window_mask == "sliding":
        visible = i - window <= j
    elif options.window_mask == "sliding_w":
        visible = i - window < j
    else:
        visible = i // window * window <= j
    document = np.array([sum(end <= token for end in ends) for token in range(length)])
    if options.document_mask:
        visible = visible & (document[:, None] == document[None, :])
    return visible & (j <= i)


@given(
    length=st.integers(1, 24),
    ends=st.lists(st.integers(0, 24), max_size=5),
    window=st.integers(1, 30),
    local_window=st.none() | st.integers(1, 30),
    every=st.none() | st.integers(2, 4),
    kind=st.sampled_from(["grid", "sliding", "sliding_w"]),
    document_mask=st.booleans(),
)
def test_masks_are_the_formulas(length, ends, window, local_window, every, kind, document_mask) -> None:  # type: ignore[no-untyped-def]
    ends = sorted({end for end in ends if end <= length})
    options = MaskOptions(document_mask, kind, local_window, every, num_layers=4)
    masks = options.at(length, [np.array(ends, dtype=np.int64)], window)
    by_layer = []
    depends = np.eye(length, dtype=np.int64)  # [token, token of the input], through the layers so far
    for number in range(1, 5):
        local = options.is_local(number)
        mask = masks.local if local else masks.scheduled
        assert mask is not None
        expected = formula(length, ends, options, window, local)
        np.testing.assert_array_equal(seen(mask), expected)
        np.testing.assert_array_equal(mask.first_keys(), expected.argmax(axis=1))
        depends = expected.astype(np.int64) @ depends
        by_layer.append((2 * expected.sum() - length) / length)
        # no layer sees beyond the widest segments, whose positions all layers share
        segment = np.repeat(np.arange(masks.widest.segments), masks.widest.lengths)
        assert not (expected & (segment[:, None] != segment[None, :])).any()
    np.testing.assert_array_equal(masks.first_dependencies(), (depends > 0).argmax(axis=1))
    assert masks.effective_context == pytest.approx(np.mean(by_layer), rel=1e-12)


def test_gemma_and_mistral_patterns() -> None:
    gemma = MaskOptions(True, local_window=512, global_every=6, num_layers=12)
    assert [number for number in range(1, 13) if not gemma.is_local(number)] == [6, 12]
    assert all(MaskOptions(True, local_window=512, num_layers=3).is_local(number) for number in (1, 2, 3))
    assert not any(MaskOptions(True, num_layers=3).is_local(number) for number in (1, 2, 3))


def test_rows_lie_end_to_end() -> None:
    options = MaskOptions(True, "sliding", local_window=3, global_every=2, num_layers=2)
    masks = options.at(6, [np.array([2]), np.array([], dtype=np.int64)], 4)
    assert masks.scheduled.layout.cu_seqlens.tolist() == [0, 2, 6, 12]
    assert (masks.scheduled.reach, masks.local and masks.local.reach) == (4, 2)
    assert options.at(6, [np.array([2])], 6).scheduled.reach is None


def test_the_drawn_dependencies() -> None:
    layout = build_layout(10, [7], 10)
    masks = LayerMasks(AttentionMask(layout, reach=2), is_local=(False, False))
    assert masks.scheduled.first_keys().tolist() == [0, 0, 0, 1, 2, 3, 4, 7, 7, 7]
    assert masks.first_dependencies().tolist() == [0, 0, 0, 0, 0, 1, 2, 7, 7, 7]


def test_without_a_reach_the_context_is_the_sum_of_squared_lengths() -> None:
    layout = build_layout(12, [3, 10], 4)
    assert LayerMasks(AttentionMask(layout)).context_sum == np.square(layout.lengths).sum()
