"""Build the tensors of one micro-batch: rows concatenated, cut by the window, in the token order of this rank.

Legend: t tokens on this rank: T / cp of the T = rows x L tokens, or all of them without context parallelism.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_ext.arrays import Bool, Float32, Int64
from megatron_ext.attention.health import Probe
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.context_parallel.choice import CPOptions
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.data.row import TokenRow
from megatron_ext.device import moved
from megatron_ext.layout import PackedLayout
from megatron_ext.masks import LayerMasks, MaskOptions


@dataclass(frozen=True, eq=False)
class Places:
    """Maps the losses of all context-parallel ranks, concatenated by rank, to their positions among the T tokens."""

    counts: tuple[int, ...]  # number of losses of each rank
    order: Tensor  # int64 [sum of counts], the token index of each loss

    def of_rank(self, rank: int) -> Tensor:
        """Return the token indices of this rank's losses; int64 [counts[rank]]."""
        return self.order.split(self.counts)[rank]


@dataclass(frozen=True, eq=False)
class RowScores:
    """Inputs of the token weights for all T = R x L tokens of a micro-batch, on every rank that shares them."""

    trained_T: Tensor  # bool [T]
    labels_T: Tensor  # int64 [T]
    samples: tuple[int, ...]  # the sample index of each row
    seeds: tuple[int, ...]  # one per row
    short_loss_T: Tensor | None = None  # float32 [T], -log p(label) in the short context; None if computed in the step
    same_context_T: Tensor | None = None  # bool [T], where both contexts are the same by layout; None if nowhere


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch."""

    tokens_t: Tensor  # int64 [t]
    labels_t: Tensor  # int64 [t], the token after each
    # int32 [t], counted from the segment's start (RoPE is relative; small positions keep bf16 exact)
    positions_t: Tensor
    weights_t: Tensor  # float32 [t], loss factors
    trained_t: Tensor  # bool [t], which labels count in the loss
    masks: LayerMasks  # segments of all T tokens, on the host
    attention: tuple[AttentionCall, ...]  # by kind of layer as in `masks`, which keys each of this rank's queries sees
    total_trained: int  # number of trained tokens among all T, on the host
    total_weight: float  # sum of their weights; equals `total_trained` if the weights depend on losses
    wanted: Tensor | None = None  # int64, this rank's tokens whose loss is requested; None for all
    places: Places | None = None  # positions of those losses, to gather them over ranks; None if they are not gathered
    scores: RowScores | None = None  # inputs of the weights, if these depend on losses
    rotary_base: float | None = None  # RoPE base for the step's window; None for the model's own
    probe: Probe | None = None  # measures the attention of sampled queries; None for none
    rows_t: Tensor | None = None  # int64 [t], the row of each token, from 0; None with a single row or if not requested

    @property
    def layout(self) -> PackedLayout:
        """Return the segments that follow the window schedule."""
        return self.masks.scheduled.layout

    def to(self, device: torch.device) -> "PackedBatch":
        return moved(self, device)


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of one optimizer step on this rank."""

    train: list[PackedBatch]
    short: list[PackedBatch] = field(default_factory=list)  # of the short-context pass
    attention_measured: bool = False  # whether any rank samples queries in this step


@dataclass(frozen=True, eq=False)
class Tokens:
    """All T tokens of a micro-batch before they are split over ranks; arrays [T]. Default: weights of 1, all wanted."""

    tokens: Int64
    labels: Int64
    trained: Bool
    weights: Float32 | None = None
    wanted: Bool | None = None


def pack(rows: Sequence[TokenRow], window: int, options: MaskOptions, context: CPOptions | None = None) -> PackedBatch:
    """Concatenate rows of equal length; the window's grid restarts at each row. With `context`, see `assemble`."""
    masks = options.at(len(rows[0].tokens) - 1, [row.document_ends for row in rows], window)
    return assemble(lay_end_to_end(rows), masks, context)


def lay_end_to_end(rows: Sequence[TokenRow]) -> Tokens:
    """Concatenate the tokens of rows of equal length."""
    ids = np.stack([row.tokens for row in rows])
    weights = [row.weights for row in rows if row.weights is not None]
    return Tokens(
        tokens=ids[:, :-1].reshape(-1),
        labels=ids[:, 1:].reshape(-1),
        trained=np.concatenate([row.trained for row in rows]),
        weights=np.concatenate(weights) if weights else None,
    )


def assemble(
    tokens: Tokens,
    masks: LayerMasks,
    context: CPOptions | None,
    scores: RowScores | None = None,
    *,
    sampled: Int64 | None = None,
    number_rows: bool = False,
) -> PackedBatch:
    """Build this rank's share of a micro-batch from its tokens and masks; without `context`, the share is all of it.

    `sampled` has the queries to measure, among the T tokens. With `number_rows`, a batch of several rows also has each
    token's row.
    """
    total = masks.widest.tokens
    row_length = masks.widest.row_length
    if context is not None:
        plans = context.plans(masks)
        group = context.group
        by_rank = plans[0].rows
        calls = tuple(AttentionCall.of_plan(plan, group, context.choose(plan)) for plan in plans)
    else:
        group = CPGroup(0, 1, None)
        by_rank = (np.arange(total, dtype=np.int64),)
        calls = tuple(AttentionCall.of_layout(mask.layout, mask.left_window) for mask in masks.by_kind)
    share = by_rank[group.rank]
    wanted = None
    losses_by_rank = by_rank
    if tokens.wanted is not None:
        wanted = torch.from_numpy(np.flatnonzero(tokens.wanted[share]))
        losses_by_rank = tuple(indices[tokens.wanted[indices]] for indices in by_rank)
    places = None
    if tokens.wanted is not None or scores is not None:  # the losses are gathered over ranks
        counts = tuple(len(indices) for indices in losses_by_rank)
        places = Places(counts, torch.from_numpy(np.concatenate(losses_by_rank)))
    weights = tokens.weights
    if weights is None:
        weights = np.ones(total, dtype=np.float32)
    return PackedBatch(
        tokens_t=torch.from_numpy(tokens.tokens[share]),
        labels_t=torch.from_numpy(tokens.labels[share]),
        positions_t=torch.from_numpy(masks.widest.positions()[share]),
        weights_t=torch.from_numpy(weights[share]),
        trained_t=torch.from_numpy(tokens.trained[share]),
        masks=masks,
        attention=calls,
        total_trained=int(tokens.trained.sum()),
        total_weight=float(weights[tokens.trained].sum(dtype=np.float64)),
        wanted=wanted,
        places=places,
        scores=scores,
        probe=None if sampled is None else Probe.of(sampled, masks, by_rank, group),
        rows_t=torch.from_numpy(share // row_length) if number_rows and total > row_length else None,
    )
