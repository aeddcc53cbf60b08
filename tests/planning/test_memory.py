"""The memory formula: shares of a layout, the fullest stage, what is not counted. Rehearsals check the bytes."""

from megatron_ext.checkpoint.parameters import count_parameters
from megatron_ext.config import Config
from megatron_ext.config.arguments import parse
from megatron_ext.config.checks import check
from megatron_ext.planning.memory import estimate, flash_backward_scratch, stage_memory, uncounted
from megatron_ext.planning.run_plan import describe
from tests.planning.ranks import fullest_stage

SHAPE = "--hidden-size 256 --ffn-hidden-size 768 --num-layers 4 --num-attention-heads 8 --num-query-groups 2"
BATCH = "--seq-length 512 --global-batch-size 4"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"


def config(flags: str) -> Config:
    return parse(f"--vocab-size 1000 {SHAPE} {BATCH} {flags}".split())


def stage_parameters(config: Config, vocab_size: int, stage: int) -> int:
    return stage_memory(config, 2, vocab_size, stage).weights // 4


def test_shares_add_up_to_the_model() -> None:
    """The sum is over stages and tensor-parallel ranks, but for norms, which every rank holds, and padding."""
    whole = config("")
    model_parameters = stage_parameters(whole, 1024, 0)
    assert model_parameters == count_parameters(whole.model, 1024)
    assert stage_parameters(whole, 1000, 0) == model_parameters  # 1000 token ids are padded to 1024
    split = config(PIPELINE)
    assert sum(stage_parameters(split, 1024, stage) for stage in (0, 1)) == model_parameters
    uneven = config(f"{PIPELINE} --pipeline-model-parallel-layout E|tt|t|tL")
    shares = [stage_parameters(uneven, 1024, stage) for stage in (0, 1)]
    assert sum(shares) == model_parameters
    layer = (model_parameters - 2 * 1024 * 256 - 256) // 4
    assert shares[1] - shares[0] == 2 * layer + 256
    assert "0+1 2+1 on the pipeline stages" in "\n".join(describe(uneven, 2, 1024))
    norms = (2 * 4 + 1) * 256
    assert 2 * stage_parameters(config(TENSOR), 1024, 0) == model_parameters + norms
    tied = config(f"{PIPELINE} --no-untie-embeddings-and-output-weights")
    assert (
        sum(stage_parameters(tied, 1024, stage) for stage in (0, 1)) == model_parameters
    )  # the copy on the last stage


def test_shares_of_a_mixture_add_up_to_the_model() -> None:
    """The model has shared experts, and one of the stages has layers without experts."""
    mixture = "--num-experts 4 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 64 --moe-layer-freq"
    whole = config(f"{mixture} 0 1 1 1")
    model_parameters = count_parameters(whole.model, 1024)
    assert stage_parameters(whole, 1024, 0) == model_parameters

    def stages(flags: str) -> list[int]:
        return [stage_parameters(config(f"{mixture} {flags}"), 1024, stage) for stage in (0, 1)]

    interleaved = f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"
    assert sum(stages(f"0 1 1 1 {PIPELINE}")) == model_parameters
    assert stages(f"0 1 1 1 {PIPELINE}") == stages(f"0 1 1 1 {interleaved}")
    counts = stages(f"0 1 0 1 {interleaved}")
    norm = 256  # the last one
    dense = 3 * 256 * 768
    experts = 4 * 256 + 4 * 3 * 256 * 128 + 3 * 256 * 64
    assert counts[1] - counts[0] == 2 * (experts - dense) + norm


def test_the_fullest_stage_is_the_first_but_for_a_large_vocabulary() -> None:
    many_batches = config(f"{PIPELINE} --bf16 --global-batch-size 64")
    first, last = (stage_memory(many_batches, 2, 1000, stage) for stage in (0, 1))
    handed = 2 * 512 * 256 * 2  # two micro-batches in flight, whose outputs the last stage has: t D e each
    assert first.activations == 2 * last.activations + handed
    assert (first.logits, last.logits > 0) == (0, True)
    assert estimate(many_batches, 2, 1000) == max(first, last, key=lambda memory: memory.total)
    assert estimate(many_batches, 2, 200_000).logits > 0
    assert fullest_stage(many_batches, 2, 200_000) == 1
    one_batch = config(f"{PIPELINE} --global-batch-size 1")  # there is only one micro-batch to be in flight
    first, last = (stage_memory(one_batch, 2, 1000, stage) for stage in (0, 1))
    assert first.activations == last.activations + 512 * 256 * 4


def test_models_with_experts_at_128k_fit_an_h100() -> None:
    for recipe, vocabulary in (("deepseek_v3/moonlight_16b_128k", 163840), ("qwen3/qwen3_30b_a3b_128k", 151936)):
        extended = parse(["--config", f"examples/configs/{recipe}.yaml"])
        check(extended, 64)
        assert estimate(extended, 64, vocabulary).total < 0.85 * 80 * 2**30


def test_the_smallest_window_is_estimated_too() -> None:
    """Flash attention's scratch grows with the number of segments: a first window of 8 may need most."""
    flags = "--bf16 --seq-length 8192 --ffn-hidden-size 256 --vocab-size 128 --window-schedule linear"
    starts = [f"{flags} --window-start {start} --window-end 8192" for start in (8, 4096)]
    small, large = (config(f"{start} --attention-backend torch_varlen") for start in starts)
    assert estimate(small, 1, 128) == stage_memory(small, 1, 128, 0, 8)
    assert estimate(small, 1, 128).layer > 3 * estimate(large, 1, 128).layer
    assert stage_memory(small, 1, 128, 0) == stage_memory(large, 1, 128, 0)  # the last window's
    # one segment all the same, of which a query sees 9 keys
    sliding = config(f"{starts[0]} --attention-backend torch_varlen --window-mask sliding")
    assert estimate(sliding, 1, 128) == estimate(large, 1, 128)


def test_what_is_not_counted_is_said() -> None:
    options = "--fp8-format hybrid --tp-comm-overlap --compile --use-precision-aware-optimizer"
    names = [line.partition(":")[0] for line in uncounted(config(f"--bf16 {options} --attention-backend reference"))]
    expected = ["attention_backend", "compile", "fp8_format", "tp_comm_overlap", "use_precision_aware_optimizer"]
    assert sorted(names) == expected
    assert list(uncounted(config("--bf16"))) == []
    assert any("compile: " in line for line in describe(config("--bf16 --compile"), 4, 1000))


def test_what_the_optimizer_keeps() -> None:
    """Bytes of a parameter: the master weight and two moments, in the types asked for, less what is on the host."""
    aware = "--bf16 --use-precision-aware-optimizer"
    plain = stage_memory(config(aware), 2, 1000, 0)
    assert plain == stage_memory(config("--bf16 --use-distributed-optimizer"), 2, 1000, 0)
    small = stage_memory(config(f"{aware} --main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype fp8 "
                                "--exp-avg-sq-dtype bf16"), 2, 1000, 0)  # fmt: skip
    assert (small.gradients, small.optimizer) == (plain.gradients // 2, -(-plain.optimizer * 5 // 12))
    for share, kept in ((1, 0), (0.75, 0.25)):
        flags = f"{aware} --optimizer-cpu-offload --optimizer-offload-fraction {share}"
        assert stage_memory(config(flags), 2, 1000, 0).optimizer == plain.optimizer * kept


def test_what_muon_keeps() -> None:
    """A momentum of each matrix, two moments of embedding, output matrix and norms, and all of it on each rank."""
    embeddings = 2 * 1024 * 256
    norms = (2 * 4 + 1) * 256
    for flags, master in (("", 0), ("--bf16", 4)):
        adam, muon = (stage_memory(config(f"{flags} --optimizer {name}"), 2, 1000, 0) for name in ("adam", "muon"))
        matrices = count_parameters(config("").model, 1024) - embeddings - norms
        assert muon.optimizer == (master + 4) * matrices + (master + 8) * (embeddings + norms)
        assert (muon.weights, muon.gradients) == (adam.weights, adam.gradients)


def test_scratch_of_a_known_case() -> None:
    """8B in rows of 128K, window 8, on one GPU (32 heads of 128): 128 (t / 8) rows more than the t that there are."""
    t, segments = 2**17, 2**14
    rows = t + 128 * segments
    assert flash_backward_scratch(t, t, segments, 32, 32, 128, 2) == 4 * rows * 32 * 129
    assert flash_backward_scratch(t, t, 1, 32, 8, 128, 2) == 4 * (t + 128) * 32 * 129 + 2 * t * 32 * 128 * 2
    assert flash_backward_scratch(t, t, 1, 4, 4, 80, 2) == 4 * (t + 128) * 4 * 97  # heads of 80 are padded to 96
