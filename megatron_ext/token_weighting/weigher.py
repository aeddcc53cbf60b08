"""Compute token weights from losses within a step, on the ranks of the last pipeline stage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.arrays import Float32
from megatron_ext.batch import PackedBatch, RowScores
from megatron_ext.config import WeightingConfig
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.data.text.tokenizer import Tokenizer, token_texts
from megatron_ext.loss import TokenLosses
from megatron_ext.token_weighting.passage import Passage
from megatron_ext.token_weighting.weigh import weigh_rows

PASSAGE = 400  # tokens of the first row that are written to passage.json


@dataclass(frozen=True, eq=False)
class WeighedRow:
    """The weights of one row, on the host: float32 [L], 0 for untrained tokens.

    `short_loss`, float32 [L], is NaN where both contexts are the same; None if the score does not compare contexts.
    """

    weights: Float32
    short_loss: Float32 | None


class Weigher:
    """Computes the token weights of micro-batches of rows of `row_length` L.

    Every context-parallel rank gathers the losses of whole rows and computes the same weights. `keeps_rows` keeps rows
    for `take_rows`, which copies all weights to the host.
    """

    def __init__(
        self, options: WeightingConfig, row_length: int, context: CPGroup, *, keeps_rows: bool = False
    ) -> None:
        self.options = options
        self.row_length = row_length
        self.context = context
        self._keeps_rows = keeps_rows
        self._rows_kept: dict[int, WeighedRow] = {}
        self._weighed_last: tuple[Tensor, Tensor, Tensor] | None = None  # labels_T, weights_T, scores_T

    def __call__(self, batch: PackedBatch, losses: TokenLosses) -> tuple[Tensor, Tensor | None]:
        """Return the weights, float32 [t], and the scores, float64 [t], of this rank's tokens of a micro-batch.

        If weights do not depend on losses, they are the batch's, without scores.
        """
        scores = batch.scores
        if scores is None:
            return batch.weights_t, None
        assert batch.places is not None

        def whole(values_t: Tensor) -> Tensor:
            return gather_losses(self.context, [batch], [values_t.detach()], batch.layout.tokens, values_t.device)

        by_name = {"long_loss": self._rows(whole(losses.cross_entropy_t))}
        if scores.short_loss_T is not None:
            by_name["short_loss"] = self._rows(scores.short_loss_T)
        if losses.entropy_t is not None:
            by_name["entropy"] = self._rows(whole(losses.entropy_t))
        same_context_RL = None
        if scores.same_context_T is not None:
            same_context_RL = self._rows(scores.same_context_T)
        options = self.options
        # a non-finite loss makes all weights NaN and ends the run: every process sees it in the sum
        weights_RL, scores_RL, _ = weigh_rows(
            by_name,
            self._rows(scores.trained_T),
            same_context_RL,
            score=options.weight_score,
            post=options.weight_post,
            strength=options.strength,
            clip=options.weight_clip,
            shift=options.weight_shift,
            seeds=scores.seeds,
        )
        if self._keeps_rows:
            self._rows_kept |= self._by_sample(scores, weights_RL)
        weights_T = weights_RL.reshape(-1)
        scores_T = scores_RL.reshape(-1)
        self._weighed_last = scores.labels_T, weights_T, scores_T
        places_t = batch.places.of_rank(self.context.rank)
        return weights_T[places_t], scores_T[places_t]

    def passage(self, step: int, tokenizer: Tokenizer | None) -> Passage | None:
        """Return a passage of the first row of the last micro-batch; None if weights do not depend on losses.

        It begins where the two contexts begin to differ, because every score before that is 0.
        """
        if self._weighed_last is None:
            return None
        start = min(self.options.short_context or 0, max(self.row_length - PASSAGE, 0))
        end = min(start + PASSAGE, self.row_length)
        tokens, weights, scores = (tuple(values_T[start:end].tolist()) for values_T in self._weighed_last)
        texts = None
        if tokenizer is not None:
            texts = tuple(token_texts(tokenizer, tokens))
        return Passage(
            step=step,
            start=start,
            tokens=tokens,
            texts=texts,
            weights=weights,
            scores=tuple(score if math.isfinite(score) else None for score in scores),
        )

    def fill_in(
        self, batches: Sequence[PackedBatch], short: Sequence[PackedBatch], losses: Sequence[Tensor]
    ) -> list[PackedBatch]:
        """Add the losses of the short-context pass to the batches; collective over the ranks of the stage."""
        total = sum(batch.layout.tokens for batch in batches)
        short_T = gather_losses(self.context, short, losses, total, batches[0].weights_t.device)
        filled = []
        for batch, short_loss_T in zip(batches, short_T.split(batches[0].layout.tokens), strict=True):
            if batch.scores is not None:
                batch = replace(batch, scores=replace(batch.scores, short_loss_T=short_loss_T))
            filled.append(batch)
        return filled

    def take_rows(self) -> dict[int, WeighedRow]:
        """Return the rows weighted since the last call, by sample index; empty if weights do not depend on losses."""
        assert self._keeps_rows
        rows = self._rows_kept
        self._rows_kept = {}
        return rows

    def _by_sample(self, scores: RowScores, weights_RL: Tensor) -> dict[int, WeighedRow]:
        """Copy the weights and short-context losses of a micro-batch to the host."""
        weights = weights_RL.cpu().numpy()
        short: Sequence[Float32 | None] = [None] * len(weights)
        if scores.short_loss_T is not None:
            short_T = scores.short_loss_T
            if scores.same_context_T is not None:
                short_T = short_T.masked_fill(scores.same_context_T, torch.nan)
            short = list(self._rows(short_T).cpu().numpy())
        return {sample: WeighedRow(*row) for sample, *row in zip(scores.samples, weights, short, strict=True)}

    def _rows(self, values_T: Tensor) -> Tensor:
        return values_T.unflatten(0, (-1, self.row_length))


def gather_losses(
    context: CPGroup, batches: Sequence[PackedBatch], losses: Sequence[Tensor], tokens: int, device: torch.device
) -> Tensor:
    """Gather the batches' losses from all context-parallel ranks: float32 [tokens] of all rows, 0 where none is."""
    loss_T = torch.zeros(tokens, dtype=torch.float32, device=device)
    for batch, losses_t in zip(batches, losses, strict=True):
        assert batch.places is not None
        loss_T[batch.places.order] = context.gather(losses_t, batch.places.counts)
    return loss_T
