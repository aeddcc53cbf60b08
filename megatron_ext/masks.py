"""Attention masks of a model's layers: the window's mask, the document mask, and local layers.

    grid       token i sees j with floor(i/w)*w <= j <= i            segments of the window's grid
    sliding    token i sees j with i - w <= j <= i                   one segment, left_window w: w + 1 tokens
    sliding_w  token i sees j with i - w < j <= i                    one segment, left_window w - 1: w tokens
    local      as sliding_w with a separate window, in some layers (Gemma-3's pattern) or in all (Mistral's)

`sliding` is the paper's formula (arXiv 2503.15450), `sliding_w` its authors' code, which counts the token itself.
Under the document mask, no mask crosses the start of a token's document.

A local layer is bounded by both its window and the scheduled mask, as in the authors' code. With a local window of 3,
on a grid of w = 4, a token sees

    token              0  1  2  3 | 4  5  6  7
    scheduled from     0  0  0  0 | 4  4  4  4
    local from         0  0  0  1 | 4  4  4  5        fixed: 0 0 0 1 2 3 4 5, for any w
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_ext.arrays import Int64
from megatron_ext.layout import PackedLayout, build_layout, concatenate, segment_pairs

WindowMask = Literal["grid", "sliding", "sliding_w"]
Bounds = tuple[int, int | None]  # the grid, and the most tokens before itself that a token sees


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Describes a causal mask inside segments, limited to `left_window` tokens back."""

    layout: PackedLayout
    # maximum number of tokens before itself that a token sees; None for all of its segment
    left_window: int | None = None

    @property
    def context_sum(self) -> int:
        """The sum over tokens whose mean is the effective context: see `sum_of_contexts`."""
        return sum_of_contexts(self.layout.attention_pairs(self.left_window), self.layout.tokens)

    @property
    def effective_context(self) -> float:
        """C = `context_sum` / T, in tokens (arXiv 2503.15450, Table 8)."""
        return self.context_sum / self.layout.tokens

    def first_keys(self) -> Int64:
        """Return the first token that each token sees; int64 [T], non-decreasing."""
        layout = self.layout
        starts = np.repeat(layout.cu_seqlens[:-1].astype(np.int64), layout.lengths)
        if self.left_window is None:
            return starts
        return np.maximum(starts, np.arange(layout.tokens) - self.left_window)


@dataclass(frozen=True, eq=False)
class LayerMasks:
    """Attention masks of all layers in one micro-batch."""

    # the mask of layers that follow the window schedule, then the mask of local layers if any; a segment of the second
    # contains whole segments of the first
    by_kind: tuple[AttentionMask, ...]
    is_local_layer: tuple[bool, ...] = (False,)  # one flag per layer of the model, in order: the index of its mask

    @property
    def scheduled(self) -> AttentionMask:
        """The mask of layers that follow the window schedule."""
        return self.by_kind[0]

    @property
    def widest(self) -> PackedLayout:
        """The widest segments of any layer; positions that restart in them are valid for all layers."""
        return self.by_kind[-1].layout

    @property
    def context_sum(self) -> int:
        """The sum of `AttentionMask.context_sum` over all layers; C is its mean over tokens and layers."""
        return sum(layers * mask.context_sum for layers, mask in self.by_layers())

    def by_layers(self) -> Iterator[tuple[int, AttentionMask]]:
        """Return each mask with the number of layers that use it."""
        local_layers = sum(self.is_local_layer)
        return zip((len(self.is_local_layer) - local_layers, local_layers), self.by_kind, strict=False)

    def first_dependencies(self) -> Int64:
        """Return the first token on which the model's output at each token depends, through all layers; int64 [T].

        A token's output depends on the last layer's keys, which depend on the keys that they see one layer below, and
        so on: n layers with a left window of r look back n * r tokens, but never beyond the token's widest segment.
        With a left window of 2 in two layers (segments of 7 tokens):

            token                 0  1  2  3  4  5  6 | 7  8  9
            sees from             0  0  0  1  2  3  4 | 7  7  7
            its keys see from     0  0  0  0  0  1  2 | 7  7  7
        """
        first_keys = [mask.first_keys() for mask in self.by_kind]
        first = np.arange(len(first_keys[0]), dtype=np.int64)
        for is_local in reversed(self.is_local_layer):
            first = first_keys[is_local][first]
        return first


@dataclass(frozen=True)
class MaskOptions:
    """Mask options of a configuration."""

    document_mask: bool  # attention stays inside a document
    window_mask: WindowMask = "grid"  # how the window bounds attention
    # maximum number of tokens that a token of a local layer sees, including itself; None without local layers
    local_window: int | None = None
    global_every: int | None = None  # every n-th layer is not local; None if all are local
    num_layers: int = 1  # number of layers of the model
    local_fixed: bool = False  # the window does not bound local layers

    def is_local_layer(self, layer_number: int) -> bool:
        """Return whether a layer, counted from 1, is local."""
        return self.local_window is not None and (self.global_every is None or layer_number % self.global_every != 0)

    def bounds(self, row_length: int, window: int) -> tuple[Bounds, ...]:
        """Return what bounds scheduled layers, and what bounds local layers if there are any."""
        grid = window if self.window_mask == "grid" else row_length
        left_window = None
        # the window of a whole row bounds nothing: without a left window, backends use their plain causal kernel
        if window < row_length:
            left_window = {"sliding": window, "sliding_w": window - 1}.get(self.window_mask)
        scheduled = (grid, left_window)
        if self.local_window is None:
            return (scheduled,)
        local_left = self.local_window - 1
        if self.local_fixed:
            return scheduled, (row_length, local_left)
        if left_window is not None:
            return scheduled, (grid, min(local_left, left_window))
        if window <= self.local_window:  # a narrow grid bounds local layers, too
            return scheduled, (grid, None)
        return scheduled, (grid, local_left)

    def at(self, row_length: int, document_ends: Sequence[npt.NDArray[np.integer[Any]]], window: int) -> LayerMasks:
        """Build the masks of concatenated rows, each given by its documents' exclusive ends."""
        by_kind = self.bounds(row_length, window)
        documents = [ends if self.document_mask else () for ends in document_ends]
        layouts = {
            grid: concatenate([build_layout(row_length, ends, grid) for ends in documents])
            for grid in {grid for grid, _ in by_kind}
        }
        # where local layers have the same bounds, they share the mask and its plan
        masks = {bounds: AttentionMask(layouts[bounds[0]], bounds[1]) for bounds in by_kind}
        is_local = tuple(self.is_local_layer(number) for number in range(1, self.num_layers + 1))
        return LayerMasks(tuple(masks[bounds] for bounds in by_kind), is_local)

    def whole_row_context(self, row_length: int, window: int) -> float:
        """Compute C, the mean over tokens and layers, of a row that is one document, without arrays."""
        total = 0
        local_layers = sum(self.is_local_layer(number) for number in range(1, self.num_layers + 1))
        layers = (self.num_layers - local_layers, local_layers)
        for count, (grid, left_window) in zip(layers, self.bounds(row_length, window), strict=False):
            blocks, last_block = divmod(row_length, grid)
            pairs = blocks * segment_pairs(grid, left_window) + segment_pairs(last_block, left_window)
            total += count * sum_of_contexts(pairs, row_length)
        return total / (self.num_layers * row_length)


def sum_of_contexts(pairs: int, tokens: int) -> int:
    """Convert a number of (query, key) pairs to a sum over tokens whose mean is the effective context: 2 pairs - T.

    A segment of n tokens has n (n + 1) / 2 pairs and contributes n^2. Without a left window this is the sum of squared
    segment lengths, SkyLadder's measure; a token in the middle of its segment sees half as many keys.
    """
    return 2 * pairs - tokens
