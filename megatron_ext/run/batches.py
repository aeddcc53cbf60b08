"""The run's rows: the datasets of `--data-path`, blended and split, and the micro-batches of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from megatron_ext.attention.exchange import ContextGroup, Traffic
from megatron_ext.attention.interface import Scheme
from megatron_ext.batch import ContextOptions, PackedBatch, RowScores, StepBatches, Tokens, assemble, lay_end_to_end
from megatron_ext.config import Config
from megatron_ext.data.packing import PackedRows, PlanKey, load_plan, plan_folder, plan_key
from megatron_ext.data.rows.balance import deal_rows
from megatron_ext.data.rows.blend import BlendedRows, LaidSequences
from megatron_ext.data.rows.dataset import RowDataset, RowSource, TokenRow, part_seed
from megatron_ext.data.rows.mixture import MixturePart
from megatron_ext.data.rows.splits import split_documents
from megatron_ext.engine.indexed_dataset import IndexedSource
from megatron_ext.engine.parallel import Ranks
from megatron_ext.errors import UserError
from megatron_ext.masks import LayerMasks, MaskOptions
from megatron_ext.token_weighting.draws import draw, row_seed
from megatron_ext.token_weighting.short_pass import Division, short_pass

logger = logging.getLogger(__name__)
RowAt = Callable[[int], TokenRow]


@dataclass(frozen=True)
class Rows:
    """Row by sample index, for training and (where the split has documents for it) for validation."""

    train: RowAt
    valid: RowAt | None


@dataclass(frozen=True)
class Split:
    """The documents of one part of the mixture that one split has.

    Attributes:
        part: which data set, and how it is packed.
        source: its tokens.
        documents: those of the split.
        length: tokens of a packed sequence.
        seed: of the sequences' order.
    """

    part: MixturePart
    source: IndexedSource
    documents: range
    length: int
    seed: int

    def plan_key(self) -> PlanKey:
        """What the packing plan of these documents depends on."""
        return plan_key(self.part.packing, self.source, self.documents, self.length, self.seed, self.part.options)

    @property
    def plan_folder(self) -> Path:
        """Where tools/pack_data.py puts that plan."""
        return plan_folder(self.part.prefix, self.plan_key())


def splits(config: Config, vocab_size: int, number: int) -> list[Split]:
    """The documents of the mixture's parts for training (split 0) or validation (split 1).

    Raises:
        UserError: a dataset that cannot be read, or a split without documents.
    """
    data = config.data
    weighted = config.weighting.token_weighting == "dataset"
    found = []
    for place, part in enumerate(data.parts):
        source = IndexedSource(part.prefix, vocab_size, weighted=weighted and number == 0)
        documents = split_documents(len(source.document_lengths), data.split)[number]
        if number == 1 and not len(documents):
            raise UserError(
                f"split: got {data.split!r}, which leaves no document of {part.prefix} for validation; "
                "raise the second share or use --eval-interval 0"
            )
        if number == 1 and config.training.eval_packing == "random":
            part = replace(part, packing="random", packing_options=())
        found.append(
            Split(part, source, documents, part.length or data.seq_length, part_seed(config.training.seed, place))
        )
    return found


def open_rows(config: Config, vocab_size: int) -> Rows:
    """Open the datasets.

    Raises:
        UserError: a dataset that cannot be read, a split without documents that is needed, or a packing plan that
            has not been made.
    """

    def blend(number: int) -> RowAt:
        parts = splits(config, vocab_size, number)
        datasets = [_rows(split, config, number) for split in parts]
        weights = [split.part.weight for split in parts]
        return _one_at_a_time(BlendedRows(datasets, weights).row if len(datasets) > 1 else datasets[0].row)

    return Rows(blend(0), blend(1) if config.training.eval_interval else None)


def _rows(split: Split, config: Config, number: int) -> RowSource:
    sequences = open_split(split, config)
    if number == 0 and isinstance(sequences, PackedRows):
        advice = sequences.plan.advice(needed_tokens(config, split.part, config.samples) / sequences.plan.tokens)
        if advice is not None:
            logger.info("%s: %s", split.part.prefix, advice)
    return sequences if split.length == config.data.seq_length else LaidSequences(sequences, config.data.seq_length)


def needed_tokens(config: Config, part: MixturePart, rows: int) -> float:
    """The share that a part of the mixture has of so many rows."""
    return rows * config.data.seq_length * part.weight / sum(one.weight for one in config.data.parts)


def open_split(split: Split, config: Config) -> RowDataset | PackedRows:
    """The packed sequences of a split.

    Raises:
        UserError: a packing plan that has not been made, or does not fit.
    """
    mask_eod = config.data.eod_mask_loss
    if split.part.packing == "random":
        return RowDataset(split.source, split.documents, split.length, split.seed, mask_eod=mask_eod)
    key = split.plan_key()  # reads all lengths
    folder = plan_folder(split.part.prefix, key)
    if not folder.exists():
        raise UserError(
            f"packing: {split.part.prefix} has no {split.part.packing} plan for seq_length {split.length} and seed "
            f"{split.seed}; make it with tools/pack_data.py and the flags of this run"
        )
    return PackedRows(split.source, load_plan(folder, key), split.seed, mask_eod=mask_eod)


def _one_at_a_time(row_at: RowAt) -> RowAt:
    """Data sets remember the orders of their epochs: not for two threads at once."""
    lock = Lock()

    def locked(sample: int) -> TokenRow:
        with lock:
            return row_at(sample)

    return locked


def context_options(config: Config, ranks: Ranks, traffic: Traffic, *, on_cuda: bool) -> ContextOptions | None:
    """How rows are shared out over context-parallel ranks; None where each process holds whole rows."""
    if ranks.context_size == 1:
        return None
    scheme = config.parallel.cp_scheme
    parts = config.parallel.cp_overlap_parts or (2 if on_cuda else 1)  # without a second stream nothing overlaps
    return ContextOptions(
        group=ContextGroup(ranks.context, ranks.context_size, ranks.context_group, traffic, parts),
        policy=config.parallel.cp_policy,
        scheme=None if scheme == "auto" else Scheme(scheme),
        heads=config.model.num_attention_heads // ranks.tensor_size,
        key_heads=config.model.num_query_groups // ranks.tensor_size,
        row_cost=config.parallel.cp_row_cost,
    )


class BatchMaker:
    """Rows to this rank's micro-batches, a pure function of the sample index and the step.

    Args:
        config: the run's.
        ranks: where this process stands.
        context: how rows are shared out over context-parallel ranks.
        short_losses: of a sample, float32 [L], what a frozen scorer left.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        context: ContextOptions | None,
        short_losses: Callable[[int], npt.NDArray[np.float32]] | None = None,
    ) -> None:
        self.config, self.ranks, self.context, self.short_losses = config, ranks, context, short_losses

    def train(self, row_at: RowAt, step: int, first_sample: int, window: int) -> StepBatches:
        """The batches of the optimizer step that begins at a sample."""
        found = self._train(row_at, step, first_sample, window)
        return StepBatches(self._with_base(found.train, window), self._with_base(found.short, window))

    def _train(self, row_at: RowAt, step: int, first_sample: int, window: int) -> StepBatches:
        kind = self.config.weighting.token_weighting
        samples = self._samples(first_sample)
        if self.config.data.balance_batches:
            samples = self._balanced(row_at, first_sample, window)
        rows = [[row_at(sample) for sample in group] for group in samples]
        tokens = [lay_end_to_end(group) for group in rows]
        masks = [self._masks(group, window, self.config.mask_options()) for group in rows]
        if kind == "frozen":
            scores = [self._frozen(group, one) for group, one in zip(samples, tokens, strict=True)]
        elif kind == "unfrozen":
            return self._unfrozen(samples, tokens, masks, step)
        else:
            return StepBatches([assemble(one, mask, self.context) for one, mask in zip(tokens, masks, strict=True)])
        return StepBatches(self._assembled(tokens, masks, scores))

    def evaluate(self, row_at: RowAt, first_sample: int, length: int, window: int) -> list[PackedBatch]:
        """Validation batches whose attention reaches back at most to the last multiple of `length`.

        The window that was trained with last decides the rotary base alone.
        """
        options = replace(self.config.mask_options(), window_mask="grid")
        rows = [[row_at(sample) for sample in group] for group in self._samples(first_sample)]
        batches = [assemble(lay_end_to_end(group), self._masks(group, length, options), self.context) for group in rows]
        return self._with_base(batches, window)

    def _with_base(self, batches: list[PackedBatch], window: int) -> list[PackedBatch]:
        if not self.config.model.rope_window_bases:
            return batches
        return [replace(batch, rotary_base=self.config.model.rotary_base_at(window)) for batch in batches]

    def _balanced(self, row_at: RowAt, first_sample: int, window: int) -> list[list[int]]:
        """The samples of each of this rank's micro-batches, the whole global batch dealt by cost."""
        data, options = self.config.data, self.config.mask_options()
        everyone = range(first_sample, first_sample + data.global_batch_size)
        costs = [self._masks([row_at(sample)], window, options).context_sum for sample in everyone]
        dealt = deal_rows(costs, self.ranks.data_size, self.config.microbatches(self.ranks.world_size))
        return (first_sample + dealt[self.ranks.data]).tolist()

    def _samples(self, first_sample: int) -> list[list[int]]:
        """The samples of each of this rank's micro-batches."""
        size, ranks = self.config.data.micro_batch_size, self.ranks
        numbers = range(self.config.microbatches(ranks.world_size))
        firsts = [first_sample + (number * ranks.data_size + ranks.data) * size for number in numbers]
        return [list(range(first, first + size)) for first in firsts]

    def _masks(self, rows: list[TokenRow], window: int, options: MaskOptions) -> LayerMasks:
        return options.at(self.config.data.seq_length, [row.document_ends for row in rows], window)

    def _frozen(self, samples: list[int], tokens: Tokens) -> RowScores:
        assert self.short_losses is not None
        short = np.concatenate([self.short_losses(sample) for sample in samples])
        return self._row_scores(samples, tokens, short_loss_T=torch.from_numpy(short))

    def _unfrozen(
        self, samples: list[list[int]], tokens: list[Tokens], masks: list[LayerMasks], step: int
    ) -> StepBatches:
        weighting = self.config.weighting
        if not weighting.needs_short_losses:
            scores = [self._row_scores(group, one) for group, one in zip(samples, tokens, strict=True)]
            short = []
        else:
            found = short_pass(
                tokens, masks, weighting.short(), self._division(tokens), self.context, self._rows_scored(samples, step)
            )
            same = np.split(~found.scored, len(tokens))
            scores = [
                self._row_scores(group, one, same_context_T=torch.from_numpy(alike))
                for group, one, alike in zip(samples, tokens, same, strict=True)
            ]
            short = found.batches
        return StepBatches(self._assembled(tokens, masks, scores), short)

    def _assembled(self, tokens: list[Tokens], masks: list[LayerMasks], scores: list[RowScores]) -> list[PackedBatch]:
        return [assemble(*found[:2], self.context, found[2]) for found in zip(tokens, masks, scores, strict=True)]

    def _rows_scored(self, samples: list[list[int]], step: int) -> npt.NDArray[np.bool_]:
        weighting, seed = self.config.weighting, self.config.training.seed
        flat = [sample for group in samples for sample in group]
        if step % weighting.score_interval:
            return np.zeros(len(flat), dtype=np.bool_)
        return np.array([draw(seed, sample) < weighting.score_row_share for sample in flat])

    def _division(self, tokens: list[Tokens]) -> Division:
        parallel, ranks = self.config.parallel, self.ranks
        interleaved = parallel.num_layers_per_virtual_pipeline_stage is not None
        return Division(
            capacity=len(tokens[0].tokens),
            unit=ranks.tensor_size * ranks.context_size,
            multiple=ranks.pipeline_size if interleaved else 1,
        )

    def _row_scores(self, samples: list[int], tokens: Tokens, **more: torch.Tensor) -> RowScores:
        return RowScores(
            held_t=torch.empty(0, dtype=torch.int64),  # `assemble` knows
            trained_T=torch.from_numpy(tokens.trained),
            labels_T=torch.from_numpy(tokens.labels),
            samples=tuple(samples),
            seeds=tuple(row_seed(self.config.training.seed, sample) for sample in samples),
            **more,
        )
