"""Our Triton kernels, run by Triton's interpreter on a CPU, against the reference in float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_ext.attention import reference, triton_packed
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.attention.triton_packed import Tile, Tiles, ranges
from megatron_ext.layout import build_layout
from tests.attention.kernels import assert_right, call_of, exact, inputs_of, results
from tests.conftest import slow_but

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

ROOT = Path(__file__).resolve().parents[2]
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
SMALL = Tiles(*[Tile(16, 16, 4, 1)] * 3)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows, so that short calls have several."""
    monkeypatch.setattr(triton_packed, "tiles", lambda head_size: SMALL)


# queries and more keys; lengths around those of a tile
SEGMENTS = st.lists(
    st.tuples(st.one_of(st.integers(0, 6), st.sampled_from([15, 16, 17, 33])), st.sampled_from([0, 0, 1, 7, 20])).map(
        lambda n: (n[0], sum(n))
    ),
    min_size=1,
    max_size=3,
).filter(lambda lengths: any(q for q, _ in lengths))


@pytest.mark.usefixtures("small_tiles")
@given(
    lengths=SEGMENTS,
    left_window=st.sampled_from([None, None, 0, 1, 15, 40]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    size=st.sampled_from([8, 16, 24, 40]),
)
@example(lengths=[(0, 20), (1, 1), (0, 17), (16, 16), (0, 3)], left_window=None, heads=(4, 2), size=8)
@example(lengths=[(1, 50)], left_window=3, heads=(2, 1), size=8)
@example(lengths=[(0, 3)], left_window=None, heads=(4, 2), size=16)
@settings(max_examples=5, deadline=None, suppress_health_check=QUIET)
def test_output_and_gradients(
    lengths: list[tuple[int, int]], left_window: int | None, heads: tuple[int, int], size: int
) -> None:
    call = call_of(lengths, left_window)
    assert_right(triton_packed.attend, inputs_of(call, *heads, size), call)


@pytest.mark.parametrize(("size", "window"), [(64, 270), (80, 50), (128, 270), (256, 50)])
def test_its_own_tiles(size: int, window: int) -> None:
    """Several tiles and a bit, with and without some whose queries see all keys; heads of one part and of two."""
    borders = build_layout(270, [20, 31, 260], window).cu_seqlens
    call = AttentionCall.of(borders, borders)
    assert_right(triton_packed.attend, inputs_of(call, 2, 1, size), call, 2e-5)


@pytest.mark.usefixtures("small_tiles")
def test_half_precision_rounds_like_the_reference() -> None:
    """The error is at most twice that of the reference in the same precision."""
    call = call_of([(20, 20), (3, 9), (40, 60)])
    inputs = inputs_of(call, dtype=torch.float16)
    ours, plain = results(triton_packed.attend, inputs, call), results(reference.attend, inputs, call)
    right = exact(inputs, call)
    for name, got, theirs, want in zip(("out", "dq", "dk", "dv"), ours, plain, right, strict=True):
        assert got.dtype == torch.float16
        assert (got - want).abs().max() <= 2 * (theirs - want).abs().max() + 1e-5, name


@pytest.mark.usefixtures("small_tiles")
def test_rows_and_heads_any_distance_apart() -> None:
    """As the exchange in parts cuts them out of wider tensors, and as a gradient may come."""
    call = call_of([(20, 20), (3, 9)])
    inputs = [x.chunk(2, dim=1)[1] for x in inputs_of(call, heads=8, groups=4, size=16)]
    inputs[1] = inputs[1].transpose(0, 1).contiguous().transpose(0, 1)
    inputs[2] = inputs[2].transpose(1, 2).contiguous().transpose(1, 2)  # even a head's numbers
    assert not any(x.is_contiguous() for x in inputs)
    assert_right(triton_packed.attend, inputs, call)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("axis", [0, 1])
def test_places_beyond_two_to_the_31(axis: int) -> None:
    """512K tokens of 32 heads of 128 have so many numbers. Pages that nobody touches take no memory."""
    far = 2**30 + 8
    call = call_of([(1, 2), (2, 2)])

    def spread(x: torch.Tensor) -> torch.Tensor:
        room = torch.empty(x.shape[axis] * far, dtype=x.dtype)
        wide = room.as_strided(x.shape, (far, x.shape[2], 1) if axis == 0 else (x.shape[2], far, 1))
        return wide.copy_(x)

    inputs = inputs_of(call, dtype=torch.float16)
    near = results(triton_packed.attend, inputs, call)
    for got, want in zip(results(triton_packed.attend, [spread(x) for x in inputs], call), near, strict=True):
        assert torch.equal(got, want)


@given(lengths=SEGMENTS, left_window=st.sampled_from([None, 0, 1, 15]), own_keys=st.sampled_from([1, 4, 16]))
@settings(max_examples=100, deadline=None)
def test_ranges_are_those_of_every_pair(lengths: list[tuple[int, int]], left_window: int | None, own_keys: int) -> None:
    seen = []  # the keys of each query
    key = 0
    for q, k in lengths:
        for j in range(q):
            last = key + j + (k - q)
            seen.append((key if left_window is None else max(key, last - left_window), last))
        key += k
    low_t, high_t, tiles_of_keys = ranges(call_of(lengths, left_window), own_keys)
    assert list(zip(low_t.tolist(), high_t.tolist(), strict=True)) == seen
    first_query, end_query, full_query, full_end_query = (x.tolist() for x in tiles_of_keys)
    for tile, (first, end) in enumerate(zip(first_query, end_query, strict=True)):
        keys = range(tile * own_keys, min((tile + 1) * own_keys, key))
        those = [t for t, (low, high) in enumerate(seen) if any(low <= u <= high for u in keys)]
        assert set(those) <= set(range(first, end))
        if those:
            assert (first, end) == (those[0], those[-1] + 1)
        else:
            assert end - first <= 0
    for tile, (first, end) in enumerate(zip(full_query, full_end_query, strict=True)):
        keys = range(tile * own_keys, min((tile + 1) * own_keys, key))
        those = [t for t, (low, high) in enumerate(seen) if low <= keys[0] and keys[-1] <= high]
        assert those == list(range(first, end))


def test_its_operators_are_what_torch_takes_them_for() -> None:
    """Fake kernels, gradients and schemas agree with the real ones (torch's own check)."""
    call = call_of([(3, 3), (2, 5)])
    query, key, value, _ = inputs_of(call, size=16)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    arguments = (*leaves, *ranges(call, triton_packed.tiles(16).backward_key.keys), 0.3)
    torch.library.opcheck(triton_packed._forward, arguments)


@pytest.mark.parametrize("size", slow_but([128], [64, 80, 96, 128, 192, 256]))
def test_registers_and_shared_memory_on_hopper(size: int, tmp_path: Path) -> None:
    """Triton compiles without a GPU: no spills, tensor cores, and two blocks on an SM for heads up to 128."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "benchmarks" / "occupancy.py", str(size)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in kernels] == ["forward", "backward_query", "backward_key"]
    for kernel in kernels:
        assert kernel["tensor_cores"], kernel
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["blocks_per_sm"] >= (2 if size <= 128 else 1), kernel
