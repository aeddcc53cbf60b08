"""The time model: held against published figures, and against what must hold of any such model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.checkpoint.hf.names import count_active_parameters, count_parameters
from megatron_ext.config import ModelConfig
from megatron_ext.config.arguments import parse
from megatron_ext.config.options import RecomputeModule
from megatron_ext.config.presets import PRESETS
from megatron_ext.errors import UserError
from megatron_ext.planning.step_time import FACTS, Shapes, Work, rank_work, read_speeds, step_time, work_of

ROOT = Path(__file__).resolve().parents[2]
LLAMA = Shapes(layers=32, hidden=4096, ffn=14336, heads=32, groups=8, vocabulary=128256)
SPEEDS = read_speeds()
# Qwen3-30B-A3B's
MIXTURE = Shapes(
    layers=48, hidden=2048, ffn=768, heads=32, groups=4, vocabulary=151936, head_size=128, experts=128, chosen=8
)
WORK = Work(shapes=LLAMA, gpu="H100", world=64, row=131072, rows=64, tp=4, cp=4)
windows = st.integers(1, 131072)


def at_window(work: Work, window: int) -> Work:
    """The same step under blocks of `window` tokens."""
    return replace(work, context=window / 2, segment=window, exchanged=window / work.row)


def seconds(work: Work) -> float:
    return step_time(work, SPEEDS).total


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


def test_a_checkpoint_has_a_tied_matrix_once() -> None:
    config = parse(["--config", str(ROOT / "examples/configs/cpu_smoke.yaml"), "--vocab-size", "50000", "--bf16"])
    tied, own = (
        work_of(
            replace(config, model=replace(config.model, untie_embeddings_and_output_weights=untied)),
            4,
            "H100",
            50000,
            64,
        ).saved
        for untied in (False, True)
    )
    assert (own - tied) * 4 == 14 * 50000 * config.model.hidden_size
    assert tied * 4 > 14 * 50000 * config.model.hidden_size


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


def test_a_mixture_has_the_parameters_of_its_name_table() -> None:
    model = ModelConfig(**PRESETS["Qwen3-30B-A3B"])
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    assert model.vocab_size == 151936
    assert Shapes.of(model, 151936) == MIXTURE
    ends = 2 * 151936 * 2048
    whole = 48 * (MIXTURE.everyones_parameters + MIXTURE.expert_parameters) + ends
    assert whole + norms == count_parameters(model, 151936)
    active = 48 * MIXTURE.layer_parameters + ends
    assert active + norms == count_active_parameters(model, 151936)


@given(
    experts=st.sampled_from([2, 4, 8]),
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2]),
    modules=st.sampled_from([(), ("mlp",), ("layernorm", "mlp")]),
    whole=st.sampled_from([0.0, 1.0]),
)
def test_experts_that_all_tokens_meet_take_no_less_than_one_block_as_wide(
    experts: int, tp: int, cp: int, ep: int, modules: tuple[RecomputeModule, ...], whole: float
) -> None:
    dense = replace(WORK, tp=tp, cp=cp, recompute_modules=modules, recompute=whole)
    shapes = replace(LLAMA, ffn=LLAMA.ffn // experts, experts=experts, chosen=experts)
    mixture = replace(dense, shapes=shapes, ep=ep)
    one, other = step_time(dense, SPEEDS), step_time(mixture, SPEEDS)
    assert other.products > one.products  # the router on top
    assert other.memory > one.memory
    assert other.total > one.total
    assert rank_work(mixture, head=True).flops > rank_work(dense, head=True).flops


@pytest.mark.parametrize(("tp", "ep", "nvlink"), [(1, 8, True), (2, 4, True), (2, 8, False), (1, 32, False)])
def test_tokens_travel_to_their_experts_and_back(tp: int, ep: int, nvlink: bool) -> None:
    work = Work(shapes=MIXTURE, gpu="H100", world=64, row=8192, tp=tp, ep=ep)
    copies = 8 * 8192 // tp * (ep - 1) // ep  # those that leave the rank
    there_and_back = 2 * copies * 2048 * 2
    assert rank_work(work, head=False).expert_bytes == 48 * 2 * there_and_back  # forward and backward
    card = SPEEDS.gpu("H100")
    link = (card.nvlink if nvlink else card.network) * 1e9 * SPEEDS.links
    # each tensor-parallel rank has a part of the tokens, and gathers the copies of the others' for its part of F
    gathered = 2 * 8 * 8192 * (tp - 1) // tp * 2048 * 2 / (card.nvlink * 1e9 * SPEEDS.links)
    expected = SPEEDS.uneven_experts * 48 * 2 * (there_and_back / link + gathered)
    assert step_time(work, SPEEDS).experts == pytest.approx(expected)


def test_all_experts_are_reduced_and_updated_by_the_ranks_that_hold_them() -> None:
    work = Work(shapes=MIXTURE, gpu="H100", world=64, row=8192, ep=8)
    block = 3 * 2048 * 768
    rest = 48 * (2 * 2048 * 128 * 36 + 2048 * 128) + 2 * 151936 * 2048
    speed = SPEEDS.gpu("H100").bandwidth * 1e9 * SPEEDS.bandwidth
    # 64 ranks share the rest's state, 8 that of each of the 16 experts here
    assert step_time(work, SPEEDS).optimizer == pytest.approx(24 * (rest / 64 + 48 * 16 * block / 8) / speed)
    # few tokens: what is read and written of the experts' weights is what their products take
    few = replace(work, row=64)
    assert step_time(few, SPEEDS).products >= 48 * 16 * block * (2 + 10) / speed
    fewer = replace(few, row=32)
    assert step_time(fewer, SPEEDS).products > 0.9 * step_time(few, SPEEDS).products


def test_what_experts_compute_again_with_their_block() -> None:
    work = Work(shapes=MIXTURE, gpu="H100", world=64, row=32768, ep=8)
    plain, mlp, whole = (
        step_time(one, SPEEDS)
        for one in (work, replace(work, recompute_modules=("mlp",)), replace(work, recompute=1.0))
    )
    assert mlp.experts == pytest.approx(plain.experts * 1.5)
    assert plain.products < mlp.products < whole.products
    assert plain.total < mlp.total < whole.total
