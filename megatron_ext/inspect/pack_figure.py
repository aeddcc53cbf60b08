"""Draw one packed row: its attention mask by rank, and the computation and communication of each rank.

The mask has keys across and queries down, in the color of the query's rank, pale if the key is fetched from another
rank. A long row is drawn in `CELLS` x `CELLS` cells, whose pairs are counted without listing them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron_ext.arrays import Float64, Int64
from megatron_ext.inspect.pack_view import SHORT, PackView, column_edges, document_name, headline
from megatron_ext.monitoring.figures import GREY, PURPLE, RUN_COLOURS, STYLE, write_png

DPI = 110
CELLS = 512  # cells of a long row, in each direction
PALE = 0.35  # tone, 0 (white) to 1, of a cell whose keys all come from other ranks
_STRIPES = ("#b6bcc6", "#dfe3e8")  # alternating colors of documents and segments
_BANDS = (-0.165, -0.11, -0.055)  # upper ends, in rows; the lowest is next to the mask
_BAND = 0.045  # height, in rows
_LUMINANCE = np.array([0.299, 0.587, 0.114])  # weights of red, green and blue
_GLYPH = 0.015  # width of a character, in rows
_FEW_RANKS = 8  # up to here the matrix of moved rows is annotated with numbers

Colours = Float64


class Cells(NamedTuple):
    """The mask in n x n cells of queries (down) and keys (across).

    Attributes:
        seen: int64 [n, n], pairs of a query and a visible key.
        own: int64 [n, n], pairs whose key is on the query's rank.
        owner: int64 [n, n], the rank with the most pairs in `seen`.
    """

    seen: Int64
    own: Int64
    owner: Int64


class _Band(NamedTuple):
    """Intervals in a strip above the mask: int64 borders, float [intervals, 3] colors, and a label for each."""

    name: str
    borders: Int64
    colours: Colours
    label: Callable[[int], str]


def write_pack(view: PackView, output: Path | str) -> Path:
    """Draw the row to the PNG file `output`, written atomically; return its path.

    Raises:
        UserError: `output` does not end in .png.
    """
    return write_png(lambda: draw_pack(view), output, DPI)


def draw_pack(view: PackView) -> Figure:
    """Draw the figure of one row: bands and mask, next to keys per token, pairs and moved rows per rank."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 7.6), layout="constrained")
        title = headline(view)
        figure.suptitle(title, fontsize=min(13, 1200 / len(title)), fontweight="bold", x=0.012, ha="left")
        grid = GridSpec(3, 2, figure=figure, width_ratios=(2.1, 1.0), height_ratios=(1.0, 1.0, 1.5))
        colours = rank_colours(view.ranks)
        _mask_panel(figure.add_subplot(grid[:, 0]), view, colours)
        if view.ranks == 1:
            _keys_panel(figure.add_subplot(grid[:2, 1]), view)
            return figure
        _keys_panel(figure.add_subplot(grid[0, 1]), view)
        _pairs_panel(figure.add_subplot(grid[1, 1]), view, colours)
        _moved_panel(figure.add_subplot(grid[2, 1]), view)
        return figure


def rank_colours(ranks: int) -> Colours:
    """Choose a color for each rank; float [ranks, 3], RGB."""
    if ranks <= len(RUN_COLOURS):
        return np.array([to_rgb(colour) for colour in RUN_COLOURS[:ranks]])
    return matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, ranks))[:, :3]


# The mask


def mask_cells(view: PackView, cells: int) -> Cells:
    """Count the pairs of each cell; O(T + ranks cells^2), whatever the number of pairs."""
    edges = column_edges(view.tokens, cells)
    everything = np.arange(view.tokens + 1, dtype=np.int64)
    seen, own, most, owner = (np.zeros((cells, cells), dtype=np.int64) for _ in range(4))
    for rank in range(view.ranks):
        query = view.plan.rows[rank]
        first, row = query - view.keys[query] + 1, np.searchsorted(edges, query, side="right") - 1
        held = np.concatenate([[0], np.cumsum(view.owner == rank)])
        pairs = _pairs(row, first, query + 1, edges, everything)
        own += _pairs(row, first, query + 1, edges, held)
        owner[pairs > most] = rank
        most = np.maximum(most, pairs)
        seen += pairs
    return Cells(seen, own, owner)


def _pairs(row: Int64, first: Int64, end: Int64, edges: Int64, before: Int64) -> Int64:
    """Count the keys in each cell, int64 [n, n], for queries in cell row `row` that see the keys [first, end).

    max(0, x - first) - max(0, x - end) keys of [first, end) are before x. Each of the two terms, summed over the
    queries of a row, is a count times x minus a sum, for x at the edges of the cells.

    Args:
        before: int64 [T+1], number of counted keys before each token.
    """
    n = len(edges) - 1

    def summed(key: Int64) -> Int64:
        cell = row * (n + 1) + np.searchsorted(edges, key)
        counts = np.bincount(cell, minlength=n * (n + 1)).reshape(n, n + 1)
        sums = np.bincount(cell, before[key], n * (n + 1)).reshape(n, n + 1).astype(np.int64)
        return counts.cumsum(axis=1) * before[edges] - sums.cumsum(axis=1)

    return np.diff(summed(first) - summed(end), axis=1)


def _mask_panel(axis: Axes, view: PackView, colours: Colours) -> None:
    length = view.tokens
    cells = min(length, CELLS)
    mask = mask_cells(view, cells)
    with np.errstate(invalid="ignore"):  # 0 / 0 if no query sees a key
        tone = PALE + (1 - PALE) * mask.own / mask.seen
    tone[mask.seen == 0] = 0.0
    on_white = 1 - (1 - colours[mask.owner]) * tone[..., None]
    axis.imshow(on_white, extent=(0, length, length, 0), zorder=1)
    if length <= SHORT:
        lines = np.arange(length + 1)
        axis.hlines(lines, 0, length, color="white", linewidth=0.4, zorder=2)
        axis.vlines(lines, 0, length, color="white", linewidth=0.4, zorder=2)
    axis.plot([0, 0, length, length, 0], [0, length, length, 0, 0], color="#9ca3af", linewidth=0.8, clip_on=False)
    bands = _bands(view, colours)
    for band, top in zip(bands, _BANDS[-len(bands) :], strict=True):
        _draw_band(axis, band, top, column_edges(length, cells))
    _mask_ticks(axis, length, [band.name for band in bands])
    if view.ranks > 1:
        patches = [Patch(color="#4b5563", alpha=tone, linewidth=0) for tone in (1.0, PALE)]
        axis.legend(
            patches,
            ["key on the rank of its query", "key fetched from another rank"],
            loc="upper right",
            bbox_to_anchor=(length, 0.02 * length),
            bbox_transform=axis.transData,
        )


def _mask_ticks(axis: Axes, length: int, bands: list[str]) -> None:
    tops = _BANDS[-len(bands) :]
    step = 2 ** max(0, (length - 1).bit_length() - 3)
    ticks = list(range(0, length + 1, step))
    labels = [_tokens(tick) for tick in ticks]
    axis.set_xticks(ticks, labels)
    axis.set_yticks([*((top + _BAND / 2) * length for top in tops), *ticks], [*bands, *labels])
    axis.tick_params(length=0)
    axis.set_aspect("equal")
    axis.set_xlim(0, length)
    axis.set_ylim(length, tops[0] * length)
    axis.set_xlabel("key (token)")
    axis.set_ylabel("query (token)")
    axis.yaxis.set_label_coords(-0.095, 0.43)
    axis.grid(False)
    axis.spines[:].set_visible(False)


def _bands(view: PackView, colours: Colours) -> list[_Band]:
    stripes = np.array([to_rgb(colour) for colour in _STRIPES])
    segments = view.layout.cu_seqlens.astype(np.int64)
    bands = [
        _Band("document", view.documents, stripes[np.arange(len(view.documents) - 1) % 2], document_name),
        _Band("segment", segments, stripes[np.arange(view.layout.segments) % 2], str),
    ]
    if view.ranks > 1:
        changes = np.flatnonzero(np.diff(view.owner)) + 1
        runs = np.concatenate([[0], changes, [view.tokens]])
        owners = view.owner[runs[:-1]]
        bands.append(_Band("rank", runs, colours[owners], lambda run: str(owners[run])))
    return bands


def _draw_band(axis: Axes, band: _Band, top: float, edges: Int64) -> None:
    length, middle = int(edges[-1]), top + _BAND / 2
    lengths = np.diff(band.borders)
    tints = np.repeat(band.colours, lengths, axis=0)
    mean = np.add.reduceat(tints, edges[:-1]) / np.diff(edges)[:, None]
    axis.imshow(mean[None], extent=(0, length, (top + _BAND) * length, top * length), zorder=1)
    for number in np.flatnonzero(lengths > _GLYPH * length).tolist():
        label = band.label(number)
        if lengths[number] > _GLYPH * length * len(label):
            centre = (band.borders[number] + lengths[number] / 2, middle * length)
            ink = "white" if band.colours[number] @ _LUMINANCE < 0.6 else "#1f2937"
            axis.text(*centre, label, color=ink, fontsize=8, ha="center", va="center_baseline")


# Beside it


def _keys_panel(axis: Axes, view: PackView) -> None:
    buckets = view.key_histogram()
    shares = [100 * bucket.tokens / view.tokens for bucket in buckets]
    axis.bar(range(len(buckets)), shares, color=PURPLE, width=0.8)
    axis.set_title("Keys that a token sees")
    step = -(-len(buckets) // 8)
    axis.set_xticks(range(0, len(buckets), step), [_tokens(bucket.high) for bucket in buckets[::step]])
    axis.set_xlabel("keys, up to")
    axis.set_ylabel("% of tokens")
    axis.grid(False, axis="x")


def _pairs_panel(axis: Axes, view: PackView, colours: Colours) -> None:
    pairs = view.plan.pairs
    axis.bar(range(view.ranks), pairs / pairs.mean(), color=colours, width=0.8)
    axis.set_xlim(-0.6, view.ranks - 0.4)
    axis.axhline(1.0, color=GREY, linewidth=1.2, linestyle="--")
    axis.set_title("Attention pairs of a rank")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axis.set_xlabel(f"rank; at most {pairs.max() / pairs.mean():.3f} x mean")
    axis.set_ylabel("x mean")
    axis.grid(False, axis="x")


def _moved_panel(axis: Axes, view: PackView) -> None:
    moved = view.plan.rows_moved
    axis.imshow(moved, cmap="Blues", vmin=0, vmax=max(1, moved.max()))
    axis.set_title("Rows of keys and values moved")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axis.set_xlabel(f"to rank; in all {moved.sum() / view.gathered_rows:.1%} of an all-gather")
    axis.set_ylabel("from rank")
    axis.grid(False)
    if view.ranks > _FEW_RANKS:
        axis.figure.colorbar(axis.images[0], ax=axis, label="rows", format="{x:,.0f}")
        return
    for (source, destination), rows in np.ndenumerate(moved):
        ink = "white" if rows > 0.6 * moved.max() else "#374151"
        text = _tokens(int(rows)) if source != destination else "\N{MIDDLE DOT}"
        axis.text(destination, source, text, ha="center", va="center", color=ink, fontsize=9)


def _tokens(count: int) -> str:
    """Write a count as 96, 1.5K, 512K, 2M, in powers of 1024."""
    for size, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if count >= size:
            return f"{round(count / size, 1):g}{letter}"
    return str(count)
