"""The FLOPs of SkyLadder's Table 8."""

from collections import Counter

import pytest

from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError
from megatron_ext.planning import training_flops
from megatron_ext.schedule import ScheduleKind, build_schedule


def test_against_the_formula_step_by_step():
    model = ModelConfig(num_layers=3, hidden_size=64, vocab_size=512)
    schedule = build_schedule("linear", start=3, end=100, rate=7)
    parameters = 2 * 512 * 64 + 64 + 3 * (2 * 64 + 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 384)
    expected = 0.0
    for step in range(20):
        window = schedule.window_at(step)
        blocks = [window] * (100 // window) + [100 % window]
        context = sum(block * block for block in blocks) / 100
        expected += 1000 * (6 * parameters + 12 * 3 * 64 * context)
    assert training_flops(model, schedule, 100, steps=20, tokens_per_step=1000) == pytest.approx(expected)
    with pytest.raises(UserError, match=r"model: got '1b', needs one of 120M, .*1B"):
        training_flops("1b", schedule, 64, 1, 64)
    with pytest.raises(UserError, match=r"vocab_size: got nothing"):
        training_flops(ModelConfig(), schedule, 64, 1, 64)


def test_long_runs_and_short_ones_are_summed_alike() -> None:
    model = ModelConfig(vocab_size=512)
    steps = 3000
    for kind in ScheduleKind:
        cycles = 1.5 if kind is ScheduleKind.CYCLIC_GRADUAL else 2
        schedule = build_schedule(kind, start=5, end=300, rate=0.29, round_to=16, cycles=cycles, switch_step=7)
        alone = Counter(min(schedule.window_at(step), 200) for step in range(steps))
        of_one = {window: build_schedule("constant", start=window, end=window) for window in alone}
        expected = sum(count * training_flops(model, of_one[window], 200, 1, 99) for window, count in alone.items())
        assert training_flops(model, schedule, 200, steps, 99) == expected


def test_attention_counts_its_heads_not_the_hidden_size():
    """Heads twice as wide: twice the pairs' work, and the matrices of queries, keys, values and outputs."""
    schedule = build_schedule("constant", end=64)
    plain, wide = (ModelConfig(hidden_size=64, kv_channels=size, vocab_size=512) for size in (16, 32))
    flops = [training_flops(model, schedule, 64, steps=1, tokens_per_step=1) for model in (plain, wide)]
    matrices = 4 * 64 * 16 * (4 + 2 * 2 + 4)  # 4 layers; 4 heads and 2 groups of keys and of values
    assert flops[1] - flops[0] == pytest.approx(6 * matrices + 12 * 4 * 64 * 64)


def test_latent_attention_counts_scores_and_values_apart():
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_head_dim": 16, "qk_pos_emb_head_dim": 12, "v_head_dim": 18}
    sizes |= {"num_layers": 3, "hidden_size": 64, "num_query_groups": 4, "vocab_size": 512}
    model = ModelConfig(multi_latent_attention=True, **sizes)
    queries = 64 * 24 + 24 + 24 * 4 * 28
    keys_and_values = 64 * (20 + 12) + 20 + 20 * 4 * (16 + 18)
    layer = queries + keys_and_values + 4 * 18 * 64 + 2 * 64 + 3 * 64 * 384
    flops = training_flops(model, build_schedule("constant", end=100), 100, steps=1, tokens_per_step=1000)
    parameters = 2 * 512 * 64 + 64 + 3 * layer
    assert flops == pytest.approx(1000 * (6 * parameters + 3 * 3 * 4 * (2 * 28 + 2 * 18) * 100))
