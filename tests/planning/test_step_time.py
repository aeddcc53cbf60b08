"""The time model: formulas that any such model must satisfy, of dense models and of mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_work import rank_work

from megatron_ext.config import ModelConfig
from megatron_ext.config.presets import PRESETS
from megatron_ext.errors import UserError
from megatron_ext.planning.step_time import FACTS, Work, read_speeds, step_time

LLAMA = ModelConfig(**PRESETS["Llama-3-8B"])
MIXTURE = ModelConfig(**PRESETS["Qwen3-30B-A3B"])
MOONLIGHT = ModelConfig(**PRESETS["Moonlight-16B-A3B"])
SPEEDS = read_speeds()
WORK = Work(model=LLAMA, gpu="H100", world=64, row=131072, rows=64, tp=4, cp=4)
windows = st.integers(1, 131072)


def at_window(work: Work, window: int) -> Work:
    """The same step under blocks of `window` tokens."""
    return replace(work, context=window, exchanged=window / work.row)


def seconds(work: Work) -> float:
    return step_time(work, SPEEDS).total


@given(windows, windows)
def test_a_wider_window_never_takes_less_time(one: int, other: int) -> None:
    narrow, wide = sorted((one, other))
    # tiles: just below a multiple of the tile the kernel computes as much, so compare windows a tile apart or more
    if wide - narrow >= 128:
        assert seconds(at_window(WORK, narrow)) <= seconds(at_window(WORK, wide)) * (1 + 1e-9)
        works = (at_window(WORK, window) for window in (narrow, wide))
        less, more = (rank_work(work, head=False).flops for work in works)
        assert less <= more * (1 + 1e-12)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_sharing_a_row_keeps_the_time_of_products(axis: str) -> None:
    alone = Work(model=LLAMA, gpu="H100", world=2, row=8192, rows=2)
    shared = replace(alone, **{axis: 2})
    assert step_time(shared, SPEEDS).products == pytest.approx(step_time(alone, SPEEDS).products)
    assert getattr(step_time(shared, SPEEDS), "tensor" if axis == "tp" else "context") > 0


def test_latent_attention_moves_the_narrower_row() -> None:
    """A latent of 512 + 64, or keys and values of 192 + 128 for each head; each rank expands the latents it gets."""
    for tp, width, expanded in ((1, 576, 512 * 16 * 256), (8, 576, 512 * 2 * 256), (16, 320, 0)):
        works = [Work(model=MOONLIGHT, gpu="H100", world=tp * cp, row=8192 * cp, tp=tp, cp=cp) for cp in (1, 4)]
        alone, shared = (rank_work(work, head=False) for work in works)
        assert shared.context_bytes == pytest.approx(27 * 2 * 2 * width * 3 * 8192)
        pairs = 27 * 3.5 * (4 - 1) * 8192 * 8192 * 16 * (192 + 128) / tp
        assert shared.flops - alone.flops == pytest.approx(pairs + 27 * 3 * 2 * expanded * 3 * 8192)


def test_the_bubble_is_the_idle_share_of_the_schedule() -> None:
    work = replace(WORK, pp=4, cp=1, rows=64)
    time = step_time(work, SPEEDS)
    busy = time.total - time.bubble - time.data - time.optimizer
    assert time.bubble == pytest.approx(busy * 3 / work.microbatches)
    assert step_time(replace(work, chunks=2), SPEEDS).bubble == pytest.approx(time.bubble / 2)


def test_wrong_gpus_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gpu: got 'H300', needs one of A100-40GB, .*; add it to "):
        SPEEDS.gpu("H300")
    path = tmp_path / "gpus.yaml"
    path.write_text((FACTS / "gpus.yaml").read_text().replace("fp8_speedup: 1.9", "fp8_speedup: -1"))
    with pytest.raises(UserError, match=r"gpus.yaml: fp8_speedup: .*greater than 0"):
        read_speeds(path)


def test_recomputed_parts_add_up_to_less_than_the_layer() -> None:
    plain, whole = step_time(WORK, SPEEDS), step_time(replace(WORK, recompute=1.0), SPEEDS)
    assert whole.products == pytest.approx(plain.products * 4 / 3)
    parts = {
        modules: step_time(replace(WORK, recompute_modules=modules), SPEEDS)
        for modules in (("core_attn",), ("layernorm",), ("mlp",))
    }
    assert parts["core_attn",].attention == pytest.approx(plain.attention * 4.5 / 3.5)
    assert parts["core_attn",].products == plain.products
    mlp, attention = 3 * 4096 * 14336, 2 * 4096 * 128 * (32 + 8)
    assert parts["mlp",].products == pytest.approx(plain.products * (3 + mlp / (mlp + attention)) / 3)
    assert parts["layernorm",].total == pytest.approx(plain.total + parts["layernorm",].memory - plain.memory, rel=1e-3)
    assert all(plain.total < part.total < whole.total for part in parts.values())
    half = step_time(replace(WORK, recompute=0.5), SPEEDS)
    assert half.products == pytest.approx((plain.products + whole.products) / 2)


def test_copies_to_the_host_take_what_layers_do_not_hide() -> None:
    full = replace(WORK, recompute=1.0)
    assert step_time(replace(full, host_inputs=1.0), SPEEDS) == step_time(full, SPEEDS)  # a layer takes longer
    slow = replace(SPEEDS, gpus=SPEEDS.gpus | {"H100": replace(SPEEDS.gpu("H100"), pcie=0.1)})
    copied = 32 * 2 * (2 * 4096 * 131072 / 4 / 4) / (0.1e9 * SPEEDS.bandwidth)  # both ways
    times = step_time(full, slow)
    layers = times.products + times.attention + times.memory + times.tensor + times.context
    exposed = step_time(replace(full, host_inputs=1.0), slow).host
    assert exposed == pytest.approx(full.microbatches * copied - layers)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_the_flops_of_segments_are_the_sum_of_their_own(lengths: list[int]) -> None:
    """Segments laid end to end cost as much as each in a row of its own."""
    row = sum(lengths)

    def flops(tokens: int, context: float) -> float:
        return rank_work(Work(model=LLAMA, gpu="H100", world=1, row=tokens, context=context), head=True).flops

    together = flops(row, sum(length * length for length in lengths) / row)
    assert together == pytest.approx(sum(flops(length, length) for length in lengths))


@pytest.mark.parametrize("modules", [(), ("mlp",), ("mlp", "layernorm")])
def test_experts_that_all_tokens_use_take_no_less_than_one_mlp_as_wide(modules: tuple[str, ...]) -> None:
    dense = replace(WORK, recompute_modules=modules)
    model = replace(LLAMA, moe_ffn_hidden_size=LLAMA.ffn_hidden_size // 4, num_experts=4, moe_router_topk=4)
    mixture = replace(dense, model=model, ep=2)
    one, other = step_time(dense, SPEEDS), step_time(mixture, SPEEDS)
    assert other.products > one.products  # the router in addition
    assert other.memory > one.memory
    assert other.total > one.total
    assert rank_work(mixture, head=True).flops > rank_work(dense, head=True).flops


@pytest.mark.parametrize("modules", [(), ("mlp",)])
def test_the_work_of_a_mixture_with_other_layers_is_the_mean(modules: tuple[str, ...]) -> None:
    """Shared experts are an MLP for every token, as is that of a layer without experts."""
    layers = LLAMA.num_layers
    routed = replace(LLAMA, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=512)
    shared = replace(routed, moe_shared_expert_intermediate_size=LLAMA.ffn_hidden_size)
    some = replace(shared, moe_layer_freq=(0, 1) * (layers // 2))
    of = {
        name: vars(rank_work(replace(WORK, model=model, ep=2, recompute_modules=modules), head=True))
        for name, model in {"dense": LLAMA, "routed": routed, "shared": shared, "some": some}.items()
    }
    for part in of["dense"]:
        assert of["some"][part] == pytest.approx((of["dense"][part] + of["shared"][part]) / 2)
    tokens, again = WORK.micro * WORK.row / WORK.cp * WORK.microbatches, 4 if modules else 3
    mlp = 2 * 3 * LLAMA.hidden_size * LLAMA.ffn_hidden_size * tokens / WORK.tp * layers / WORK.pp
    assert of["shared"]["flops"] - of["routed"]["flops"] == pytest.approx(again * mlp)
    assert of["shared"]["tensor_bytes"] >= of["routed"]["tensor_bytes"]


@pytest.mark.parametrize(("tp", "ep", "nvlink"), [(1, 8, True), (2, 4, True), (2, 8, False), (1, 32, False)])
def test_tokens_travel_to_their_experts_and_back(tp: int, ep: int, nvlink: bool) -> None:
    work = Work(model=MIXTURE, gpu="H100", world=64, row=8192, tp=tp, ep=ep)
    copies = 8 * 8192 // tp * (ep - 1) // ep  # those that leave the rank
    there_and_back = 2 * copies * 2048 * 2
    assert rank_work(work, head=False).expert_bytes == 48 * 2 * there_and_back  # forward and backward
    gpu = SPEEDS.gpu("H100")
    link = (gpu.nvlink if nvlink else gpu.network) * 1e9 * SPEEDS.links
    # each tensor-parallel rank has a part of the tokens, and gathers the copies of the others' for its part of F
    gathered = 2 * 8 * 8192 * (tp - 1) // tp * 2048 * 2 / (gpu.nvlink * 1e9 * SPEEDS.links)
    expected = SPEEDS.uneven_experts * 48 * 2 * (there_and_back / link + gathered)
    assert step_time(work, SPEEDS).experts == pytest.approx(expected)
    again = step_time(replace(work, recompute_modules=("mlp",)), SPEEDS)
    assert again.experts == pytest.approx(expected * 1.5)
