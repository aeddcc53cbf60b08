"""The parity matrix: every way to share the model and the batch out over processes trains the same model."""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.runs import Launched, RunResult, relative, weight_error

STEPS = 5
LENGTH = 64
TOLERANCE = 1e-5
# windows 7, 22, 37, 52, 64; rows whose trained tokens differ in number, so that means of means would show
COMMON = f"--seq-length {LENGTH} --lr-warmup-iters 2 --document-mask --eod-mask-loss".split()
COMMON += f"--attention-health-interval 2 --attention-health-queries 50 --train-iters {STEPS}".split()
COMMON += f"--eval-interval {STEPS} --eval-iters 1 --eval-lengths 7 {LENGTH}".split()
LINEAR = ["--window-schedule", "linear", "--window-start", "7", "--window-rate", "15"]
CONSTANT = ["--window-schedule", "constant"]


@dataclass(frozen=True)
class Layout:
    flags: str
    processes: int
    model: str = ""


# models, for the other modules of this folder too
TIED = "--no-untie-embeddings-and-output-weights"
YARN = "--rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 16"
GEMMA3 = "--block gemma3 --local-window 20 --window-attn-skip-freq 2 --rotary-base-local 300"
OLMO3 = f"--block olmo3 --local-window 20 --window-attn-skip-freq 4 --rotary-base-local 300 {YARN}"
PHI = "--block phi --rotary-percent 0.5"
QWEN3 = "--qk-layernorm --kv-channels 24"
MIXTRAL = "--num-experts 4 --moe-ffn-hidden-size 96 --moe-aux-loss-coeff 0.1"
QWEN3_MOE = f"{QWEN3} --num-experts 6 --moe-router-topk 3 --moe-ffn-hidden-size 40 --moe-aux-loss-coeff 0.1"
SIGMOID = """--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 40 --moe-aux-loss-coeff 0.1
    --moe-shared-expert-intermediate-size 80 --moe-layer-freq 0 1 1 1 --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4 --moe-router-group-topk 2
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"""  # DeepSeek-V3's experts
DOTS1 = f"{QWEN3} {SIGMOID}"
DENSE_STAGE = DOTS1.replace("--moe-layer-freq 0 1 1 1", "--moe-layer-freq 0 0 1 1")
LATENT = """--multi-latent-attention --num-query-groups 4 --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 16
    --qk-pos-emb-head-dim 12 --v-head-dim 18"""
DEEPSEEK = f"{LATENT} {SIGMOID} {YARN} --rope-mscale-all-dim 0.7"
SINKS = "--softmax-type learnable"
GPT_OSS = f"--block gpt_oss {MIXTRAL} --local-window 20 --window-attn-skip-freq 2"
TP2 = "--tensor-model-parallel-size 2"
TP2_SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
EXCHANGE, ULYSSES = f"{CP2} --cp-scheme exchange", f"{CP2} --cp-scheme ulysses"
VPP2 = PP2 + " --num-layers-per-virtual-pipeline-stage 1"
UNEVEN, UNEVEN_VPP2 = (f"{PP2} --pipeline-model-parallel-layout {stages}" for stages in ("Ettt|tL", "E|tt|tt|L"))
DISTRIBUTED = "--use-distributed-optimizer"
WEIGHTED = "--token-weighting unfrozen --short-context 16 --weight-strength 0.5"
OVERLAPS = DISTRIBUTED + " --overlap-grad-reduce --overlap-param-gather"
MODULES = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full"

FAST = {
    "pp2 vpp2": Layout(VPP2, 2),
    "dp2 distributed overlaps": Layout(OVERLAPS, 2),
    "mlp blocks recompute modules tp2 sp": Layout(f"{TP2_SP} --mlp-block-tokens 50 {MODULES} core_attn layernorm", 2),
    "dp2 balanced batches": Layout("--balance-batches", 2),
    "olmo3 tp2 sp": Layout(TP2_SP, 2, OLMO3),
    "gpt-oss cp2 ep2": Layout(f"{EXCHANGE} {EP2}", 2, GPT_OSS),
    "deepseek cp2 ep2 token weights": Layout(f"{EXCHANGE} {EP2}", 2, f"{DEEPSEEK} {WEIGHTED}"),
}
# What test_random_combinations.py does not draw, or not together; each with as many options as one run can show.
SLOW = {
    # the output matrix of the last stage in a bucket of its own: nothing but its own layer awaits its gather
    "tied pp2 distributed overlaps": Layout(f"{PP2} {OVERLAPS}", 2, TIED),
    "tied stages of 3 and 1 tp2 sp distributed overlaps": Layout(f"{TP2_SP} {UNEVEN} {OVERLAPS}", 4, TIED),
    "token weights uneven vpp2 tp2 sp recompute full": Layout(f"{TP2_SP} {UNEVEN_VPP2} {FULL}", 4, WEIGHTED),
    "deepseek uneven vpp2 distributed overlaps": Layout(f"{UNEVEN_VPP2} {OVERLAPS}", 4, DEEPSEEK),
    "tp2 sp dp2 distributed overlaps": Layout(f"{TP2_SP} {OVERLAPS}", 4),
    "token weights tp2 sp pp2 vpp2": Layout(f"{TP2_SP} {VPP2}", 4, WEIGHTED),
    "mlp blocks recompute full": Layout(f"--mlp-block-tokens 50 {FULL}", 1),
    "olmo3 compile tp2 sp distributed overlaps": Layout(f"{TP2_SP} {OVERLAPS} --compile", 4, OLMO3),
    "phi tp2 sp recompute mlp": Layout(f"{TP2_SP} {MODULES} core_attn mlp", 2, PHI),
    "phi mlp blocks pp2 vpp2 distributed overlaps": Layout(f"--mlp-block-tokens 50 {VPP2} {OVERLAPS}", 2, PHI),
    "gemma3 recompute full tp2 sp cp2": Layout(f"{TP2_SP} {CP2} {FULL}", 4, GEMMA3),
    "cp2 ulysses with copies of one key head": Layout(ULYSSES, 2, "--num-query-groups 1"),
    "latent cp2 ulysses recompute modules": Layout(f"{ULYSSES} {MODULES} core_attn", 2, LATENT),
    "latent recompute full tp2 sp cp2": Layout(f"{TP2_SP} {EXCHANGE} {FULL}", 4, LATENT),
    "deepseek pp2 distributed overlaps": Layout(f"{PP2} {OVERLAPS}", 4, DEEPSEEK),
    "olmo3 recompute full pp2 distributed overlaps": Layout(f"{PP2} {OVERLAPS} {FULL}", 2, OLMO3),
    "a stage without layers": Layout(f"{PP2} --pipeline-model-parallel-layout E|ttttL", 2),
    "attention sinks tp2 sp": Layout(TP2_SP, 2, SINKS),
    "gpt-oss pp2 distributed overlaps": Layout(f"{PP2} {OVERLAPS}", 4, GPT_OSS),
    "gpt-oss cp2 ep2 ulysses recompute modules": Layout(f"{ULYSSES} {EP2} {MODULES} core_attn mlp", 2, GPT_OSS),
    "mixtral ep4 distributed overlaps micro-batch 1": Layout(f"{EP4} {OVERLAPS} --micro-batch-size 1", 4, MIXTRAL),
    "qwen3-moe dp2 cp2 ep2 distributed": Layout(f"{CP2} {EP2} {DISTRIBUTED}", 4, QWEN3_MOE),
    "dots1 dp2 distributed micro-batch 1": Layout(f"{OVERLAPS} --micro-batch-size 1", 2, DOTS1),
    "dots1 pp2 vpp2 recompute modules": Layout(f"{VPP2} {MODULES} core_attn layernorm mlp", 2, DOTS1),
    "dots1 pp2 ep2 recompute modules": Layout(f"{PP2} {EP2} {MODULES} core_attn layernorm mlp", 4, DENSE_STAGE),
    "dots1 tp2 sp ep2 token weights": Layout(f"{TP2_SP} {EP2}", 4, f"{DOTS1} {WEIGHTED}"),
    # ranks that share experts have different numbers of short contexts
    "qwen3-moe token weights ep2 balanced batches": Layout(f"{EP2} --balance-batches", 2, f"{QWEN3_MOE} {WEIGHTED}"),
}


def trained(launched: Launched, layout: Layout, schedule: list[str] = LINEAR) -> RunResult:
    return launched([*COMMON, *schedule, *layout.model.split(), *layout.flags.split()], layout.processes)


def assert_same_training(run: RunResult, reference: RunResult, layout: Layout) -> None:
    """Initial weights equal bit for bit; losses, norms, validation and final weights to 1e-5."""
    assert weight_error(run.weights("initial"), reference.weights("initial"))[0] == 0
    measured = [key for key in ("lm_loss", "train_loss", "grad_norm", "moe_aux_loss") if key in reference.metrics[0]]
    errors = {key: relative(run.series(key), reference.series(key)) for key in measured}
    errors["weights"], worst = weight_error(run.weights("final"), reference.weights("final"))
    validations = ([list(record["by_length"].values()) for record in result.evaluations] for result in (run, reference))
    errors["validation"] = relative(*validations)
    print(", ".join(f"{key} {error:.1e}" for key, error in errors.items()), worst)
    for key in ("step", "consumed_samples", "window", "segments", "effective_context", "denominator", "learning_rate"):
        assert run.series(key) == reference.series(key), key
    if not {"--micro-batch-size", "--balance-batches"} & set(layout.flags.split()):  # others have another first one
        assert_same_attention(run, reference)
    # rounding doubles: unfrozen weights are differences of losses, gradients of sinks are sums of terms that cancel
    doubled = "weight_std" in run.metrics[0] or layout.model == SINKS
    assert max(errors.values()) <= (2 * TOLERANCE if doubled else TOLERANCE), (errors, worst)


def assert_same_attention(run: RunResult, reference: RunResult) -> None:
    """Compare the first micro-batch of every other step, layer by layer; a sink is a matter of a limit."""
    measured = [record for record in run.metrics if "attention_entropy" in record]
    expected_records = [record for record in reference.metrics if "attention_entropy" in record]
    assert [record["step"] for record in measured] == [0, 2, 4]
    for actual, expected in zip(measured, expected_records, strict=True):
        for name in ("entropy", "s_max", "s_max_scaled", "distance"):
            assert relative(actual[f"attention_{name}"], expected[f"attention_{name}"]) <= TOLERANCE, name
        for name in ("sink_share", "sink_pairs"):
            assert actual[f"attention_{name}"] == pytest.approx(expected[f"attention_{name}"], abs=1e-2), name


def assert_same_rows(run: RunResult, reference: RunResult) -> None:
    """Each step consumed the very same tokens, document ends and loss mask, in the same order, weighed alike."""
    steps = sorted(file.name for file in reference.trajectory.glob("step_*.npz"))
    assert sorted(file.name for file in run.trajectory.glob("step_*.npz")) == steps
    assert len(steps) == STEPS
    for name in steps:
        actual, expected = np.load(run.trajectory / name), np.load(reference.trajectory / name)
        for key in expected:
            rounding = 1e-4 if key in ("weights", "short_loss") else 0.0  # made of losses
            if key == "weights":  # also of each other, in a row: those of one token are up to 30
                rounding = max(rounding, 1e-5 * float(expected[key].max()))
            np.testing.assert_allclose(actual[key], expected[key], rtol=0, atol=rounding, err_msg=f"{name}: {key}")


def assert_window_is_used(run: RunResult) -> None:
    """A wrong window would show: before or after training, as the losses of random weights may agree by chance."""
    short, long = ([record["by_length"][length] for record in run.evaluations] for length in ("7", str(LENGTH)))
    assert relative(short, long) > 10 * TOLERANCE


def test_the_references_differ_by_the_window_alone(launched: Launched) -> None:
    """The same rows and weights give other losses and gradients under another window, from the first step on."""
    linear, constant = (trained(launched, Layout("", 1), schedule) for schedule in (LINEAR, CONSTANT))
    assert linear.series("window") == [7, 22, 37, 52, 64]
    assert constant.series("window") == [64] * STEPS
    assert weight_error(linear.weights("initial"), constant.weights("initial"))[0] == 0
    assert linear.series("learning_rate") == constant.series("learning_rate")
    for step in range(STEPS):
        linear_rows, constant_rows = (np.load(run.trajectory / f"step_{step:06d}.npz") for run in (linear, constant))
        np.testing.assert_array_equal(linear_rows["tokens"], constant_rows["tokens"])
    for key in ("lm_loss", "grad_norm"):
        assert relative(linear.series(key)[:1], constant.series(key)[:1]) > 10 * TOLERANCE, key
    assert len(set(linear.series("denominator"))) > 1


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_layout_trains_the_same_model(launched: Launched, name: str) -> None:
    layout = (FAST | SLOW)[name]
    run = trained(launched, layout)
    reference = trained(launched, Layout("", 1, layout.model))
    assert_same_rows(run, reference)
    assert_same_training(run, reference, layout)
    assert_window_is_used(run)
    assert (sum(run.series("cp_bytes")) > 0) == (CP2 in layout.flags)
