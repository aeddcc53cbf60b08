"""Draw the attention mask of one packed row, with its documents, segments and ranks, as a PNG.

Keys are across, queries down. A pair has the color of the query's rank, and is pale if the key is fetched from another
rank. Of a row of more than `CELLS` tokens, that many evenly spaced tokens are drawn.
"""

from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_ext.arrays import Float64
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.inspect.pack_view import SHORT, PackView, document_name, headline

CELLS = 1024  # cells of a long row, in each direction
PALE = 0.35  # tone, 0 (white) to 1, of a key of another rank
BAND = 0.045  # height of a band above the mask, in rows
_STRIPES = np.array([[0.71, 0.74, 0.78], [0.87, 0.89, 0.91]])  # alternating colors of documents and segments


def write_pack(view: PackView, output: Path) -> Path:
    """Draw the mask of one row, below bands of its documents, segments and ranks, to a PNG file; return its path.

    Raises:
        UserError: `output` does not end in .png.
    """
    if output.suffix.lower() != ".png":
        raise UserError(f"output: got {str(output)!r}, needs a file name that ends in .png")
    length, documents, segments = view.tokens, len(view.documents) - 1, view.layout.segments
    figure = Figure(figsize=(8.0, 8.6), layout="constrained")
    title = headline(view)
    figure.suptitle(title, fontsize=min(12, 900 / len(title)), fontweight="bold")
    axis = figure.add_subplot()
    axis.imshow(mask_image(view), extent=(0, length, length, 0))
    if length <= SHORT:
        axis.hlines(range(length), 0, length, color="white", linewidth=0.4)
        axis.vlines(range(length), 0, length, color="white", linewidth=0.4)
    # the borders, colors and labels of each band, the lowest first
    bands: list[tuple[str, npt.NDArray[np.integer], Float64, list[str]]] = [
        ("segment", view.layout.cu_seqlens, _STRIPES[np.arange(segments) % 2], list(map(str, range(segments)))),
        ("document", view.documents, _STRIPES[np.arange(documents) % 2], list(map(document_name, range(documents)))),
    ]
    if view.ranks > 1:
        starts = np.append(0, np.flatnonzero(np.diff(view.owner)) + 1)
        owners = view.owner[starts]
        pale = (1 + rank_colors(view.ranks)[owners]) / 2  # below dark labels
        bands.insert(0, ("rank", np.append(starts, length), pale, list(map(str, owners))))
        patches = [Patch(color="#4b5563", alpha=tone, linewidth=0) for tone in (1.0, PALE)]
        names = ["key on the rank of its query", "key fetched from another rank"]
        above = len(bands) + 0.2
        axis.legend(patches, names, loc="upper right", bbox_to_anchor=(1, 1 / (1 + above * BAND)))
    ticks = list(range(0, length + 1, max(length // 8, 1)))
    marks = [(float(tick), f"{tick:,}") for tick in ticks]
    top = 0.0
    for number, (name, borders, colors, labels) in enumerate(bands, start=1):
        top = -(number + 0.2) * BAND * length
        spans = [(start, end - start) for start, end in pairwise(borders.tolist())]
        axis.broken_barh(spans, (top, 0.9 * BAND * length), facecolors=colors)
        for (start, size), label in zip(spans, labels, strict=True):
            if size > 0.015 * length * len(label):
                centre = start + size / 2, top + 0.45 * BAND * length
                axis.text(*centre, label, fontsize=8, ha="center", va="center_baseline")
        marks.append((top + BAND * length / 2, name))
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
    colormap = matplotlib.colormaps["tab10" if ranks <= 10 else "turbo"]
    colors: Float64 = colormap(np.arange(ranks) if ranks <= 10 else np.linspace(0.05, 0.95, ranks))[:, :3]
    return colors
