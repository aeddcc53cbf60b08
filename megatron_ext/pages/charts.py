"""Draws a chart as an SVG whose colours are its page's, so that it can be dark or light.

Text stays text, sized for a card of 330 to 420 pixels. matplotlib draws; what it writes for a file of its own (names of
XML, a style sheet, identifiers that the next chart would repeat) is taken out.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_ext.pages.colours import INK, PAGE_COLOURS, STYLE

WIDTH, HEIGHT = 4.5, 3.0  # inches of 72 units: about the pixels of a card
CARD: dict[Any, Any] = STYLE | {"svg.fonttype": "none", "text.color": INK, "text.parse_math": False}


@dataclass(frozen=True)
class Chart:
    """Holds a chart of a page.

    Attributes:
        title: its heading.
        caption: a line below it; may be empty.
        svg: to stand in an HTML page.
        words: what it shows, for those who cannot see it.
    """

    title: str
    caption: str
    svg: str
    words: str


def draw(title: str, paint: Callable[[Axes], None], *, caption: str = "", height: float = HEIGHT) -> Chart:
    """Draw one chart.

    Args:
        title: its heading.
        paint: fills its axes.
        caption: a line below the heading.
        height: in inches; `WIDTH` wide.
    """
    with matplotlib.rc_context(CARD | {"svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axis = figure.add_subplot()
        paint(axis)
        axis.set_title("", loc="left")  # the page's heading says it
        text = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
        scale = "; a logarithmic axis" if axis.get_yscale() == "log" else ""
        words = f"{title}: {axis.get_ylabel() or 'value'} over {axis.get_xlabel()}{scale}"
    return Chart(title, caption, for_page(text.getvalue()), words)


def for_page(svg: str) -> str:
    """Make matplotlib's SVG file an element of an HTML page, as the module says.

    Args:
        svg: the text of the file; its own size is dropped, so the page's style decides.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    for colour, name in PAGE_COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", svg)
    return svg.replace("<svg ", '<svg role="img" ', 1)
