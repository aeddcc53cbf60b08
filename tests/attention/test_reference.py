"""The reference backend against dense masks in float64, forward and backward.

Legend: t queries, u keys, N query heads, G key heads (groups), H head size.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.attention import reference
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.attention.reference import attend
from megatron_ext.context_parallel.exchange import QKV
from tests.attention.kernels import Lengths, call_of, inputs_of, results


def visible(call: AttentionCall) -> Tensor:
    """bool [t, u]: of q queries and k keys, query a sees a + (k - q) and up to `left_window` keys before it."""
    lengths = zip(np.diff(call.cu_seqlens_q).tolist(), np.diff(call.cu_seqlens_kv).tolist(), strict=True)
    mask = torch.zeros(int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_kv[-1]), dtype=torch.bool)
    first_query = first_key = 0
    for q, k in lengths:
        for a in range(q):
            seen = 0 if call.left_window is None else max(a + (k - q) - call.left_window, 0)
            mask[first_query + a, first_key + seen : first_key + a + (k - q) + 1] = True
        first_query, first_key = first_query + q, first_key + k
    return mask


def dense(inputs: QKV, call: AttentionCall, scale: float) -> Tensor:
    """softmax(scale * q.k) over the visible keys and the sink; query head n reads group n // (N / G)."""
    query, key, value, sink_N = inputs
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, dim=1), value.repeat_interleave(share, dim=1)
    scores = (torch.einsum("tnh,unh->ntu", query, key) * scale).masked_fill(~visible(call), -torch.inf)
    if sink_N is None:
        return torch.einsum("ntu,unh->tnh", scores.softmax(-1), value)
    column = sink_N[:, None, None].expand(-1, len(query), 1)
    return torch.einsum("ntu,unh->tnh", torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1], value)


# queries and keys of each segment: 0 <= q <= k
SEGMENTS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda lengths: (min(lengths), max(lengths))),
    min_size=1,
    max_size=7,
).filter(lambda lengths: any(q for q, _ in lengths))


@given(
    lengths=SEGMENTS,
    left_window=st.sampled_from([None, 0, 1, 2, 4, 9]),
    masked=st.sampled_from([1, 2, 3, 128]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (3, 3)]),
    size=st.sampled_from([1, 2, 4, 8]),
    sinks=st.sampled_from([[], [-9.0, -4.0, 1.0, 6.0], [-torch.inf, 1e4, 0.5, 6.0]]),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_output_and_gradients(
    lengths: Lengths, left_window: int | None, masked: int, heads: tuple[int, int], size: int, sinks: list[float]
) -> None:
    """However many queries are computed at a time; with sinks up to those that leave a plain softmax, or nothing."""
    call = call_of(lengths, left_window)
    inputs = [*inputs_of(call, *heads, size), *([torch.tensor(sinks[: heads[0]])] if sinks else [])]
    wanted = results(dense, [x.double() for x in inputs], call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MASKED_QUERIES", masked)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
            for actual, want in zip(results(attend, [x.to(dtype) for x in inputs], call), wanted, strict=True):
                assert actual.dtype == dtype
                torch.testing.assert_close(actual.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("count", "queries", "keys"), [(1, 96, 96), (4, 24, 24), (3, 20, 32), (40, 1, 1)])
def test_equal_segments_in_place_equal_those_taken_out(count: int, queries: int, keys: int) -> None:
    """An empty segment at the end changes no token, but the segments are then not all alike."""
    alike = call_of([(queries, keys)] * count)
    inputs = inputs_of(alike)
    unequal_results = results(attend, inputs, call_of([*[(queries, keys)] * count, (0, 0)]))
    for alike_result, unequal_result in zip(results(attend, inputs, alike), unequal_results, strict=True):
        assert torch.equal(alike_result, unequal_result)


def test_nan_stays_in_its_segment() -> None:
    call = call_of([(4, 4), (3, 3), (3, 3)])
    query, key, value, _ = inputs_of(call)
    query[5], key[5], value[5] = torch.nan, torch.nan, torch.nan
    out = attend(QKV(query, key, value), call, 0.3)
    assert torch.isfinite(out[:4]).all()
    assert torch.isnan(out[5:7]).all()
    assert torch.isfinite(out[7:]).all()


def test_bf16_error_is_at_most_twice_a_dense_bf16_softmax() -> None:
    call = call_of([(20, 20), (12, 12), (9, 9), (23, 23)])
    inputs = inputs_of(call, dtype=torch.bfloat16)
    exact = results(dense, [x.double() for x in inputs], call)[0]
    out, plain = (results(how, inputs, call)[0] for how in (attend, dense))
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max()
