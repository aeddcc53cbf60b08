"""Masks of layers against the papers' formulas, token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.masks import AttentionMask, MaskOptions


def seen(mask: AttentionMask) -> np.ndarray:
    """bool [T, T] from segments and left window."""
    i = np.arange(mask.layout.tokens)[:, None]
    j = np.arange(mask.layout.tokens)[None, :]
    segment = np.searchsorted(mask.layout.cu_seqlens, np.arange(mask.layout.tokens), side="right")
    visible = (segment[:, None] == segment[None, :]) & (j <= i)
    return visible if mask.left_window is None else visible & (i - j <= mask.left_window)


def formula(length: int, ends: list[int], options: MaskOptions, window: int, local: bool) -> np.ndarray:
    i = np.arange(length)[:, None]
    j = np.arange(length)[None, :]
    if local and options.local_fixed:
        visible = i - j < (options.local_window or 0)
    elif options.window_mask == "sliding":
        visible = i - window <= j
    elif options.window_mask == "sliding_w":
        visible = i - window < j
    else:
        visible = i // window * window <= j
    if local:
        visible = visible & (i - j < (options.local_window or 0))
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
    fixed=st.booleans(),
)
def test_masks_are_the_formulas(length, ends, window, local_window, every, kind, document_mask, fixed) -> None:  # type: ignore[no-untyped-def]
    ends = sorted({end for end in ends if end <= length})
    options = MaskOptions(document_mask, kind, local_window, every, num_layers=4, local_fixed=fixed)
    masks = options.at(length, [np.array(ends, dtype=np.int64)], window)
    by_layer = []
    depends = np.eye(length, dtype=np.int64)  # [token, token of the input], through the layers so far
    for number in range(1, 5):
        local = options.is_local_layer(number)
        mask = masks.by_kind[local]
        expected = formula(length, ends, options, window, local)
        np.testing.assert_array_equal(seen(mask), expected)
        np.testing.assert_array_equal(mask.first_keys(), expected.argmax(axis=1))
        depends = expected.astype(np.int64) @ depends
        by_layer.append((2 * expected.sum() - length) / length)
        # no layer sees beyond the widest segments, whose positions all layers share
        segment = np.repeat(np.arange(masks.widest.segments), masks.widest.lengths)
        assert not (expected & (segment[:, None] != segment[None, :])).any()
    np.testing.assert_array_equal(masks.first_dependencies(), (depends > 0).argmax(axis=1))
    assert masks.context_sum / (4 * length) == pytest.approx(np.mean(by_layer), rel=1e-12)


def test_gemma_and_mistral_patterns() -> None:
    gemma = MaskOptions(True, local_window=512, global_every=6, num_layers=12)
    assert [number for number in range(1, 13) if not gemma.is_local_layer(number)] == [6, 12]
    assert all(MaskOptions(True, local_window=512, num_layers=3).is_local_layer(number) for number in (1, 2, 3))
    assert not any(MaskOptions(True, num_layers=3).is_local_layer(number) for number in (1, 2, 3))


def test_local_layers_obey_the_schedule() -> None:
    """The paper's hybrid at window w: a local layer reaches min(local window, w), inside the scheduled segments.

    By hand, of tokens 0..7 and a local window of 3 (a token and two before it: i - 2 .. i):
    w = 2, blocks 01 23 45 67; w = 3, blocks 012 345 67; w = 4, blocks 0123 4567, in which i - 2 cuts.
    """
    options = MaskOptions(False, "grid", 3, 2, num_layers=2)
    no_ends = np.empty(0, dtype=np.int64)
    masks = [options.at(8, [no_ends], window).by_kind[1] for window in (2, 3, 4)]
    # a block within the local window needs no reach, so that backends take their plain causal kernel
    assert [mask.left_window for mask in masks] == [None, None, 2]
    assert masks[0].first_keys().tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert masks[2].first_keys().tolist() == [0, 0, 0, 1, 4, 4, 4, 5]
