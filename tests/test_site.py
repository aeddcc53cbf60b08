"""The site of docs/, as `make docs` builds it: without warnings, whole without a network, with a search that finds."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}  # links of text are not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs pip install -e '.[docs]'"),
]


class Loads(HTMLParser):
    """What a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADED and given.get("rel") not in ("canonical", "next", "prev", "edit"):
            self.found.append(given.get(LOADED[tag]) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_is_there_and_nothing_else_of_ours(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages = {path.with_name("index.html") if path.stem == "README" else path for path in pages}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    assert not list(site.rglob("*.py"))


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert not [address for address in loads.found if re.match(r"(\w+:)?//", address)], page
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", text), style


def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "methods.html").read_text(encoding="utf-8")
    assert page.count("<math") > 50
    assert "arithmatex" not in page
    assert not re.search(r"\\(?:frac|lfloor|mathrm|sum)", re.sub(r"<annotation.*?</annotation>", "", page))


# Looks into the site's page until its search has answered; the picture that it waits for comes then.
PROBE = """<!DOCTYPE html><body><iframe src="/index.html?q=zigzag"></iframe><img src="/wait"><script>
const answers = () => document.querySelector("iframe").contentDocument.querySelectorAll(".md-search-result__link");
const looks = setInterval(() => {
  const found = [...answers()].map(link => link.getAttribute("href"));
  if (!found.length) return;
  clearInterval(looks);
  document.body.append(...found.map(address => Object.assign(document.createElement("b"), {textContent: address})));
  fetch("/done");
}, 100);
</script></body>"""


class Served(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, the probe, and a picture that comes when the probe is done."""

    done = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/done":
            self.done.set()
        if self.path == "/wait":
            self.done.wait(30)
        if self.path in ("/done", "/wait", "/probe.html"):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PROBE.encode() if self.path == "/probe.html" else b"")
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Served, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_search_finds_without_a_network(address: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={tmp_path}"]
    done = subprocess.run([*command, f"{address}/probe.html"], capture_output=True, text=True, timeout=120, check=True)
    found = re.findall(r"<b>([^<]*)</b>", done.stdout)
    assert any(one.partition("?")[0].endswith("context-parallel.html") for one in found), found
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line and "favicon" not in line]
