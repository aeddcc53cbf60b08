"""Rows and a window to the tensors of one micro-batch: its rows laid end to end, in the order of this rank.

Legend: t tokens that this rank holds: T / cp of the T = rows x L, all of them without context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_ext.attention.exchange import ContextGroup
from megatron_ext.attention.interface import AttentionCall, Scheme
from megatron_ext.context_parallel import PAIRS_PER_ROW, CPPlan, plan
from megatron_ext.data.dataset import TokenRow
from megatron_ext.layout import PackedLayout
from megatron_ext.masks import LayerMasks, MaskOptions


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch.

    Attributes:
        tokens_t: int64 [t].
        labels_t: int64 [t], the token after each.
        positions_t: int32 [t], the place within the segment (RoPE is relative; small positions keep bf16 exact).
        weights_t: float32 [t], factors of the loss.
        trained_t: bool [t], which labels count in the loss.
        masks: the segments of all T tokens, on the host.
        attention: which of this rank's queries see which keys, in layers that follow the window's schedule.
        local_attention: the same in local layers; None where there are none.
    """

    tokens_t: Tensor
    labels_t: Tensor
    positions_t: Tensor
    weights_t: Tensor
    trained_t: Tensor
    masks: LayerMasks
    attention: AttentionCall
    local_attention: AttentionCall | None = None

    @property
    def layout(self) -> PackedLayout:
        """The segments that follow the window's schedule."""
        return self.masks.scheduled.layout

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=True)
            elif isinstance(value, AttentionCall):
                moved[name] = value.to(device)
        return replace(self, **moved)


@dataclass(frozen=True)
class ContextOptions:
    """How a row is shared out over context-parallel ranks.

    Attributes:
        group: the ranks.
        policy: a name of `context_parallel.Policy`.
        scheme: who gets what from whom; None takes the one that moves fewer bytes.
        heads, key_heads: attention heads of one tensor-parallel rank, to weigh the schemes.
        row_cost: what moving a row of keys and values costs, in attention pairs, to weigh the plans.
    """

    group: ContextGroup
    policy: str
    scheme: Scheme | None
    heads: int
    key_heads: int
    row_cost: float = PAIRS_PER_ROW

    def plans(self, masks: LayerMasks) -> list[CPPlan]:
        """For each mask its plan, with the same tokens on the same ranks: the least cost of all layers together."""
        layers, kinds = zip(*masks.by_layers(), strict=True)
        found = []
        for leading in kinds:
            first = plan(leading.layout, self.group.size, self.policy, reach=leading.reach, row_cost=self.row_cost)
            found.append([first if mask is leading else first.under(mask.layout, mask.reach) for mask in kinds])
        if len(found) == 1:
            return found[0]
        return min(found, key=lambda plans: sum(n * p.cost for n, p in zip(layers, plans, strict=True)))

    def choose(self, plan: CPPlan) -> Scheme:
        """The scheme for this plan, the same on every rank."""
        if self.scheme is not None:
            return self.scheme
        size = self.group.size
        if self.heads % size or self.key_heads % size:
            return Scheme.EXCHANGE
        # heads' worth of rows that leave a rank: queries, keys, values and outputs against keys and values
        ulysses = plan.layout.tokens * (size - 1) / size * 2 * (self.heads + self.key_heads)
        exchange = int(plan.rows_moved.sum()) * 2 * self.key_heads
        return Scheme.ULYSSES if ulysses < exchange else Scheme.EXCHANGE


def pack(
    rows: Sequence[TokenRow], window: int, options: MaskOptions, context: ContextOptions | None = None
) -> PackedBatch:
    """Lay rows of equal length end to end; the window's grid restarts at each.

    With `context`, the tokens are those that this rank holds, in the plan's order.
    """
    masks = options.at(len(rows[0].tokens) - 1, [row.document_ends for row in rows], window)
    tokens = np.stack([row.tokens for row in rows])
    if context is None:
        held: slice | npt.NDArray[np.int64] = slice(None)
        calls = [AttentionCall.of_layout(mask.layout, mask.reach) for _, mask in masks.by_layers()]
    else:
        plans = context.plans(masks)
        held = plans[0].rows[context.group.rank]
        calls = [AttentionCall.of_plan(plan, context.group, context.choose(plan)) for plan in plans]
    trained = np.concatenate([row.trained for row in rows])[held]
    return PackedBatch(
        tokens_t=torch.from_numpy(tokens[:, :-1].reshape(-1)[held]),
        labels_t=torch.from_numpy(tokens[:, 1:].reshape(-1)[held]),
        positions_t=torch.from_numpy(masks.widest.positions()[held]),
        weights_t=torch.ones(len(trained)),
        trained_t=torch.from_numpy(trained),
        masks=masks,
        attention=calls[0],
        local_attention=calls[1] if len(calls) > 1 else None,
    )
