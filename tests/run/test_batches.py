"""The rows of each rank, as literal lists, and which of them a short-context pass scores."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from megatron_ext.batch import PackedBatch
from megatron_ext.config import Config, DataConfig, WeightingConfig
from megatron_ext.config.arguments import parse
from megatron_ext.data.row import TokenRow
from megatron_ext.engine.parallel import Ranks
from megatron_ext.run.batches import BatchMaker, row_seed

LENGTH = 8


def ranks(data: int = 0, data_size: int = 1) -> Ranks:
    """A process of a data-parallel run, without process groups."""
    kinds = ("tensor", "pipeline", "context", "expert")
    values: dict[str, Any] = dict.fromkeys(field.name for field in fields(Ranks))
    values |= dict.fromkeys(kinds, 0) | {f"{kind}_size": 1 for kind in kinds}
    values |= {"world": data, "world_size": data_size, "data": data, "data_size": data_size, "expert_copy": data}
    return Ranks(**values)


def row_at(sample: int) -> TokenRow:
    """Row s holds s, s, s, ...; every fourth is one document, the others are many."""
    ends = np.array([LENGTH]) if sample % 4 == 0 else np.arange(1, LENGTH + 1)
    return TokenRow(np.full(LENGTH + 1, sample), ends, np.ones(LENGTH, dtype=np.bool_))


def config(**data: bool | int) -> Config:
    return Config(data=DataConfig(seq_length=LENGTH, global_batch_size=8, **data))  # type: ignore[arg-type]


def samples_of(config: Config, rank: int) -> list[list[int]]:
    batches = BatchMaker(config, ranks(rank, 2), None).train(row_at, step=0, first_sample=16, window=LENGTH)
    return [batch.tokens_t.view(-1, LENGTH)[:, 0].tolist() for batch in batches.train]


def test_rows_are_distributed_in_order() -> None:
    """The global batch is the same eight rows in every layout."""
    assert samples_of(config(micro_batch_size=2), 0) == [[16, 17], [20, 21]]
    assert samples_of(config(micro_batch_size=2), 1) == [[18, 19], [22, 23]]


def test_balanced_ranks_share_the_expensive_rows() -> None:
    document_mask = replace(config(balance_batches=True).window, document_mask=True)
    balanced = replace(config(balance_batches=True), window=document_mask)
    assigned = [[sample for group in samples_of(balanced, rank) for sample in group] for rank in (0, 1)]
    assert sorted(assigned[0] + assigned[1]) == list(range(16, 24))
    assert [sum(sample % 4 == 0 for sample in samples) for samples in assigned] == [1, 1]


def test_only_the_tokens_of_its_own_rows_are_read() -> None:
    """Counts over the global batch come from outlines: its tokens would be terabytes an hour."""
    exposure = WeightingConfig(token_weighting="unfrozen", weight_score="exposure", weight_post="none")
    counting = replace(config(balance_batches=True), weighting=exposure)
    read: list[int] = []

    def counted_row_at(sample: int) -> TokenRow:
        read.append(sample)
        return row_at(sample)

    maker = BatchMaker(counting, ranks(0, 2), None, outline_at=row_at)
    batches = maker.train(counted_row_at, 0, 16, LENGTH).train
    samples = [sample for batch in batches for sample in batch.tokens_t.view(-1, LENGTH)[:, 0].tolist()]
    assert sorted(read) == sorted(samples)
    assert len(samples) == 4


def test_the_seeds_of_rows_are_those_of_earlier_runs() -> None:
    assert row_seed(1234, 5) == 4021649082500149864
    assert len({row_seed(seed, sample) for seed in range(30) for sample in range(30)}) == 900


def test_a_frozen_scorer_gives_the_losses_of_each_row() -> None:
    frozen = replace(config(micro_batch_size=2), weighting=WeightingConfig(token_weighting="frozen"))
    maker = BatchMaker(frozen, ranks(), None, lambda sample: np.full(LENGTH, sample, dtype=np.float32))
    first = maker.train(row_at, 0, 0, LENGTH).train[0].scores
    assert first.samples == (0, 1)
    assert first.short_loss_T.tolist() == [0.0] * LENGTH + [1.0] * LENGTH


INSIDE = "--eval-document-mask"


def evaluated(length: int, flags: str = "") -> list[PackedBatch]:
    """The validation batches of the row whose documents end after 3 and 5 of its 8 tokens."""
    row = TokenRow(np.arange(LENGTH + 1), np.array([3, 5]), np.ones(LENGTH, dtype=np.bool_))
    options = parse(f"--seq-length {LENGTH} --global-batch-size 1 --document-mask {flags}".split())
    return BatchMaker(options, ranks(), None).evaluate(lambda _: row, 0, length, LENGTH)


def test_a_local_window_ends_where_an_evaluations_does() -> None:
    """Also one that does not grow with the schedule's window in training."""
    local = "--local-window 4"
    borders = [evaluated(2, f"{local}{fixed}")[0].attention[True].borders for fixed in ("", " --local-window-fixed")]
    for growing, fixed in zip(*borders, strict=True):
        assert growing.tolist() == fixed.tolist() == [0, 2, 4, 6, 8]


def scored(batches: list[PackedBatch]) -> list[tuple[int, int]]:
    """Return for each token that counts, in order: the token, and the number of tokens before it that it sees."""
    pairs: list[tuple[int, int]] = []
    for batch in batches:
        counts = batch.trained_t
        pairs += zip(batch.tokens_t[counts].tolist(), batch.positions_t[counts].tolist(), strict=True)
    return sorted(pairs)


def test_a_sliding_evaluation_scores_each_token_once_in_its_window() -> None:
    """Worked by hand: windows of 4 tokens that slide by 2 over 8: 0123, 2345 (scores 4, 5), 4567 (6, 7)."""
    assert scored(evaluated(4, "--eval-stride 2")) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 2), (7, 3)]
    # inside documents 012 34 567, the second window begins with document 34, the third with 567
    inside = evaluated(4, f"--eval-stride 2 {INSIDE}")
    assert scored(inside) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 0), (6, 1), (7, 2)]
    # and as blocks; the mask is independent of the --document-mask of training
    assert scored(evaluated(4, INSIDE)) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 0), (5, 0), (6, 1), (7, 2)]
    # by 1: every token but the first 4 sees as many as the window holds, which is the plain sliding perplexity
    assert scored(evaluated(4, "--eval-stride 1")) == [(t, min(t, 3)) for t in range(8)]
    # a stride beyond the window is the window: blocks, as without a stride
    assert scored(evaluated(4, "--eval-stride 9")) == scored(evaluated(4)) == [(t, t % 4) for t in range(8)]
    assert scored(evaluated(8, "--eval-stride 3")) == [(t, t) for t in range(8)]


def test_positions_of_a_sliding_evaluation_do_not_depend_on_local_layers() -> None:
    """A local layer sees fewer tokens; the position in the window is the same."""
    for flags in ("--eval-stride 1", f"--eval-stride 1 {INSIDE}"):
        assert scored(evaluated(6, f"{flags} --num-layers 2 --local-window 2")) == scored(evaluated(6, flags))
