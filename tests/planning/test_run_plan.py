"""The derived numbers of a run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.checkpoint.parameters import count_parameters
from megatron_ext.config.arguments import parse
from megatron_ext.masks import MaskOptions
from megatron_ext.planning.flops import run_flops
from megatron_ext.planning.memory import estimate
from megatron_ext.planning.run_plan import describe

RUN = "--model-preset 1B --data-path x --seq-length 8192 --global-batch-size 128 --train-iters 1000 --lr 1e-3"


@settings(max_examples=150)
@given(
    length=st.integers(1, 90),
    window=st.integers(1, 90),
    mask=st.sampled_from(["grid", "sliding", "sliding_w"]),
    local=st.none() | st.integers(1, 100),
    every=st.none() | st.integers(2, 6),
    fixed=st.booleans(),
)
def test_the_closed_form_is_what_the_masks_count(
    length: int, window: int, mask: str, local: int | None, every: int | None, fixed: bool
) -> None:
    options = MaskOptions(False, mask, local, every if local else None, 6, fixed)  # type: ignore[arg-type]
    masks = options.at(length, [np.empty(0, dtype=np.int64)], min(window, length))
    context = options.whole_row_context(length, min(window, length))
    assert context == pytest.approx(masks.context_sum / (len(masks.is_local_layer) * length), rel=1e-12)


def test_scoring_is_a_third_of_what_its_tokens_would_cost_in_training() -> None:
    weights = "--window-schedule constant --token-weighting unfrozen --short-context 2048 --short-stride 1536"
    config = parse(f"{RUN} {weights}".split())
    flops = run_flops(config, 32000)
    rows = "--window-schedule constant --seq-length 2048 --global-batch-size 512"
    trained = parse(f"{RUN} {rows}".split())
    assert flops.scoring == pytest.approx(run_flops(trained, 32000).scheduled / 3, rel=1e-12)  # 4 chunks of 2048


def test_the_plan() -> None:
    flags = "--window-schedule linear --window-start 32 --window-rate 16 --lr-warmup-iters 100 --micro-batch-size 2"
    text = "\n".join(describe(parse(f"{RUN} {flags} --tensor-model-parallel-size 2".split()), 16, 32000))
    assert "parameters       1,100,048,384" in text
    assert "1,048,576,000 in 1,000 steps" in text
    steps = [line.replace(",", "").split() for line in text.splitlines() if line.startswith("  step")]
    assert {int(words[1]): int(words[3]) for words in steps} == {
        0: 32, 100: 1632, 250: 4032, 500: 8032, 510: 8192, 749: 8192, 999: 8192,
    }  # fmt: skip
    assert max(float(words[6]) for words in steps) == 1e-3
    assert "16: TP 2 x PP 1 x CP 1 x DP 8" in text
    assert "128 rows of 8,192; 8 micro-batches of 2 on each of 8 replicas" in text
    assert "full from step 510 on" in text
    assert "rotary base" not in text


def test_the_plan_of_experts() -> None:
    """Weights of a rank's experts alone; FLOPs of a token's alone."""
    flags = "--vocab-size 32000 --seq-length 4096 --global-batch-size 64 --bf16 --window-start 4096 --data-path x"
    flags += " --model-preset Mixtral-8x7B --use-distributed-optimizer"
    configs = {ep: parse(f"{flags} --expert-model-parallel-size {ep}".split()) for ep in (1, 8)}
    expert_parameters = 32 * 8 * 3 * 4096 * 14336
    dense_parameters = 46_702_792_704 - 32 * 8 * 3 * 4096 * 14336
    for ep, config in configs.items():
        assert count_parameters(config.model, 32000) == expert_parameters + dense_parameters
        memory = estimate(config, 8, 32000)
        assert memory.weights == 2 * (dense_parameters + expert_parameters // ep)
        assert (
            memory.optimizer == 12 * (dense_parameters + expert_parameters) // 8
        )  # shared out over all ranks either way
        met = dense_parameters + expert_parameters // 4
        attention = 12 * 32 * 4096 * 4096
        assert run_flops(config, 32000).scheduled == pytest.approx(64 * 4096 * 100 * (6 * met + attention), rel=1e-12)
    text = "\n".join(describe(configs[8], 8, 32000))
    assert f"of which a token meets {dense_parameters + expert_parameters // 4:,}" in text
    assert "DP 8, experts over 8" in text
