"""The requirements that pip gets are consistent."""

import re
import sys
from pathlib import Path

import pytest

from megatron_ext.engine.compat import SUPPORTED

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docker"))

from missing import missing  # noqa: E402


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[tuple[str, str], int]:
    """The number of checksums of each package and version in requirements.lock."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = {}
    for line in lines:
        entry = re.match(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.+!-]+)", line)
        assert entry, line
        found[normalized(entry[1]), entry[2]] = line.count("--hash=sha256:")
    return found


def pins() -> set[tuple[str, str]]:
    """Packages and versions of constraints.txt; Megatron-Core has two, for earlier and later versions of Python."""
    lines = [line.partition(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {
        (normalized(name), version) for name, _, version in (line.partition("==") for line in lines if "==" in line)
    }


def test_the_lock_has_checksums_of_what_the_constraints_pin() -> None:
    lock = locked()
    assert lock.keys() <= pins(), "make lock writes it anew"
    assert all(lock.values())
    for name in ("requirements.lock", "docker/flash-attn-4.lock"):
        text = (ROOT / name).read_text()
        assert missing(text, {}).count("==") >= len(re.findall(r"^[a-z]", text, re.MULTILINE)) > 5


def test_a_run_accepts_the_versions_of_megatron_that_pip_does() -> None:
    assert f'"megatron-core{SUPPORTED}"' in (ROOT / "pyproject.toml").read_text()
    ours = {version for name, version in pins() if name == "megatron-core"}
    assert ours == {version for name, version in locked() if name == "megatron-core"}
    assert len(ours) == 2
    assert f"VERSION ?= {max(ours)}\n" in (ROOT / "Makefile").read_text()


def test_every_supported_series_is_tested() -> None:
    (first,), (last,) = (re.findall(pattern, SUPPORTED) for pattern in (r">=0\.(\d+)", r"<0\.(\d+)"))
    tested = set(re.findall(r"0\.\d+\.\d+", (ROOT / ".ci/run").read_text()))
    assert {version.rpartition(".")[0] for version in tested} == {f"0.{n}" for n in range(int(first), int(last))}
    assert tested <= set(re.findall(r"0\.\d+\.\d+", (ROOT / "docs/versions.md").read_text()))


def test_the_oldest_and_the_newest_transformer_engine_are_tested() -> None:
    pattern = r"transformer-engine\[.*\]>=(\d+)\.(\d+).*,<(\d+)\.(\d+)"
    (bounds,) = re.findall(pattern, (ROOT / "pyproject.toml").read_text())
    ((first, last),) = re.findall(r"for te in (\S+) ([^;]+);", (ROOT / ".ci/run").read_text())
    assert first.split(".")[:2] == list(bounds[:2])
    assert last.split(".")[:2] == [bounds[2], str(int(bounds[3]) - 1)]


LOCK = """# a comment
cupy[x]==2.1 \\
    --hash=sha256:00
Some.Thing==4.8.1 ; python_version < "3.14" \\
    --hash=sha256:01 \\
    --hash=sha256:02
"""


@pytest.mark.parametrize(
    ("installed", "absent", "older"),
    [
        ({}, 2, 2),
        ({"cupy": "2.0", "some-thing": "4.8.0a0+nv26.6"}, 0, 2),
        ({"cupy": "2.1", "some-thing": "4.10.0"}, 0, 0),
        ({"cupy": "2.1.0b1"}, 1, 2),
    ],
)
def test_an_image_gets_what_it_lacks(installed: dict[str, str], absent: int, older: int) -> None:
    """Of companions also what it has in an older version; each with its checksums."""
    for newer, count in ((False, absent), (True, older)):
        found = missing(LOCK, installed, newer=newer)
        assert found.count("==") == count
        assert found.count("--hash") in ((3,) if count == 2 else (0, 2))
        assert found.endswith(LOCK[LOCK.index("Some") :] if count else "")
