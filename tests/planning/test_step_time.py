"""The time model: formulas that any such model must satisfy, of dense models and of mixtures of experts."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.config import Config
from megatron_ext.config.arguments import parse
from megatron_ext.errors import UserError
from megatron_ext.planning.sampled_rows import AttentionLoad
from megatron_ext.planning.step_time import FACTS, Machine, Speeds, StepTime, orthogonalization, read_speeds, step_time
from tests.planning.ranks import RankWork, rank_work

SPEEDS = read_speeds()
VOCABULARY = 128256
WORK = "--model-preset Llama-3-8B --seq-length 131072 --global-batch-size 64"
SPLIT = f"{WORK} --tensor-model-parallel-size 4 --context-parallel-size 4"
FULL = f"{SPLIT} --recompute-granularity full"
AGAIN = "--recompute-granularity selective --recompute-modules"
windows = st.integers(1, 131072)


def config(flags: str) -> Config:
    return parse(flags.split())


def time(flags: str, gpus: int = 64, window: int | None = None, speeds: Speeds = SPEEDS) -> StepTime:
    run = config(flags)
    return step_time(run, window or run.data.seq_length, Machine(gpus, "H100", VOCABULARY, speeds))


def work(flags: str, gpus: int = 64, window: int | None = None, *, head: bool = False) -> RankWork:
    run = config(flags)
    load = Machine(gpus, "H100", VOCABULARY, SPEEDS).attention(run, window or run.data.seq_length)
    return rank_work(run, load, gpus, VOCABULARY, head=head)


@given(windows, windows)
def test_a_wider_window_never_takes_less_time(first_window: int, second_window: int) -> None:
    narrow, wide = sorted((first_window, second_window))
    # tiles: just below a multiple of the tile the kernel computes as much, and a last block may be narrower
    if wide >= 2 * narrow + 128:
        assert time(SPLIT, window=narrow).total <= time(SPLIT, window=wide).total * (1 + 1e-9)
        assert work(SPLIT, window=narrow).flops <= work(SPLIT, window=wide).flops * (1 + 1e-12)


@pytest.mark.parametrize("axis", ["tensor-model", "context"])
def test_sharing_a_row_keeps_the_time_of_products(axis: str) -> None:
    flags = "--model-preset Llama-3-8B --seq-length 8192 --global-batch-size 2"
    alone = time(flags, 2)
    shared = time(f"{flags} --{axis}-parallel-size 2", 2)
    assert shared.products == pytest.approx(alone.products)
    assert getattr(shared, "tensor" if axis == "tensor-model" else "context") > 0


def test_latent_attention_moves_the_narrower_row() -> None:
    """A latent of 512 + 64, or keys and values of 192 + 128 for each head; each rank expands the latents it gets."""
    for tp, width, expanded in ((1, 576, 512 * 16 * 256), (8, 576, 512 * 2 * 256), (16, 320, 0)):
        flags = f"--model-preset Moonlight-16B-A3B --global-batch-size 1 --tensor-model-parallel-size {tp}"
        alone = work(f"{flags} --seq-length 8192", tp)
        shared = work(f"{flags} --seq-length 32768 --context-parallel-size 4", 4 * tp)
        assert shared.context_bytes == pytest.approx(27 * 2 * 2 * width * 3 * 8192)
        pairs = 27 * 3.5 * (4 - 1) * 8192 * 8192 * 16 * (192 + 128) / tp
        assert shared.flops - alone.flops == pytest.approx(pairs + 27 * 3 * 2 * expanded * 3 * 8192)


def test_the_update_of_muon_is_products_of_whole_matrices() -> None:
    """Llama 3 8B: 5 iterations for queries, keys and values apart, output, both matrices of the MLP; experts once."""
    big = 4096
    small = 1024
    iterations = 5
    layer = 2 * 6 * big**3 + 2 * (4 * small**2 * big + 2 * small**3)
    layer += 2 * 2 * big**3 + 4 * big**2 * (2 * 14336 + 14336)
    whole = orthogonalization(config(f"{WORK} --optimizer muon"))
    assert whole == pytest.approx(32 * iterations * layer)
    for flags, share in (("--tensor-model-parallel-size 2", 1), ("--pipeline-model-parallel-size 2", 2)):
        assert orthogonalization(config(f"{WORK} --optimizer muon {flags}")) == pytest.approx(whole / share)
    adam, muon = (time(f"{WORK} --optimizer {name}") for name in ("adam", "muon"))
    assert replace(muon, optimizer=adam.optimizer) == adam
    assert muon.optimizer > whole / 1e15 + 63 * adam.optimizer  # state is not sharded


def test_the_bubble_is_the_idle_share_of_the_schedule() -> None:
    flags = f"{WORK} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4"
    whole = time(flags)
    busy = whole.total - whole.bubble - whole.data - whole.optimizer
    assert whole.bubble == pytest.approx(busy * 3 / 16)  # micro-batches on each of 4 replicas
    halves = time(f"{flags} --num-layers-per-virtual-pipeline-stage 4")
    assert halves.bubble == pytest.approx(whole.bubble / 2)


def test_the_slowest_pipeline_stage_sets_the_pace() -> None:
    flags = f"{WORK} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4"
    equal = time(flags)
    written_out, first = (
        time(f"{flags} --pipeline-model-parallel-layout {layout}")
        for layout in ("Et*8|(t*8|)*2t*8L", "Et*14|(t*6|)*2t*6L")
    )
    assert written_out == equal
    assert first.products == pytest.approx(equal.products * 14 / 8)
    assert (equal.head > 0, first.head) == (True, 0)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        *((other, None) for other in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GB200", "NVIDIA RTX A1000")),
    ],
)
def test_a_device_is_the_gpu_of_the_file_or_none(device: str, name: str | None) -> None:
    assert SPEEDS.of_device(device) is (None if name is None else SPEEDS.gpu(name))


def test_the_peak_is_that_of_the_products_type() -> None:
    assert SPEEDS.gpu("H100").peak_flops(fp8=True) == 2 * SPEEDS.gpu("H100").peak_flops(fp8=False) + 1e12
    assert SPEEDS.gpu("A100").peak_flops(fp8=True) == SPEEDS.gpu("A100").peak_flops(fp8=False) == 312e12


def test_wrong_gpus_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gpu: got 'H300', needs one of A100-40GB, .*; add it to "):
        SPEEDS.gpu("H300")
    path = tmp_path / "gpus.yaml"
    path.write_text((FACTS / "gpus.yaml").read_text().replace("fp8_speedup: 1.9", "fp8_speedup: -1"))
    with pytest.raises(UserError, match=r"gpus.yaml: fp8_speedup: got -1, needs more than 0"):
        read_speeds(path)


def test_recomputed_parts_add_up_to_less_than_the_layer() -> None:
    plain, whole = time(SPLIT), time(FULL)
    assert whole.products == pytest.approx(plain.products * 4 / 3)
    core, norms, mlp = (time(f"{SPLIT} {AGAIN} {module}") for module in ("core_attn", "layernorm", "mlp"))
    assert core.attention == pytest.approx(plain.attention * 4.5 / 3.5)
    assert core.products == plain.products
    width = 3 * 4096 * 14336
    attention = 2 * 4096 * 128 * (32 + 8)
    assert mlp.products == pytest.approx(plain.products * (3 + width / (width + attention)) / 3)
    assert norms.total == pytest.approx(plain.total + norms.memory - plain.memory, rel=1e-3)
    assert all(plain.total < part.total < whole.total for part in (core, norms, mlp))
    half = time(f"{FULL} --recompute-method block --recompute-num-layers 16")
    assert half.products == pytest.approx((plain.products + whole.products) / 2)


def test_copies_to_the_host_take_what_layers_do_not_hide() -> None:
    host = f"{FULL} --offload-layer-inputs"
    assert time(host) == time(FULL)  # a layer takes longer
    slow = replace(SPEEDS, gpus=SPEEDS.gpus | {"H100": replace(SPEEDS.gpu("H100"), pcie=0.1)})
    copied = 32 * 2 * (2 * 4096 * 131072 / 4 / 4) / (0.1e9 * SPEEDS.bandwidth)  # both ways
    times = time(FULL, speeds=slow)
    layers = times.products + times.attention + times.memory + times.tensor + times.context
    assert time(host, speeds=slow).host == pytest.approx(16 * copied - layers)  # 16 micro-batches


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_the_flops_of_segments_are_the_sum_of_their_own(lengths: list[int]) -> None:
    """Segments laid end to end cost as much as each in a row of its own."""
    row = sum(lengths)

    def flops(tokens: int, context: float) -> float:
        run = config(f"--model-preset Llama-3-8B --seq-length {tokens} --global-batch-size 1")
        return rank_work(run, AttentionLoad(context, 1.0), 1, VOCABULARY, head=True).flops

    together = flops(row, sum(length * length for length in lengths) / row)
    assert together == pytest.approx(sum(flops(length, length) for length in lengths))


@pytest.mark.parametrize("modules", ["", f"{AGAIN} mlp"])
def test_the_work_of_a_mixture_with_other_layers_is_the_mean(modules: str) -> None:
    """Shared experts are an MLP for every token, as in a layer without experts."""
    dense = f"{SPLIT} {modules}"
    routed = f"{dense} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --expert-model-parallel-size 2"
    shared = f"{routed} --moe-shared-expert-intermediate-size 14336"
    alternating = f"{shared} --moe-layer-freq {'0 1 ' * 16}"
    of_dense, of_routed, of_shared, of_alternating = (
        vars(work(flags, head=True)) for flags in (dense, routed, shared, alternating)
    )
    for part, value in of_alternating.items():
        assert value == pytest.approx((of_dense[part] + of_shared[part]) / 2)
    tokens = 131072 / 4 * 16
    again = 4 if modules else 3
    mlp = 2 * 3 * 4096 * 14336 * tokens / 4 * 32
    assert of_shared["flops"] - of_routed["flops"] == pytest.approx(again * mlp)
    assert of_shared["tensor_bytes"] >= of_routed["tensor_bytes"]


@pytest.mark.parametrize(("tp", "ep", "nvlink"), [(1, 8, True), (2, 4, True), (2, 8, False), (1, 32, False)])
def test_tokens_travel_to_their_experts_and_back(tp: int, ep: int, nvlink: bool) -> None:
    flags = f"--model-preset Qwen3-30B-A3B --seq-length 8192 --global-batch-size {64 // tp}"
    flags += f" --tensor-model-parallel-size {tp} --expert-model-parallel-size {ep}"
    copies = 8 * 8192 // tp * (ep - 1) // ep  # those that leave the rank
    there_and_back = 2 * copies * 2048 * 2
    assert work(flags).expert_bytes == 48 * 2 * there_and_back  # forward and backward
    gpu = SPEEDS.gpu("H100")
    link = (gpu.nvlink if nvlink else gpu.network) * 1e9 * SPEEDS.links
    # each tensor-parallel rank has a part of the tokens, and gathers the copies of the others' for its part of F
    gathered = 2 * 8 * 8192 * (tp - 1) // tp * 2048 * 2 / (gpu.nvlink * 1e9 * SPEEDS.links)
    expected = SPEEDS.uneven_experts * 48 * 2 * (there_and_back / link + gathered)
    assert time(flags).experts == pytest.approx(expected)
    assert time(f"{flags} {AGAIN} mlp").experts == pytest.approx(expected * 1.5)
