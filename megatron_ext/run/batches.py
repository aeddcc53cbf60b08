"""Make this rank's micro-batches from rows: their samples, attention masks and token scores.

samples of the step -> rows -> tokens end to end, masks -> scores (weighted runs) -> assemble -> StepBatches
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_ext.attention.health import sample_queries
from megatron_ext.batch import PackedBatch, RowScores, StepBatches, Tokens, assemble, lay_end_to_end
from megatron_ext.config import Config
from megatron_ext.context_parallel.choice import CPOptions
from megatron_ext.data.row import RowOutline, TokenRow
from megatron_ext.data.rows.balance import assign_rows
from megatron_ext.engine.parallel import Ranks
from megatron_ext.masks import LayerMasks, MaskOptions
from megatron_ext.run.inputs import RowAt
from megatron_ext.short_context import ShortContext
from megatron_ext.token_weighting.exposure import exposure_rows
from megatron_ext.token_weighting.short_pass import Division, short_pass, sliding_evaluation

OutlineAt = Callable[[int], RowOutline | TokenRow]


@dataclass(frozen=True, eq=False)
class BatchMaker:
    """Makes micro-batches, as a pure function of the sample index and the step."""

    config: Config
    ranks: Ranks
    context: CPOptions | None
    short_losses: Callable[[int], npt.NDArray[np.float32]] | None = None  # a frozen scorer's for a sample, float32 [L]
    bos_id: int | None = None  # the token at the start of the data's documents, if any
    outline_at: OutlineAt | None = None  # outlines of training rows; None reads whole rows

    def train(self, row_at: RowAt, step: int, first_sample: int, window: int) -> StepBatches:
        """Make the batches of the optimizer step that starts at a sample."""
        samples = self._samples(first_sample)
        if self.config.data.balance_batches:
            samples = self._balanced(self.outline_at or row_at, first_sample, window)
        if self.config.weighting.by_exposure:
            outlines = map(self.outline_at or row_at, self._global_batch(first_sample))
            row_at = exposure_rows(row_at, outlines, self.config)
        rows = [[row_at(sample) for sample in group] for group in samples]
        tokens = [lay_end_to_end(group) for group in rows]
        masks = [self._masks(group, window, self.config.mask_options()) for group in rows]
        scores, short = self._scores(samples, rows, tokens, window)
        # only the first micro-batch of the global batch is measured, so that every layout measures the same attention
        logging = self.config.logging
        measured = logging.attention_health_interval > 0 and step % logging.attention_health_interval == 0
        sampled = None
        if measured and self.ranks.data == 0:
            seed = self.config.training.seed
            sampled = sample_queries(seed, step, len(tokens[0].tokens), logging.attention_health_queries)
        balanced = self.config.training.moe_aux_loss_coeff > 0 and self.config.balances_rows
        batches = []
        for batch_tokens, mask, score in zip(tokens, masks, scores, strict=True):
            batches.append(assemble(batch_tokens, mask, self.context, score, sampled=sampled, number_rows=balanced))
            sampled = None  # the other micro-batches are not measured
        return StepBatches(self._with_base(batches, window), self._with_base(short, window), measured)

    def evaluate(self, row_at: RowAt, first_sample: int, length: int, window: int) -> list[PackedBatch]:
        """Make validation batches whose attention reaches back at most to the last multiple of `length`.

        With `eval_stride`, the context of a token is the window of `length` tokens that scores it instead. The last
        window of training only determines the rotary base.
        """
        training = self.config.training
        data = self.config.data
        options = replace(
            self.config.mask_options(),
            window_mask="grid",
            document_mask=training.eval_document_mask,
            local_fixed=False,
        )
        rows = [[row_at(sample) for sample in group] for group in self._samples(first_sample)]
        if training.eval_stride is None or length == data.seq_length:
            batches = [
                assemble(lay_end_to_end(group), self._masks(group, length, options), self.context) for group in rows
            ]
        else:
            sliding = ShortContext(length, min(training.eval_stride, length), every_token=True)
            cut = Division.of(self.config, data.micro_batch_size * data.seq_length)
            together = list(chain.from_iterable(rows))
            masks = self._masks(together, data.seq_length, options)
            batches = sliding_evaluation(lay_end_to_end(together), masks, sliding, cut, self.context)
        return self._with_base(batches, window)

    def _samples(self, first_sample: int) -> list[list[int]]:
        """List the samples of each of this rank's micro-batches, distributed in order."""
        size = self.config.data.micro_batch_size
        firsts = self._global_batch(first_sample)[self.ranks.data * size :: self.ranks.data_size * size]
        return [list(range(first, first + size)) for first in firsts]

    def _global_batch(self, first_sample: int) -> range:
        return range(first_sample, first_sample + self.config.data.global_batch_size)

    def _balanced(self, outline_at: OutlineAt, first_sample: int, window: int) -> list[list[int]]:
        """List these samples distributed by attention cost; every rank computes the same assignment."""
        options = self.config.mask_options()
        costs = [
            self._masks([outline_at(sample)], window, options).context_sum
            for sample in self._global_batch(first_sample)
        ]
        assigned = assign_rows(costs, self.ranks.data_size, self.config.microbatches(self.ranks.world_size))
        return (first_sample + assigned[self.ranks.data]).tolist()

    def _masks(self, rows: Sequence[RowOutline | TokenRow], window: int, options: MaskOptions) -> LayerMasks:
        return options.at(self.config.data.seq_length, [row.document_ends for row in rows], window)

    def _with_base(self, batches: list[PackedBatch], window: int) -> list[PackedBatch]:
        if not self.config.model.rope_window_bases:
            return batches
        return [replace(batch, rotary_base=self.config.model.rotary_base_at(window)) for batch in batches]

    def _scores(
        self, samples: list[list[int]], rows: list[list[TokenRow]], tokens: list[Tokens], window: int
    ) -> tuple[Sequence[RowScores | None], list[PackedBatch]]:
        """Return the inputs of each micro-batch's weights, and the batches of the step's own short-context pass."""
        weighting = self.config.weighting
        if not weighting.by_losses:
            return [None] * len(samples), []
        batches: list[PackedBatch] = []
        short: list[Tensor | None] = [None] * len(samples)
        same: list[Tensor | None] = [None] * len(samples)
        if weighting.token_weighting == "frozen":
            assert self.short_losses is not None
            short = [torch.from_numpy(np.concatenate(list(map(self.short_losses, group)))) for group in samples]
        elif weighting.needs_short_losses:
            together = list(chain.from_iterable(rows))
            cut = Division.of(self.config, len(tokens[0].tokens))
            masks = self._masks(together, window, self.config.mask_options())
            work = short_pass(lay_end_to_end(together), masks, weighting.short(), cut, self.context, self.bos_id)
            batches = work.batches
            # tokens that the pass does not score have the same context in both passes: their score is 0
            same = list(torch.from_numpy(~work.scored).chunk(len(tokens)))
        scores = [
            RowScores(
                trained_T=torch.from_numpy(batch_tokens.trained),
                labels_T=torch.from_numpy(batch_tokens.labels),
                samples=tuple(group),
                seeds=tuple(row_seed(self.config.training.seed, sample) for sample in group),
                short_loss_T=short_T,
                same_context_T=same_T,
            )
            for group, batch_tokens, short_T, same_T in zip(samples, tokens, short, same, strict=True)
        ]
        return scores, batches


def row_seed(seed: int, sample: int) -> int:
    """Return a seed for the row of a sample, 0 .. 2^64-1."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample}:row".encode()).digest()[:8], "big")
