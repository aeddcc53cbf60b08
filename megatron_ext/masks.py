"""Which tokens the layers of a model see: the window's mask, a document mask, and local layers of their own.

    grid       token i sees j with floor(i/w)*w <= j <= i            segments of the window's grid
    sliding    token i sees j with i - w <= j <= i                   one segment, a reach of w: w + 1 tokens
    sliding_w  token i sees j with i - w < j <= i                    one segment, a reach of w - 1: w tokens
    local      as sliding_w, with a fixed window, in some of the layers (Gemma-3's pattern) or in all (Mistral's)

`sliding` is the paper's formula (arXiv 2503.15450), `sliding_w` its authors' code, which counts the token itself.
Under the document mask none of them looks beyond the start of a token's document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_ext.layout import PackedLayout, build_layout, concatenate

WindowMask = Literal["grid", "sliding", "sliding_w"]


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """A token sees its own segment, causally, and no further back than `reach` tokens.

    Attributes:
        layout: the segments.
        reach: tokens before itself that a token sees at most; None for all of its segment.
    """

    layout: PackedLayout
    reach: int | None = None

    @property
    def context_sum(self) -> int:
        """2 pairs - T; without a reach, the sum of squared segment lengths. Over T it is the effective context."""
        return 2 * self.layout.attention_pairs(self.reach) - self.layout.tokens


@dataclass(frozen=True, eq=False)
class LayerMasks:
    """What the layers see in one micro-batch.

    Attributes:
        scheduled: what the layers see that follow the window's schedule.
        local: what local layers see; None where there are none. Its segments contain those of `scheduled`.
        layers: of the model.
        local_layers: how many of them are local.
    """

    scheduled: AttentionMask
    local: AttentionMask | None = None
    layers: int = 1
    local_layers: int = 0

    @property
    def widest(self) -> PackedLayout:
        """The segments beyond which no layer sees; positions that restart in them are right for all layers."""
        return (self.local or self.scheduled).layout

    @property
    def effective_context(self) -> float:
        """The mean over tokens and layers, in tokens (arXiv 2503.15450, Table 8)."""
        return self.context_sum / (self.layers * self.widest.tokens)

    @property
    def context_sum(self) -> int:
        """The sum of `AttentionMask.context_sum` over all layers."""
        return sum(layers * mask.context_sum for layers, mask in self.by_layers())

    def by_layers(self) -> Iterator[tuple[int, AttentionMask]]:
        """Each mask with the number of layers that it holds for."""
        yield self.layers - self.local_layers, self.scheduled
        if self.local is not None:
            yield self.local_layers, self.local


@dataclass(frozen=True)
class MaskOptions:
    """The masks that a configuration describes.

    Attributes:
        document_mask: attention stays inside a document.
        window_mask: how the window bounds attention.
        local_window: tokens that a token of a local layer sees at most, itself included; None for no local layer.
        global_every: every n-th layer is not local; None where all are.
        num_layers: of the model.
    """

    document_mask: bool
    window_mask: WindowMask = "grid"
    local_window: int | None = None
    global_every: int | None = None
    num_layers: int = 1

    def is_local(self, layer_number: int) -> bool:
        """Whether a layer, counted from 1, is local."""
        return self.local_window is not None and (self.global_every is None or layer_number % self.global_every != 0)

    def reach(self, window: int) -> int | None:
        """Tokens before itself that a window lets a token see; None on the grid, whose segments bound it."""
        return {"grid": None, "sliding": window, "sliding_w": window - 1}[self.window_mask]

    def at(self, row_length: int, document_ends: Sequence[npt.NDArray[np.integer[Any]]], window: int) -> LayerMasks:
        """The masks of rows laid end to end, each with its documents' exclusive ends."""
        documents = [ends if self.document_mask else () for ends in document_ends]

        def mask(grid: int, reach: int | None) -> AttentionMask:
            rows = [build_layout(row_length, ends, grid) for ends in documents]
            return AttentionMask(concatenate(rows), reach)

        if self.window_mask == "grid":
            scheduled = mask(window, None)
        else:
            scheduled = mask(row_length, self.reach(window) if window < row_length else None)
        if self.local_window is None:
            return LayerMasks(scheduled, None, self.num_layers)
        local_layers = sum(self.is_local(number) for number in range(1, self.num_layers + 1))
        return LayerMasks(scheduled, mask(row_length, self.local_window - 1), self.num_layers, local_layers)
