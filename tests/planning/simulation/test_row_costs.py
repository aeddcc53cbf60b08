"""A step's rows cost what the trainer's own batches ask: the same rows, the same plan, pairs and received keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_ext.batch import assemble, lay_end_to_end
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, WindowConfig
from megatron_ext.planning.simulation.rows import context_options, row_costs
from megatron_ext.run.rehearsal.rows import invented

LENGTH, WINDOW = 16_384, 2_048


def config_of(cp: int, micro: int = 1, **options: object) -> Config:
    return Config(
        model=ModelConfig(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=4),
        parallel=ParallelConfig(context_parallel_size=cp, **options),  # type: ignore[arg-type]
        data=DataConfig(data_path=("none",), seq_length=LENGTH, global_batch_size=8, micro_batch_size=micro),
        window=WindowConfig(document_mask=True),
    )


def ends_of(sample: int) -> np.ndarray:
    return np.asarray(invented(config_of(1), 100, whole=False)(sample).document_ends)


@pytest.mark.parametrize("scheme", ["exchange", "ulysses"])
@pytest.mark.parametrize(("cp", "micro", "window"), [(2, 1, LENGTH), (4, 2, LENGTH), (4, 1, WINDOW)])
def test_ranks_compute_and_receive_what_the_trainer_gives_them(cp: int, micro: int, window: int, scheme: str) -> None:
    config, world = config_of(cp, micro, cp_scheme=scheme), 2 * cp
    found = row_costs(config, world, ends_of, step=3, window=window, most_rows=99)
    rows = invented(config, 100, whole=False)
    options, context = config.mask_options(), context_options(config)
    for number in range(8 // micro // 2):
        for replica in range(2):
            first = 3 * 8 + (number * 2 + replica) * micro  # as BatchMaker deals samples out
            group = [rows(first + place) for place in range(micro)]
            masks = options.at(LENGTH, [row.document_ends for row in group], window)
            for rank in range(cp):
                own = replace(context, group=replace(context.group, rank=rank))
                call = assemble(lay_end_to_end(group), masks, own).attention
                tokens = micro * LENGTH // cp
                if scheme == "ulysses":
                    assert found.context[number, replica, rank] == pytest.approx(
                        masks.scheduled.layout.attention_pairs() / (cp * tokens)
                    )
                    # queries, keys, values and outputs of a part of the heads, against keys and values of all
                    expected = (cp - 1) / cp * (4 + 4) / 4 / (cp - 1)
                    assert found.exchanged[number, replica, rank] == pytest.approx(expected)
                    continue
                queries, keys = np.diff(call.cu_seqlens_q).astype(int), np.diff(call.cu_seqlens_kv).astype(int)
                pairs = (queries * keys - queries * (queries - 1) // 2).sum()
                assert found.context[number, replica, rank] == pytest.approx(pairs / tokens)
                received = context.plans(masks)[0].rank(rank).receive
                assert found.exchanged[number, replica, rank] == pytest.approx(
                    sum(map(len, received)) / (tokens * (cp - 1))
                )


def test_without_context_parallelism_nothing_is_received() -> None:
    found = row_costs(config_of(1), 4, ends_of, step=0, window=WINDOW, most_rows=99)
    assert found.context.shape == (2, 4, 1)
    assert not found.exchanged.any()
    assert 1 < found.context.min() < found.context.max() <= (WINDOW + 1) / 2


def test_local_layers_count_as_many_as_they_are() -> None:
    config = config_of(2)
    config = replace(config, model=replace(config.model, local_window=128, window_attn_skip_freq=4))
    found = row_costs(config, 2, ends_of, step=0, window=LENGTH, most_rows=99)
    masks = config.mask_options().at(LENGTH, [ends_of(0)], LENGTH)
    assert sum(masks.is_local) == 3
    mean = (masks.context_sum / masks.layers + LENGTH) / 2 / LENGTH  # 2 pairs - T, of each layer
    assert found.context[0, 0].mean() == pytest.approx(mean)


def test_balanced_batches_are_dealt_as_the_trainer_deals_them() -> None:
    config = config_of(1)
    plain = row_costs(config, 2, ends_of, step=0, window=LENGTH, most_rows=99).context.sum(axis=(0, 2))
    balanced = replace(config, data=replace(config.data, balance_batches=True))
    dealt = row_costs(balanced, 2, ends_of, step=0, window=LENGTH, most_rows=99).context.sum(axis=(0, 2))
    assert dealt.sum() == pytest.approx(plain.sum())
    assert np.ptp(dealt) < np.ptp(plain)


def test_a_large_batch_is_drawn_from_a_part_of_its_rows_always_the_same() -> None:
    asked: list[int] = []

    def noted(sample: int) -> np.ndarray:
        asked.append(sample)
        return ends_of(sample)

    first = row_costs(config_of(1), 1, noted, step=5, window=LENGTH, most_rows=3)
    assert asked == [40, 41, 42]
    assert len(np.unique(first.context)) == 3
    again = row_costs(config_of(1), 1, noted, step=5, window=LENGTH, most_rows=3)
    assert np.array_equal(first.context, again.context)
