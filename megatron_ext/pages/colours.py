"""The colours and the style of charts, as a PNG has them; a page gives each colour a light and a dark value."""

from __future__ import annotations

from typing import Any

BLUE, ORANGE, GREEN, PURPLE, RED, BROWN = "#2166ac", "#d95f02", "#1b8a6b", "#7a4fb3", "#c23b54", "#8a6a2f"
SKY, SLATE, PINK = "#3aa6c9", "#5b5f66", "#c0569f"
GREY, INK, LINE = "#6b7280", "#374151", "#e5e7eb"

STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.labelcolor": "#374151",
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "lines.linewidth": 1.8,
}

PAGE_COLOURS = {  # the name of each on a page
    "#000000": "ink",
    INK: "ink",
    "#4b5563": "soft",
    GREY: "soft",
    "#9ca3af": "soft",
    LINE: "line",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    PURPLE: "purple",
    RED: "red",
    BROWN: "brown",
    SKY: "sky",
    SLATE: "slate",
    PINK: "pink",
}
