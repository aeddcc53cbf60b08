"""A chart takes its colours from its page, and its names from no other chart."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.axes import Axes

from megatron_ext.pages.charts import draw
from megatron_ext.pages.colours import PAGE_COLOURS
from megatron_ext.pages.page import write_page

BODY = '{{ title }}{% include "charts.html.jinja" %}{{ text }}'
PAGE = '{% extends "page.html.jinja" %}{% block main %}' + BODY + "{% endblock %}"


def all_colours(axis: Axes) -> None:
    for colour in PAGE_COLOURS:
        axis.plot([1, 2], [3, 4], "o-", color=colour)
    axis.set_xlabel("a < b")


def test_every_colour_has_a_light_and_a_dark_value(tmp_path: Path) -> None:
    chart = draw("lines", all_colours, caption="all <colours>")
    path = tmp_path / "a" / "page.html"
    (template := tmp_path / "template.html.jinja").write_text(PAGE)
    text = write_page(path, template, title="<title> & more", charts=[chart], text="c < d").read_text()
    for escaped in ("&lt;title&gt; &amp; more", "all &lt;colours&gt;", "c &lt; d", "a &lt; b"):
        assert escaped in text
    for colour, name in PAGE_COLOURS.items():
        assert colour not in chart.svg
        assert f"var(--{name})" in chart.svg
        assert len(re.findall(rf"--{name}: #", text)) == 2


def test_charts_of_one_page_share_no_name() -> None:
    first, second = (draw(title, all_colours).svg for title in "ab")
    names = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (first, second)]
    assert names[0]
    assert names[1]
    assert not names[0] & names[1]
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', first)) == names[0]


def test_the_same_chart_is_the_same_text() -> None:
    assert draw("a", all_colours) == draw("a", all_colours)
