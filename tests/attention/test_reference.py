"""The reference backend against a dense mask in float64, and what one token can left_window.

Legend: t queries, u keys, N query heads, G key heads (groups), H head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.attention import reference
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.attention.reference import attend
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.layout import build_layout

QUIET = [HealthCheck.too_slow]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def window_mask(length: int, ends: list[int], window: int) -> Tensor:
    """bool [L, L]: token i sees j. floor(i/w)*w <= j <= i, and i and j lie in one document."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    document = torch.tensor([sum(end <= token for end in set(ends)) for token in range(length)])
    return (i // window * window <= j) & (j <= i) & (document[:, None] == document[None])


def bottom_right_mask(lengths: list[tuple[int, int]], left_window: int | None = None) -> Tensor:
    """bool [t, u]: of q queries and k keys, query a sees a + (k - q) and up to `left_window` keys before it."""
    mask = torch.zeros(sum(q for q, _ in lengths), sum(k for _, k in lengths), dtype=torch.bool)
    first_query = first_key = 0
    for q, k in lengths:
        for a in range(q):
            seen = 0 if left_window is None else max(a + (k - q) - left_window, 0)
            mask[first_query + a, first_key + seen : first_key + a + (k - q) + 1] = True
        first_query, first_key = first_query + q, first_key + k
    return mask


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask_tu: Tensor, scale: float) -> Tensor:
    """softmax(scale * q.k) over the visible keys; query head n reads group n // (N / G)."""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, dim=1), value.repeat_interleave(share, dim=1)
    scores = torch.einsum("tnh,unh->ntu", query, key) * scale
    weights = torch.softmax(scores.masked_fill(~mask_tu, -torch.inf), dim=-1)
    return torch.einsum("ntu,unh->tnh", weights, value)


@pytest.mark.parametrize(("count", "queries", "keys"), [(1, 96, 96), (4, 24, 24), (3, 20, 32), (40, 1, 1)])
def test_equal_segments_in_place_equal_those_taken_out(count: int, queries: int, keys: int) -> None:
    """An empty segment at the end changes no token, but the segments are then not all alike."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(count * queries, 4), (count * keys, 2), (count * keys, 2)]
    drawn = [torch.randn(*shape, 8, generator=generator) for shape in shapes]
    grad = torch.randn(count * queries, 4, 8, generator=generator)
    found = []
    for empty in (0, 1):
        leaves = [each.clone().requires_grad_() for each in drawn]
        ends = (np.minimum(np.arange(count + 1 + empty), count) * length for length in (queries, keys))
        out = attend(QKV(*leaves), AttentionCall.of(*(each.astype(np.int32) for each in ends)), scale=0.3)
        out.backward(grad)
        found.append((out, *(leaf.grad for leaf in leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@dataclass
class Drawn:
    query: Tensor
    key: Tensor
    value: Tensor
    out_grad: Tensor
    scale: float

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        return [x.to(dtype).detach().requires_grad_() for x in (self.query, self.key, self.value)]


@st.composite
def tensors(draw: st.DrawFn, t: int, u: int) -> Drawn:
    groups, share = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size = draw(st.sampled_from([1, 2, 4, 8]))
    scale = draw(st.sampled_from([size**-0.5, 1.0, 0.05]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shapes = [(t, groups * share, size), (u, groups, size), (u, groups, size), (t, groups * share, size)]
    return Drawn(*(torch.randn(shape, generator=generator) for shape in shapes), scale=scale)


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, list[int], int]:
    length = draw(st.integers(1, 32))
    ends = draw(st.lists(st.one_of(st.integers(0, length), st.sampled_from([0, 1, length - 1, length])), max_size=6))
    return length, ends, draw(st.one_of(st.integers(1, length + 1), st.just(length)))


def assert_equals_dense(
    inputs: Drawn,
    cu_q: np.ndarray,
    cu_kv: np.ndarray,
    mask: Tensor,
    dtype: torch.dtype,
    tolerance: float,
    left_window: int | None = None,
) -> None:
    ours, exact = inputs.leaves(dtype), inputs.leaves(torch.float64)
    out = attend(QKV(*ours), AttentionCall.of(cu_q, cu_kv, left_window), inputs.scale)
    wanted = dense_attention(*exact, mask, inputs.scale)
    assert out.dtype == dtype
    assert out.shape == inputs.query.shape
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    out.backward(inputs.out_grad.to(dtype))
    wanted.backward(inputs.out_grad.double())
    for name, got, want in zip("qkv", ours, exact, strict=True):
        assert got.grad is not None
        torch.testing.assert_close(
            got.grad.double(), want.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"d{n}: {m}"
        )


@given(row=rows(), data=st.data())
@example(row=(6, [0, 1, 5, 6], 6), data=None)
@example(row=(6, [1, 5], 1), data=None)
@example(row=(1, [0, 1], 1), data=None)
@settings(max_examples=80, deadline=None, suppress_health_check=QUIET)
def test_mask_truth(row: tuple[int, list[int], int], data: st.DataObject | None) -> None:
    length, ends, window = row
    inputs = data.draw(tensors(length, length)) if data else fixed_inputs(length)
    borders = build_layout(length, ends, window).cu_seqlens
    mask = window_mask(length, ends, window)
    assert_equals_dense(inputs, borders, borders, mask, torch.float32, 1e-5)
    assert_equals_dense(inputs, borders, borders, mask, torch.float64, 1e-12)


def fixed_inputs(length: int, seed: int = 0) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, 4, 8), (length, 2, 8), (length, 2, 8), (length, 4, 8)]
    return Drawn(*(torch.randn(shape, generator=generator) for shape in shapes), scale=8**-0.5)


# queries and keys of each segment: 0 <= q <= k
SEGMENTS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda two: (min(two), max(two))), min_size=1, max_size=7
).filter(lambda lengths: any(q for q, _ in lengths))


@given(
    lengths=SEGMENTS,
    left_window=st.sampled_from([None, 0, 1, 2, 4, 9]),
    masked=st.sampled_from([1, 2, 3, 128]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
def test_fewer_queries_than_keys_and_sliding_windows(
    lengths: list[tuple[int, int]], left_window: int | None, masked: int, data: st.DataObject
) -> None:
    """However many queries are computed at a time."""
    cu_q, cu_kv = np.cumsum([(0, 0), *lengths], axis=0, dtype=np.int32).T
    inputs = data.draw(tensors(int(cu_q[-1]), int(cu_kv[-1])))
    mask = bottom_right_mask(lengths, left_window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MASKED_QUERIES", masked)
        assert_equals_dense(inputs, cu_q, cu_kv, mask, torch.float32, 1e-5, left_window)
        assert_equals_dense(inputs, cu_q, cu_kv, mask, torch.float64, 1e-12, left_window)


def test_nan_stays_in_its_segment() -> None:
    inputs = fixed_inputs(10)
    inputs.key[5], inputs.value[5], inputs.query[5] = torch.nan, torch.nan, torch.nan
    borders = np.array([0, 4, 7, 10], dtype=np.int32)
    out = attend(QKV(inputs.query, inputs.key, inputs.value), AttentionCall.of(borders, borders), inputs.scale)
    assert torch.isfinite(out[:4]).all()
    assert torch.isnan(out[5:7]).all()
    assert torch.isfinite(out[7:]).all()


def test_bf16_error_is_at_most_twice_a_dense_bf16_softmax() -> None:
    inputs = fixed_inputs(64)
    borders = build_layout(64, [20, 41], 32).cu_seqlens
    mask = window_mask(64, [20, 41], 32)
    exact = dense_attention(
        *(x.bfloat16().double() for x in (inputs.query, inputs.key, inputs.value)), mask, inputs.scale
    )
    low = [x.bfloat16() for x in (inputs.query, inputs.key, inputs.value)]
    plain = dense_attention(*low, mask, inputs.scale)
    out = attend(QKV(*low), AttentionCall.of(borders, borders), inputs.scale)
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max()
