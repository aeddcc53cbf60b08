"""From losses to weights inside a step, on the ranks of the last pipeline stage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_ext.attention.exchange import ContextGroup
from megatron_ext.batch import PackedBatch, RowScores
from megatron_ext.config import WeightingConfig
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.files.aside import file_aside
from megatron_ext.loss import TokenLosses
from megatron_ext.token_weighting import weigh_and_score

PASSAGE = 400  # tokens of the first row that are kept to be shown


@dataclass(frozen=True)
class Weights:
    """Of one micro-batch's tokens on this rank: weights_t float32 [t], scores_t float64 [t] (None: none)."""

    weights_t: Tensor
    scores_t: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Passage:
    """Tokens of one row as they were weighted last: labels, weights and scores of the tokens from `start` on."""

    start: int
    labels: Tensor
    weights: Tensor
    scores: Tensor

    def write(self, path: Path, step: int, tokenizer: Tokenizer | None) -> None:
        """As JSON, written aside and renamed; `texts` is null without a tokenizer."""
        tokens = self.labels.tolist()
        record = {
            "step": step,
            "start": self.start,
            "tokens": tokens,
            "texts": _texts(tokens, tokenizer) if tokenizer else None,
            "weights": self.weights.tolist(),
            "scores": self.scores.tolist(),
        }
        with file_aside(path) as aside:
            aside.write_text(json.dumps(record) + "\n")


def _texts(tokens: list[int], tokenizer: Tokenizer) -> list[str]:
    """What each token adds to the text; "" for one that leaves a character unfinished."""
    texts, shown = [], ""
    for end in range(1, len(tokens) + 1):
        whole = tokenizer.decode(tokens[:end])
        finished = not whole.endswith("\ufffd")
        texts.append(whole[len(shown) :] if finished else "")
        shown = whole if finished else shown
    return texts


@dataclass(frozen=True, eq=False)
class WeighedRow:
    """One row as it was weighed, on the host.

    Attributes:
        weights: float32 [L], 0 where nothing is trained.
        short_loss: float32 [L], NaN where both contexts are the same and none was computed; None where the score
            compares no contexts.
    """

    weights: npt.NDArray[np.float32]
    short_loss: npt.NDArray[np.float32] | None


class Weigher:
    """Weights of a micro-batch, whose rows are weighed whole: every context-parallel rank gathers all their losses.

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
        self.passage: Passage | None = None
        self._rows_kept: dict[int, WeighedRow] | None = {} if keeps_rows else None

    def __call__(self, batch: PackedBatch, losses: TokenLosses) -> Weights:
        """The weights of this rank's tokens; those of the batch where they depend on no loss."""
        scores, options = batch.scores, self.options
        if scores is None:
            return Weights(batch.weights_t)
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
        )
        if self._rows_kept is not None:
            self._rows_kept |= self._by_sample(scores, weighed.weights_RL)
        held = scores.held_t
        weights_T, scores_T = weighed.weights_RL.reshape(-1), weighed.scores_RL.reshape(-1)
        start = min(options.short_context or 0, max(self.row_length - PASSAGE, 0))
        part = slice(start, start + min(PASSAGE, self.row_length))
        self.passage = Passage(start, scores.labels_T[part], weights_T[part], scores_T[part])
        return Weights(weights_T[held], scores_T[held])

    def fill_in(
        self, batches: Sequence[PackedBatch], short: Sequence[PackedBatch], losses: Sequence[Tensor]
    ) -> list[PackedBatch]:
        """The batches with the short-context losses that the short pass gave; every rank of the stage calls it."""
        total = sum(batch.layout.tokens for batch in batches)
        short_T = short_losses(self.context, short, losses, total, batches[0].weights_t.device)
        return [
            replace(batch, scores=replace(batch.scores, short_loss_T=part)) if batch.scores is not None else batch
            for batch, part in zip(batches, short_T.split(batches[0].layout.tokens), strict=True)
        ]

    def take_rows(self) -> dict[int, WeighedRow]:
        """The rows weighed here since the last call, by sample index; {} where weights depend on no loss."""
        assert self._rows_kept is not None
        taken, self._rows_kept = self._rows_kept, {}
        return taken

    def _by_sample(self, scores: RowScores, weights_RL: Tensor) -> dict[int, WeighedRow]:
        weights = weights_RL.cpu().numpy()
        short: Sequence[npt.NDArray[np.float32] | None] = [None] * len(weights)
        if scores.short_loss_T is not None:
            known_T = scores.short_loss_T
            if scores.same_context_T is not None:
                known_T = known_T.masked_fill(scores.same_context_T, torch.nan)
            short = list(self._rows(known_T).cpu().numpy())
        return {sample: WeighedRow(*row) for sample, *row in zip(scores.samples, weights, short, strict=True)}

    def _whole(self, batch: PackedBatch, values_t: Tensor) -> Tensor:
        """Of this rank's tokens, [t], to those of the whole rows, [T]."""
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
    """float32 [tokens]: what a short pass gave for the tokens of all rows, from all context-parallel ranks; else 0."""
    found = torch.zeros(tokens, dtype=torch.float32, device=device)
    for batch, losses_t in zip(short, losses, strict=True):
        assert batch.places is not None
        found[batch.places.order] = context.gather(losses_t, batch.places.counts)
    return found
