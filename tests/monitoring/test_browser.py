"""The page in a real browser: it fits a telephone, draws its charts, and reports no error."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_ext.monitoring.report import load_runs, write_report

from .records import write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement;
  document.title = `${root.scrollWidth - root.clientWidth} ${document.querySelectorAll(".main-svg .scatter").length}`;
}, 1000));</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_a_page_fits_its_window_and_draws_its_charts(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 120, evaluate_every=20) for name in ("a long name " * 12, "other")]
    page = write_report(load_runs(runs), tmp_path / "compare.html")
    page.write_text(page.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         "--window-size=500,900", f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=20000",
         page.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    wider, drawn = done.stdout.split("<title>")[1].split("</title>")[0].split()
    assert int(wider) == 0
    assert int(drawn) >= 14  # two runs in seven charts
