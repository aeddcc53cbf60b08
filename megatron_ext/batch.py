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
from megatron_ext.context_parallel import CPPlan, plan
from megatron_ext.data.dataset import TokenRow
from megatron_ext.layout import PackedLayout, build_layout, concatenate


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch.

    Attributes:
        tokens_t: int64 [t].
        labels_t: int64 [t], the token after each.
        positions_t: int32 [t], the place within the segment (RoPE is relative; small positions keep bf16 exact).
        weights_t: float32 [t], factors of the loss.
        trained_t: bool [t], which labels count in the loss.
        layout: the segments of all T tokens, on the host.
        attention: which of this rank's queries see which keys.
    """

    tokens_t: Tensor
    labels_t: Tensor
    positions_t: Tensor
    weights_t: Tensor
    trained_t: Tensor
    layout: PackedLayout
    attention: AttentionCall

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, attention=self.attention.to(device), **moved)


def row_layout(row: TokenRow, window: int, document_mask: bool) -> PackedLayout:
    """The segments of one row; its documents bound attention only under the document mask."""
    return build_layout(len(row.tokens) - 1, row.document_ends if document_mask else (), window)


@dataclass(frozen=True)
class ContextOptions:
    """How a row is shared out over context-parallel ranks.

    Attributes:
        group: the ranks.
        policy: a name of `context_parallel.Policy`.
        scheme: who gets what from whom; None takes the one that moves fewer bytes.
        heads, key_heads: attention heads of one tensor-parallel rank, to weigh the schemes.
    """

    group: ContextGroup
    policy: str
    scheme: Scheme | None
    heads: int
    key_heads: int

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
    rows: Sequence[TokenRow], window: int, document_mask: bool, context: ContextOptions | None = None
) -> PackedBatch:
    """Lay rows of equal length end to end; the window's grid restarts at each.

    With `context`, the tokens are those that this rank holds, in the plan's order.
    """
    layout = concatenate([row_layout(row, window, document_mask) for row in rows])
    tokens = np.stack([row.tokens for row in rows])
    if context is None:
        held: slice | npt.NDArray[np.int64] = slice(None)
        attention = AttentionCall.of_layout(layout)
    else:
        share = plan(layout, context.group.size, context.policy)
        held = share.rows[context.group.rank]
        attention = AttentionCall.of_plan(share, context.group, context.choose(share))
    trained = np.concatenate([row.trained for row in rows])[held]
    return PackedBatch(
        tokens_t=torch.from_numpy(tokens[:, :-1].reshape(-1)[held]),
        labels_t=torch.from_numpy(tokens[:, 1:].reshape(-1)[held]),
        positions_t=torch.from_numpy(layout.positions()[held]),
        weights_t=torch.ones(len(trained)),
        trained_t=torch.from_numpy(trained),
        layout=layout,
        attention=attention,
    )
