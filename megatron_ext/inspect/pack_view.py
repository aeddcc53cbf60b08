"""Show one packed row, as text or a PNG: its documents and segments, the rank of each token, and the exchange.

A row of up to `SHORT` tokens is drawn token by token, as in the docstrings of `layout` and `exchange_plan`:

    token      0  1  2  3  4  5  6  7  8  9 10 11
    document   a  a  a  b  b  b  b  b  b  b  c  c
    segment    0  0  0  1  2  2  2  2  3  3  4  4
    rank       0  0  0  0  0  0  1  1  1  1  1  1
    keys       1  2  3  1  1  2  3  4  1  2  1  2

For a longer row the documents are listed.

The PNG has keys across and queries down. A pair has the color of the query's rank, and is pale if the key is fetched
from another rank. For a row of more than `CELLS` tokens, that many evenly spaced tokens are drawn.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ext.arrays import Float64, Int64
from megatron_ext.context_parallel import CPPlan, plan
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.layout import PackedLayout, build_layout
from megatron_ext.masks import AttentionMask

SHORT = 128  # the longest row that is drawn token by token
WIDTH = 100  # characters of a line, about
_LABEL = 9  # characters of a line's name
_TEXT = 10  # characters of a token's text
CELLS = 1024  # cells of a long row, in each direction
PALE = 0.35  # tone, 0 (white) to 1, of a key of another rank
BAND = 0.045  # height of a band above the mask, in rows
_STRIPES = np.array([[0.71, 0.74, 0.78], [0.87, 0.89, 0.91]])  # alternating colors of documents and segments


@dataclass(frozen=True, eq=False)
class PackView:
    """One row of T tokens; made by `view_row`."""

    documents: Int64  # [documents+1], borders from 0 to T; the last document may continue in another row
    window: int  # of the grid
    document_mask: bool  # whether documents bound attention
    policy: str  # as requested, perhaps "auto"
    plan: CPPlan  # the segments, the tokens of each rank, and the keys it fetches

    @property
    def layout(self) -> PackedLayout:
        return self.plan.layout

    @property
    def tokens(self) -> int:
        return self.layout.tokens

    @property
    def ranks(self) -> int:
        return self.plan.cp_size

    @cached_property
    def owner(self) -> Int64:
        """int64 [T]: the rank that holds each token."""
        pieces = self.plan.pieces
        return np.repeat(pieces.rank, pieces.end - pieces.start)

    @cached_property
    def keys(self) -> Int64:
        """int64 [T]: C_i, the number of keys that token i sees, including itself."""
        return np.arange(1, self.tokens + 1) - AttentionMask(self.layout).first_keys()


def view_row(
    row_length: int,
    document_ends: Sequence[int] | npt.NDArray[np.integer],
    *,
    window: int | None = None,
    document_mask: bool = True,
    cp_size: int = 1,
    policy: str = "auto",
) -> PackView:
    """Split and plan a row of `row_length` tokens. Raises what `build_layout` and `plan` raise.

    Args:
        document_ends: exclusive ends in 0..row_length, in any order.
        window: of the grid; None for the whole row.
        document_mask: whether documents bound attention; they are shown in any case.
        cp_size, policy: see `context_parallel.plan`.
    """
    documents = build_layout(row_length, document_ends, max(row_length, 1)).cu_seqlens.astype(np.int64)
    if window is None:
        window = row_length
    if not document_mask:
        document_ends = ()
    layout = build_layout(row_length, document_ends, window)
    return PackView(documents, window, document_mask, policy, plan(layout, cp_size, policy))


def describe(view: PackView, texts: Sequence[str] | None = None) -> str:
    """Return the row as text, with tables of its numbers, and with the `texts` of its T tokens if it is short.

    Raises:
        UserError: texts for a row that is not short.
    """
    if texts is not None and view.tokens > SHORT:
        raise UserError(
            f"text: got a row of {view.tokens:,} tokens, needs one of up to {SHORT}; "
            "shorten --seq-length or leave --text out"
        )
    parts = [headline(view)]
    if view.tokens > SHORT:
        parts.append(textwrap.fill(f"documents {_intervals(view.documents[:-1], view.documents[1:])}", WIDTH))
    else:
        parts.append(_token_text(view, texts))
        if view.ranks > 1:
            parts += [_rank_text(view, rank) for rank in range(view.ranks)]
    context = AttentionMask(view.layout).effective_context
    facts = f"effective context {context:,.2f}, keys per token {view.keys.mean():,.2f}"
    parts.append(f"longest segment {view.layout.lengths.max():,}, {facts}")
    if view.ranks > 1:
        parts.append(_rank_table(view))
    return "\n\n".join(parts)


def headline(view: PackView) -> str:
    """Describe the row in one line."""
    facts = [
        f"{_count(view.tokens, 'token')}: {_count(len(view.documents) - 1, 'document')}",
        _count(view.layout.segments, "segment"),
    ]
    if view.window < view.tokens:
        facts.append(f"window {view.window:,}")
    facts.append("document mask" if view.document_mask else "no document mask")
    if view.ranks > 1:
        facts += [f"{view.ranks} ranks", view.plan.policy.value]
        if view.policy == "auto":
            facts[-1] += " (auto)"
    return ", ".join(facts)


def document_name(number: int) -> str:
    """Name a document a, b, ... z, aa, ab, ... like spreadsheet columns."""
    name = ""
    while number >= 0:
        number, letter = divmod(number, 26)
        number -= 1
        name = chr(ord("a") + letter) + name
    return name


def _count(number: int, noun: str) -> str:
    if number != 1:
        noun += "s"
    return f"{number:,} {noun}"


def _token_text(view: PackView, texts: Sequence[str] | None) -> str:
    token = np.arange(view.tokens)
    documents = np.repeat(np.arange(len(view.documents) - 1), np.diff(view.documents))
    lines: dict[str, Iterable[object]] = {
        "token": token,
        "document": map(document_name, documents.tolist()),
        "segment": np.repeat(np.arange(view.layout.segments), view.layout.lengths),
    }
    if view.ranks > 1:
        lines["rank"] = view.owner
    lines["keys"] = view.keys
    if texts is not None:
        lines["text"] = map(_token_cell, texts)
    cells = {name: list(map(str, values)) for name, values in lines.items()}
    width = 1 + max(2, *(len(cell) for row in cells.values() for cell in row))
    across = (WIDTH - _LABEL) // width
    if across > 8:
        across -= across % 8
    blocks = []
    for first in range(0, view.tokens, across):
        block = [
            name.ljust(_LABEL) + "".join(cell.rjust(width) for cell in row[first : first + across])
            for name, row in cells.items()
        ]
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def _token_cell(text: str) -> str:
    """Return a token's text with visible spaces, shortened to `_TEXT` characters."""
    printable = repr(text)[1:-1].replace(" ", "\N{MIDDLE DOT}")
    if len(printable) > _TEXT:
        printable = f"{printable[: _TEXT - 1]}\N{HORIZONTAL ELLIPSIS}"
    return printable


def _rank_text(view: PackView, rank: int) -> str:
    rank_plan = view.plan.of_rank(rank)
    pieces = view.plan.pieces_of(rank)
    fetched = [
        f"{_runs(tokens)} from rank {source}" for source, tokens in enumerate(rank_plan.tokens_received) if tokens.size
    ]
    facts = [
        "pieces " + _intervals(view.plan.pieces.start[pieces], view.plan.pieces.end[pieces]),
        f"cu_seqlens_q  = {rank_plan.cu_seqlens_q.tolist()}",
        f"cu_seqlens_kv = {rank_plan.cu_seqlens_kv.tolist()}",
        f"fetches {', '.join(fetched) or 'nothing'}",
    ]
    indent = " " * (_LABEL + 2)
    folded = [textwrap.fill(fact, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ") for fact in facts]
    return f"rank {rank}".ljust(len(indent)) + "\n".join(folded).removeprefix(indent)


def _intervals(starts: Int64, ends: Int64) -> str:
    return " ".join(f"[{start},{end})" for start, end in zip(starts.tolist(), ends.tolist(), strict=True))


def _runs(tokens: Int64) -> str:
    """Format ascending tokens as intervals: [4, 5, 6, 9] -> "[4,7) [9,10)"."""
    borders = np.flatnonzero(np.diff(tokens) != 1) + 1
    return _intervals(tokens[np.append(0, borders)], tokens[np.append(borders, len(tokens)) - 1] + 1)


def _rank_table(view: PackView) -> str:
    moved = view.plan.rows_moved
    columns = zip(view.plan.pairs.tolist(), moved.sum(axis=1).tolist(), moved.sum(axis=0).tolist(), strict=True)
    lines = [f"{'rank':>4} {'tokens':>9} {'pairs':>15} {'/ mean':>7} {'rows sent':>10} {'received':>10}"]
    for rank, (pairs, sent, received) in enumerate(columns):
        relative = pairs / view.plan.pairs.mean()
        lines.append(f"{rank:4} {view.tokens // view.ranks:9,} {pairs:15,} {relative:7.3f} {sent:10,} {received:10,}")
    total = int(moved.sum())
    gathered = view.tokens * (view.ranks - 1)
    share = f"{total / gathered:.1%} of the {gathered:,} of an all-gather of the row"
    return "\n".join([*lines, f"{_count(total, 'row')} exchanged, {share}"])


class _Band(NamedTuple):
    """A strip of labelled spans above the mask."""

    name: str
    borders: npt.NDArray[np.integer]  # [spans+1]
    colors: Float64  # [spans, 3], RGB
    labels: list[str]


def _bands(view: PackView) -> list[_Band]:
    """Return the bands of segments, documents and, if there are several, ranks, the lowest first."""
    segments = np.arange(view.layout.segments)
    documents = np.arange(len(view.documents) - 1)
    bands = [
        _Band("segment", view.layout.cu_seqlens, _STRIPES[segments % 2], list(map(str, segments))),
        _Band("document", view.documents, _STRIPES[documents % 2], list(map(document_name, documents.tolist()))),
    ]
    if view.ranks > 1:
        starts = np.append(0, np.flatnonzero(np.diff(view.owner)) + 1)
        owners = view.owner[starts]
        pale = (1 + rank_colors(view.ranks)[owners]) / 2  # below dark labels
        bands.insert(0, _Band("rank", np.append(starts, view.tokens), pale, list(map(str, owners))))
    return bands


def _draw_band(axis: Any, band: _Band, top: float, length: int) -> None:
    """Draw the spans of a band of a row of `length` tokens, and the labels that fit into them."""
    spans = [(start, end - start) for start, end in pairwise(band.borders.tolist())]
    axis.broken_barh(spans, (top, 0.9 * BAND * length), facecolors=band.colors)
    middle = top + 0.45 * BAND * length
    for (start, size), label in zip(spans, band.labels, strict=True):
        if size > 0.015 * length * len(label):
            axis.text(start + size / 2, middle, label, fontsize=8, ha="center", va="center_baseline")


def write_pack(view: PackView, output: Path) -> Path:
    """Draw the mask of one row, below bands of its documents, segments and ranks, to a PNG file; return its path."""
    from matplotlib.figure import Figure  # takes a second to import
    from matplotlib.patches import Patch

    length = view.tokens
    bands = _bands(view)
    figure = Figure(figsize=(8.0, 8.6), layout="constrained")
    title = headline(view)
    figure.suptitle(title, fontsize=min(12, 900 / len(title)), fontweight="bold")
    axis = figure.add_subplot()
    axis.imshow(mask_image(view), extent=(0, length, length, 0))
    if length <= SHORT:
        axis.hlines(range(length), 0, length, color="white", linewidth=0.4)
        axis.vlines(range(length), 0, length, color="white", linewidth=0.4)
    if view.ranks > 1:
        patches = [Patch(color="#4b5563", alpha=tone, linewidth=0) for tone in (1.0, PALE)]
        names = ["key on the rank of its query", "key fetched from another rank"]
        above = len(bands) + 0.2
        axis.legend(patches, names, loc="upper right", bbox_to_anchor=(1, 1 / (1 + above * BAND)))
    ticks = list(range(0, length + 1, max(length // 8, 1)))
    marks = [(float(tick), f"{tick:,}") for tick in ticks]
    top = 0.0
    for number, band in enumerate(bands, start=1):
        top = -(number + 0.2) * BAND * length
        _draw_band(axis, band, top, length)
        marks.append((top + BAND * length / 2, band.name))
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_yticks(*zip(*marks, strict=True))
    axis.tick_params(length=0)
    axis.set(xlim=(0, length), ylim=(length, top), xlabel="key (token)", ylabel="query (token)")
    axis.spines[:].set_visible(False)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as aside:
        figure.savefig(aside, dpi=110, format="png")
    return output


def mask_image(view: PackView) -> Float64:
    """Return the mask as RGB, float64 [n, n, 3] of queries and keys, n = min(T, CELLS)."""
    cells = min(view.tokens, CELLS)
    token = (2 * np.arange(cells) + 1) * view.tokens // (2 * cells)  # the middle of each cell
    first = token - view.keys[token] + 1
    sees = (token[None, :] <= token[:, None]) & (token[None, :] >= first[:, None])
    owner = view.owner[token]
    tone = np.where(owner[:, None] == owner[None, :], 1.0, PALE) * sees
    image: Float64 = 1 - (1 - rank_colors(view.ranks)[owner][:, None]) * tone[..., None]
    return image


def rank_colors(ranks: int) -> Float64:
    """Choose a color for each rank; float64 [ranks, 3], RGB."""
    from matplotlib import colormaps

    colors = colormaps["turbo"](np.linspace(0.05, 0.95, ranks))
    if ranks <= 10:  # colors that differ more
        colors = colormaps["tab10"](np.arange(ranks))
    rgb: Float64 = colors[:, :3]
    return rgb
