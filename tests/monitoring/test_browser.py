"""The pages in a real browser: nothing wider than the window, nothing on the console, charts large enough to read."""

from __future__ import annotations

import html
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_ext.monitoring.report import write_comparison, write_report

from .records import perplexity_record, recall_record, write_evaluation, write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# a page of its own looks into a frame of the width that is tried
PROBE = """<!DOCTYPE html><body><iframe width="{width}" height="900" srcdoc="{page}"></iframe>
<pre id="found"></pre><script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const scale = ({{a, b}}) => Math.hypot(a, b);
  const size = node => parseFloat(getComputedStyle(node).fontSize) * scale(node.getScreenCTM());
  document.getElementById("found").textContent = JSON.stringify({{
    wide: root.scrollWidth, window: root.clientWidth,
    text: Math.min(...[...page.querySelectorAll("svg text")].map(size)),
    charts: [...page.querySelectorAll("svg")].map(one => one.getBoundingClientRect().width),
    ink: getComputedStyle(page.body).color, paper: getComputedStyle(page.body).backgroundColor,
  }});
}});
</script></body>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")


def looked_at(page: Path, width: int, folder: Path, *flags: str) -> tuple[dict[str, object], list[str]]:
    """What the probe measures, and the lines of the console."""
    probe = folder / f"probe{width}.html"
    probe.write_text(PROBE.format(width=width, page=html.escape(page.read_text(encoding="utf-8"))), encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom", *flags]
    done = subprocess.run(
        [*command, f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=20000", probe.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), console


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_pages_fit_and_can_be_read(width: int, tmp_path: Path) -> None:
    names = ("a long name " * 12, "other")
    runs = [write_run(tmp_path / name, 120, evaluate_every=20, weighted=True) for name in names]
    models = {"a long name of a model " * 5: 2.0, "other": 1.9}
    for kind, record in (("perplexity", perplexity_record(models)), ("recall", recall_record(models))):
        write_evaluation(runs[0] / "evaluations", kind, record)
    pages = [write_report(runs[0]), write_comparison(runs, tmp_path / "compare.html")]
    for page in pages:
        found, console = looked_at(page, width, tmp_path)
        assert console == []
        assert found["wide"] == found["window"]
        assert found["text"] >= 8.0
        assert all(290 < one < 450 for one in found["charts"])


def test_pictures_for_the_docs_are_of_the_page(tmp_path: Path) -> None:
    """Of the width and look that are asked for, narrower too than chromium makes a window."""
    take = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "take_pictures.py"))["take"]
    page, brightness = write_report(write_run(tmp_path / "run", 5)), {}
    for dark in (False, True):
        take(page, 390, 600, dark=dark, output=tmp_path / "taken.png")
        with Image.open(tmp_path / "taken.png") as picture:
            assert picture.size == (390, 600)
            brightness[dark] = np.asarray(picture.convert("L")).mean()
    assert brightness[True] < 80 < 200 < brightness[False]
    assert (tmp_path / "taken.png").stat().st_size < 150_000


def test_dark_is_dark(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", 5))
    light, _ = looked_at(page, 800, tmp_path)
    dark, _ = looked_at(page, 800, tmp_path, "--blink-settings=preferredColorScheme=0")

    def brightness(colour: object) -> int:
        return sum(map(int, re.findall(r"\d+", str(colour))[:3]))

    assert brightness(light["ink"]) < 200 < 600 < brightness(light["paper"])
    assert brightness(dark["paper"]) < 200 < 600 < brightness(dark["ink"])
