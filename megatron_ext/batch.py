"""Rows and a window to the tensors of one micro-batch: its rows laid end to end, in the order of this rank.

Legend: t tokens that this rank holds; without context parallelism all T = rows x L of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.attention.interface import AttentionCall
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
        return replace(self, **moved)


def row_layout(row: TokenRow, window: int, document_mask: bool) -> PackedLayout:
    """The segments of one row; its documents bound attention only under the document mask."""
    return build_layout(len(row.tokens) - 1, row.document_ends if document_mask else (), window)


def pack(rows: Sequence[TokenRow], window: int, document_mask: bool) -> PackedBatch:
    """Lay rows of equal length end to end; the window's grid restarts at each."""
    layout = concatenate([row_layout(row, window, document_mask) for row in rows])
    tokens = np.stack([row.tokens for row in rows])
    return PackedBatch(
        tokens_t=torch.from_numpy(tokens[:, :-1].reshape(-1)),
        labels_t=torch.from_numpy(tokens[:, 1:].reshape(-1)),
        positions_t=torch.from_numpy(layout.positions()),
        weights_t=torch.ones(layout.tokens),
        trained_t=torch.from_numpy(np.concatenate([row.trained for row in rows])),
        layout=layout,
        attention=AttentionCall.of_layout(layout),
    )
