"""The page of pictures: one file with nothing outside it, its colours those of the page, its text escaped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_ext.errors import UserError
from megatron_ext.pages.colours import PAGE_COLOURS
from megatron_ext.planning.pictures import rehearsed_chart

ROOT = Path(__file__).resolve().parents[2]
GIVEN = ("--gpus", "16", "--gpu", "h100", "--config", "examples/configs/skyladder/skyladder_1b_8k.yaml")
PLAN_TITLES = [
    "Step time by the row's length",
    "Step time through the window's phases",
    "Cost by the number of cards",
    "One step",
    "Memory over the step",
]
SIMULATED = ("--documents", "drawn", "--moments", "2", "--steps", "1", "--most-rows", "4")
SIMULATED_TITLES = ["Where a step's seconds go", "One step", "Memory over the step", "Goodput by checkpoint interval"]


class Page(HTMLParser):
    """Lists the headings of charts, and all tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def check_alone(text: str) -> None:
    for tag, attributes in Page(text).tags:
        assert tag not in ("script", "link", "img", "iframe"), tag
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
    assert not re.search(r"url\((?!#)", text)


@pytest.mark.parametrize(
    ("tool", "words", "titles"),
    [("plan_run", (), PLAN_TITLES), ("simulate_run", SIMULATED, SIMULATED_TITLES)],
)
def test_a_tools_page_has_its_charts_and_stands_alone(
    tool: str, words: tuple[str, ...], titles: list[str], tmp_path: Path
) -> None:
    page = tmp_path / "pages" / "page.html"
    command = [sys.executable, f"tools/{tool}.py", *GIVEN, *words, "--html", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    check_alone(text)
    assert re.findall(r"<h2>(.*?)</h2>", text.replace("&#39;", "'")) == titles
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawings) == len(titles)
    for drawing in drawings:
        assert ElementTree.fromstring(drawing).get("viewBox", "").startswith("0 0 324 ")  # a phone's width
        assert not any(colour in drawing for colour in PAGE_COLOURS)
    printed = done.stdout.split("\n\nwritten to")[0].splitlines()
    for line in (printed[0], printed[-1]):
        assert line.split("  ")[0].replace("&", "&amp;") in text.replace("&#39;", "'")


def test_a_rehearsals_memory_is_drawn_part_by_part(tmp_path: Path) -> None:
    file = tmp_path / "rehearsal.json"
    steps = [{"window": 32, "memory": {"weights": 2**30, "activations": 0}, "peak_at": "x"}]
    steps.append({"window": 8192, "memory": {"weights": 2**30, "activations": 2**31}, "peak_at": "y"})
    file.write_text(json.dumps([{"rank": 7, "steps": steps}]))
    svg = rehearsed_chart(file, 80).svg
    for text in ("rank 7", "8K", "weights", "activations"):
        assert text in svg
    for wrong in ("{}", "[1]", "[]", "no", '[{"rank": 1, "steps": [{}]}]'):
        file.write_text(wrong)
        with pytest.raises(UserError, match=r"rehearsal: .* is not what tools/rehearse.py writes"):
            rehearsed_chart(file, 80)
