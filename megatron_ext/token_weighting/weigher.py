"""From losses to weights inside a step, on the ranks of the last pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_ext.attention.exchange import ContextGroup
from megatron_ext.batch import PackedBatch, RowScores
from megatron_ext.config import WeightingConfig
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.loss import TokenLosses
from megatron_ext.token_weighting import weigh_and_score
from megatron_ext.token_weighting.passage import Passage, spelled

PASSAGE = 400  # tokens of the first row that are kept to be shown


@dataclass(frozen=True)
class Weights:
    """Holds weights_t float32 [t] and scores_t float64 [t] (None: none) of this rank's tokens of a micro-batch."""

    weights_t: Tensor
    scores_t: Tensor | None = None


@dataclass(frozen=True, eq=False)
class WeighedRow:
    """Holds one row as it was weighed, on the host.

    Attributes:
        weights: float32 [L], 0 where nothing is trained.
        short_loss: float32 [L], NaN where both contexts are the same and none was computed; None where the score
            compares no contexts.
    """

    weights: npt.NDArray[np.float32]
    short_loss: npt.NDArray[np.float32] | None


class Weigher:
    """Weighs the tokens of micro-batches.

    Rows are weighed whole: every context-parallel rank gathers all their losses and does the same arithmetic.

    Args:
        options: which weights.
        row_length: L.
        context: the ranks that share each row.
        keeps_rows: for `take_rows`; costs a copy to the host of all weights.
    """

    def __init__(
        self, options: WeightingConfig, row_length: int, context: ContextGroup, *, keeps_rows: bool = False
    ) -> None:
        self.options, self.row_length, self.context = options, row_length, context
        self._weighed_last: tuple[Tensor, Tensor, Tensor] | None = None  # labels_T, weights_T, scores_T
        self._rows_kept: dict[int, WeighedRow] | None = {} if keeps_rows else None

    def __call__(self, batch: PackedBatch, losses: TokenLosses) -> Weights:
        """Return the weights of this rank's tokens: those of the batch where they depend on no loss."""
        scores, options = batch.scores, self.options
        if scores is None:
            return Weights(batch.weights_t)
        assert batch.places is not None
        entropy = losses.entropy_t
        weighed = weigh_and_score(
            self._rows(self._whole(batch, losses.cross_entropy_t)),
            None if scores.short_loss_T is None else self._rows(scores.short_loss_T),
            score=options.weight_score,
            post=options.weight_post,
            strength=options.strength,
            trained=self._rows(scores.trained_T),
            same_context=None if scores.same_context_T is None else self._rows(scores.same_context_T),
            clip=options.weight_clip,
            shift=options.weight_shift,
            entropy=None if entropy is None else self._rows(self._whole(batch, entropy)),
            seed=scores.seeds,
            checked=False,  # a loss that is not finite ends the run: every process learns it from the sum
        )
        if self._rows_kept is not None:
            self._rows_kept |= self._by_sample(scores, weighed.weights_RL)
        held_t = batch.places.of_rank(self.context.rank)
        weights_T, scores_T = weighed.weights_RL.reshape(-1), weighed.scores_RL.reshape(-1)
        self._weighed_last = scores.labels_T, weights_T, scores_T
        return Weights(weights_T[held_t], scores_T[held_t])

    def passage(self, step: int, tokenizer: Tokenizer | None) -> Passage | None:
        """Show tokens of the first row that was weighed last, in step `step`; None where no weight depends on a loss.

        They begin where the two contexts begin to differ, for before that every score is 0.
        """
        if self._weighed_last is None:
            return None
        start = min(self.options.short_context or 0, max(self.row_length - PASSAGE, 0))
        tokens, weights, scores = (
            tuple(values_T[start : min(start + PASSAGE, self.row_length)].tolist()) for values_T in self._weighed_last
        )
        return Passage(
            step=step,
            start=start,
            tokens=tokens,
            texts=spelled(tokens, tokenizer) if tokenizer is not None else None,
            weights=weights,
            scores=tuple(score if math.isfinite(score) else None for score in scores),
        )

    def fill_in(
        self, batches: Sequence[PackedBatch], short: Sequence[PackedBatch], losses: Sequence[Tensor]
    ) -> list[PackedBatch]:
        """Return the batches with the losses that the short-context pass gave; every rank of the stage calls it."""
        total = sum(batch.layout.tokens for batch in batches)
        short_T = short_losses(self.context, short, losses, total, batches[0].weights_t.device)
        return [
            replace(batch, scores=replace(batch.scores, short_loss_T=part)) if batch.scores is not None else batch
            for batch, part in zip(batches, short_T.split(batches[0].layout.tokens), strict=True)
        ]

    def take_rows(self) -> dict[int, WeighedRow]:
        """Return the rows weighed here since the last call, by sample index; {} where weights depend on no loss."""
        assert self._rows_kept is not None
        taken, self._rows_kept = self._rows_kept, {}
        return taken

    def _by_sample(self, scores: RowScores, weights_RL: Tensor) -> dict[int, WeighedRow]:
        """Copy a micro-batch's weights, and the short-context losses that were computed, to the host."""
        weights = weights_RL.cpu().numpy()
        short: Sequence[npt.NDArray[np.float32] | None] = [None] * len(weights)
        if scores.short_loss_T is not None:
            known_T = scores.short_loss_T
            if scores.same_context_T is not None:
                known_T = known_T.masked_fill(scores.same_context_T, torch.nan)
            short = list(self._rows(known_T).cpu().numpy())
        return {sample: WeighedRow(*row) for sample, *row in zip(scores.samples, weights, short, strict=True)}

    def _whole(self, batch: PackedBatch, values_t: Tensor) -> Tensor:
        """Gather values of this rank's tokens, [t], to those of the whole rows, [T]."""
        assert batch.places is not None
        everyone = self.context.gather(values_t.detach(), batch.places.counts)
        whole = torch.empty_like(everyone)
        whole[batch.places.order] = everyone
        return whole

    def _rows(self, values_T: Tensor) -> Tensor:
        return values_T.unflatten(0, (-1, self.row_length))


def short_losses(
    context: ContextGroup,
    short: Sequence[PackedBatch],
    losses: Sequence[Tensor],
    tokens: int,
    device: torch.device,
) -> Tensor:
    """Gather a short-context pass's losses from all context-parallel ranks: float32 [tokens] of all rows, else 0."""
    loss_T = torch.zeros(tokens, dtype=torch.float32, device=device)
    for batch, losses_t in zip(short, losses, strict=True):
        assert batch.places is not None
        loss_T[batch.places.order] = context.gather(losses_t, batch.places.counts)
    return loss_T
