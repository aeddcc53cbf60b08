"""Segments against the mask written straight from its definition, token by token (test_masks.py)."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.layout import PackedLayout, build_layout, concatenate, segment_pairs
from megatron_ext.masks import AttentionMask, MaskOptions
from tests.test_masks import formula


def dense_mask(length: int, ends: list[int], window: int) -> np.ndarray:
    return formula(length, ends, MaskOptions(document_mask=True), window, local=False)


def mask_of(layout: PackedLayout) -> np.ndarray:
    mask = np.zeros((layout.tokens, layout.tokens), dtype=bool)
    for start, end in pairwise(layout.cu_seqlens.tolist()):
        mask[start:end, start:end] = np.tri(end - start, dtype=bool)
    return mask


@st.composite
def rows(draw: st.DrawFn, length: int) -> tuple[int, list[int], int]:
    place = st.one_of(st.integers(0, length), st.sampled_from([0, 1, length - 1, length]))
    ends = draw(st.lists(place.map(lambda end: max(end, 0)), max_size=8))
    window = draw(st.one_of(st.integers(1, length + 3), st.sampled_from([1, length, 10**9])))
    return length, ends, window


def test_the_drawing() -> None:
    layout = build_layout(12, [3, 10], 4)
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 8, 10, 12]
    assert layout.cu_seqlens.dtype == np.int32
    assert (layout.row_length, layout.tokens, layout.segments) == (12, 12, 5)
    assert layout.lengths.tolist() == [3, 1, 4, 2, 2]
    assert layout.lengths.dtype == np.int64
    assert layout.positions().tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 0, 1]
    assert layout.positions().dtype == np.int32
    assert layout.attention_pairs() == 6 + 1 + 10 + 3 + 3
    assert AttentionMask(layout).effective_context == (9 + 1 + 16 + 4 + 4) / 12


@given(tokens=st.integers(0, 60), left_window=st.none() | st.integers(0, 70))
def test_the_pairs_of_a_segment_are_counted(tokens: int, left_window: int | None) -> None:
    wanted = sum(token + 1 if left_window is None else min(token, left_window) + 1 for token in range(tokens))
    assert segment_pairs(tokens, left_window) == wanted
    assert segment_pairs(np.array([0, tokens], dtype=np.int64), left_window).tolist() == [0, wanted]


def test_squares_of_a_long_row_do_not_overflow() -> None:
    layout = build_layout(2**19, [], 2**19)
    assert AttentionMask(layout).context_sum == 2**38
    assert AttentionMask(concatenate([layout] * 4)).effective_context == 2**19


@given(drawn=st.integers(1, 24).flatmap(lambda length: st.lists(rows(length), min_size=1, max_size=4)))
@example(drawn=[(5, [0, 1, 4, 5], 5), (5, [5, 5, 1], 2)])
@settings(max_examples=300, deadline=None)
def test_segments_are_the_dense_masks_of_rows_side_by_side(drawn: list[tuple[int, list[int], int]]) -> None:
    length = drawn[0][0]
    count = len(drawn)
    joined = concatenate([build_layout(*row) for row in drawn])
    wanted = np.zeros((count * length, count * length), dtype=bool)
    for number, row in enumerate(drawn):
        place = slice(number * length, (number + 1) * length)
        wanted[place, place] = dense_mask(*row)  # the grid restarts at each row
    assert (mask_of(joined) == wanted).all()
    assert (joined.row_length, joined.tokens) == (length, count * length)
    assert joined.cu_seqlens.dtype == np.int32
    assert (np.diff(joined.cu_seqlens) > 0).all()
    keys = wanted.sum(axis=1)  # C_i, the token itself included
    assert joined.positions().tolist() == (keys - 1).tolist()
    assert joined.attention_pairs() == keys.sum()
    assert np.square(joined.lengths).sum() == (2 * keys - 1).sum()  # 1 + 3 + 5 + ... = len^2
    assert AttentionMask(joined).effective_context == pytest.approx((2 * keys.sum() - len(keys)) / len(keys), rel=1e-12)


def test_more_tokens_than_int32_counts_are_refused() -> None:
    """4,096 rows of 512K end at 2^31, one past the last int32."""
    row = build_layout(2**19, [], 2**19)
    assert concatenate([row] * 4095).cu_seqlens[-1] == 4095 * 2**19
    message = r"^micro_batch_size: got 2,147,483,648 tokens .*, needs at most 2\^31 - 1 = 2,147,483,647, .*; lower .*$"
    with pytest.raises(UserError, match=message):
        concatenate([row] * 4096)
    with pytest.raises(UserError, match=message):
        build_layout(2**31, [], 4)


@pytest.mark.parametrize(
    ("bad", "text", "good"),
    [
        ((0, [], 4), "row_length: got 0, needs >= 1", (1, [], 4)),
        ((8, [], 0), "window: got 0, needs >= 1", (8, [], 1)),
        ((8, [9], 4), "document_ends: got values from 9 to 9, needs 0..8", (8, [8], 4)),
        ((8, [4, -1], 4), "document_ends: got values from -1 to 4, needs 0..8", (8, [4, 0], 4)),
    ],
)
def test_refusals(bad: tuple[int, list[int], int], text: str, good: tuple[int, list[int], int]) -> None:
    with pytest.raises(UserError) as caught:
        build_layout(*bad)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert build_layout(*good).tokens == good[0]
