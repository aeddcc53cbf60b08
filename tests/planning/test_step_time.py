"""The time model: held against published figures, and against what must hold of any such model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.planning.published import compare, read_figures, table
from megatron_ext.planning.step_time import FACTS, Shapes, Work, at_window, rank_work, read_speeds, step_time

LLAMA = Shapes(layers=32, hidden=4096, ffn=14336, heads=32, groups=8, vocabulary=128256)
SPEEDS = read_speeds()
WORK = Work(shapes=LLAMA, gpu="H100", world=64, row=131072, rows=64, tp=4, cp=4)
windows = st.integers(1, 131072)


def seconds(work: Work) -> float:
    return step_time(work, SPEEDS).total


def test_the_figures_that_it_was_not_fitted_to() -> None:
    compared = compare(read_figures(), SPEEDS)
    fitted = [one for one in compared if one.figure.fit]
    errors = [abs(one.error) for one in compared if not one.figure.fit]
    assert 3 * len(fitted) <= len(compared)
    assert median(errors) <= 0.15
    assert max(errors) <= 0.35


def test_the_page_shows_the_table_as_it_is() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "plan-run.md").read_text(encoding="utf-8")
    shown = page.split("<!-- benchmarks/published.py -->\n", 1)[1].split("\n<!-- end -->", 1)[0]
    assert shown.splitlines() == list(table(compare(read_figures(), SPEEDS))), "python benchmarks/published.py --write"


@given(windows, windows)
def test_a_wider_window_never_takes_less_time(one: int, other: int) -> None:
    narrow, wide = sorted((one, other))
    # tiles: just below a multiple of the tile the kernel computes as much, so compare windows a tile apart or more
    if wide - narrow >= 128:
        assert seconds(at_window(WORK, narrow)) <= seconds(at_window(WORK, wide)) * (1 + 1e-9)


@given(windows)
def test_the_whole_row_is_the_widest_window(window: int) -> None:
    assert seconds(at_window(WORK, window)) <= seconds(at_window(WORK, WORK.row)) * (1 + 1e-9)


def test_products_are_the_multiply_adds_over_their_speed() -> None:
    work = Work(shapes=LLAMA, gpu="H100", world=1, row=8192)
    matrices = 2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 14336
    speed = 989e12 * SPEEDS.reached["hopper"].matmul
    assert step_time(work, SPEEDS).products == pytest.approx(32 * 3 * 2 * matrices * 8192 / speed)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_sharing_a_row_shortens_its_products_alike(axis: str) -> None:
    alone = Work(shapes=LLAMA, gpu="H100", world=2, row=8192, rows=2)
    shared = replace(alone, **{axis: 2})
    assert step_time(shared, SPEEDS).products == pytest.approx(step_time(alone, SPEEDS).products)
    assert getattr(step_time(shared, SPEEDS), "tensor" if axis == "tp" else "context") > 0


def test_recomputing_adds_a_third_of_the_products() -> None:
    plain = step_time(WORK, SPEEDS).products
    assert step_time(replace(WORK, recompute=True), SPEEDS).products == pytest.approx(plain * 4 / 3)


def test_the_bubble_is_the_idle_share_of_the_schedule() -> None:
    work = replace(WORK, pp=4, cp=1, rows=64)
    time = step_time(work, SPEEDS)
    busy = time.total - time.bubble - time.data - time.optimizer
    assert time.bubble == pytest.approx(busy * 3 / work.microbatches)
    assert step_time(replace(work, chunks=2), SPEEDS).bubble == pytest.approx(time.bubble / 2)


def test_an_unknown_card_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"gpu: got 'H300', needs one of A100-40GB, .*; add it to "):
        SPEEDS.gpu("H300")


def test_a_file_of_cards_with_a_wrong_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text((FACTS / "gpus.yaml").read_text().replace("fp8_speedup: 1.9", "fp8_speedup: -1"))
    with pytest.raises(UserError, match=r"gpus.yaml: fp8_speedup: .*greater than 0"):
        read_speeds(path)


def test_recomputed_parts_add_up_to_less_than_the_layer() -> None:
    plain, whole = step_time(WORK, SPEEDS), step_time(replace(WORK, recompute=1.0), SPEEDS)
    parts = {
        modules: step_time(replace(WORK, recompute_modules=modules), SPEEDS)
        for modules in (("core_attn",), ("layernorm",), ("mlp",))
    }
    assert parts["core_attn",].attention == pytest.approx(plain.attention * 4.5 / 3.5)
    assert parts["core_attn",].products == plain.products
    mlp = WORK.shapes.mlp_parameters / WORK.shapes.layer_parameters
    assert parts["mlp",].products == pytest.approx(plain.products * (3 + mlp) / 3)
    assert parts["layernorm",].total == pytest.approx(plain.total + parts["layernorm",].memory - plain.memory, rel=1e-3)
    assert all(plain.total < part.total < whole.total for part in parts.values())
    half = step_time(replace(WORK, recompute=0.5), SPEEDS)
    assert half.products == pytest.approx((plain.products + whole.products) / 2)


@given(st.integers(0, 10**12))
def test_offloading_takes_no_less_than_what_nothing_hides(moved: int) -> None:
    plain, time = step_time(WORK, SPEEDS), step_time(replace(WORK, offloaded=moved), SPEEDS)
    passed = moved / (SPEEDS.gpu("H100").host * 1e9 * SPEEDS.links) * WORK.microbatches
    busy = plain.total - plain.data - plain.optimizer
    assert time.offload >= max(2 * passed - busy, 0.1 * passed) * (1 - 1e-9)
    assert time.total >= plain.total


def test_checkpoints_and_slow_batches_hold_a_step_up() -> None:
    saved = replace(WORK, saved=3e9, save_every=100)
    assert step_time(saved, SPEEDS).saving == pytest.approx(3 / SPEEDS.host.storage / 100)
    assert step_time(replace(saved, async_save=True), SPEEDS).saving < step_time(saved, SPEEDS).saving / 10
    busy = step_time(WORK, SPEEDS).total
    tokens = int(2 * busy * SPEEDS.host.tokens)
    assert step_time(replace(WORK, prepared=tokens), SPEEDS).batches == pytest.approx(busy, rel=1e-6)
    assert step_time(replace(WORK, prepared=tokens // 4), SPEEDS).batches == 0


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_the_flops_of_segments_are_the_sum_of_their_own(lengths: list[int]) -> None:
    """Segments laid end to end are worth what each is worth in a row of its own."""
    row = sum(lengths)
    pairs = sum(length * length / 2 for length in lengths)

    def flops(tokens: int, context: float) -> float:
        return rank_work(Work(shapes=LLAMA, gpu="H100", world=1, row=tokens, context=context), head=True).flops

    together = flops(row, pairs / row)
    assert together == pytest.approx(sum(flops(length, length / 2) for length in lengths))
    assert together <= flops(row, row / 2) * (1 + 1e-9)


@given(windows, windows)
def test_flops_grow_with_the_window(one: int, other: int) -> None:
    narrow, wide = sorted((one, other))
    works = (at_window(WORK, window) for window in (narrow, wide))
    less, more = (rank_work(work, head=False).flops for work in works)
    assert less <= more * (1 + 1e-12)
