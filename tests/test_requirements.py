"""The requirements that pip gets are consistent."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_ext.engine import SUPPORTED

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docker"))

from missing import missing  # noqa: E402


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str, python: str) -> dict[str, str]:
    """The version of each package that a file pins for a version of Python on Linux."""
    text = re.sub(r"\\\n *--hash=sha256:\w+", "", (ROOT / file).read_text())
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    versions: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        entry = Requirement(line)
        if entry.marker is None or entry.marker.evaluate(here):
            name = normalized(entry.name)
            assert name not in versions, f"{name} has two versions for Python {python}"
            versions[name] = str(entry.specifier).removeprefix("==")
    return versions


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_each_python_gets_one_version_of_each_package(python: str) -> None:
    lock = pins("requirements.lock", python)
    assert lock.items() <= pins("constraints.txt", python).items(), "make lock writes it anew"
    assert len(lock) > 50


def test_the_locks_have_checksums_of_every_entry() -> None:
    for name in ("requirements.lock", "docker/flash-attn-4.lock"):
        entries = re.split(r"^(?=\w)", (ROOT / name).read_text(), flags=re.MULTILINE)[1:]
        assert len(entries) > 5
        assert all("--hash=sha256:" in entry for entry in entries)
        assert missing("".join(entries), {}).count("==") >= len(entries)


def test_a_run_accepts_the_versions_of_megatron_that_pip_does() -> None:
    assert f'"megatron-core{SUPPORTED}"' in (ROOT / "pyproject.toml").read_text()
    newest = pins("requirements.lock", "3.13")["megatron-core"]
    assert pins("requirements.lock", "3.11")["megatron-core"] != newest
    assert f"VERSION ?= {newest}\n" in (ROOT / "Makefile").read_text()


def test_every_supported_series_is_tested() -> None:
    (first,), (last,) = (re.findall(pattern, SUPPORTED) for pattern in (r">=0\.(\d+)", r"<0\.(\d+)"))
    tested = set(re.findall(r"0\.\d+\.\d+", (ROOT / ".ci/run").read_text()))
    assert {version.rpartition(".")[0] for version in tested} == {f"0.{n}" for n in range(int(first), int(last))}
    assert tested <= set(re.findall(r"0\.\d+\.\d+", (ROOT / "docs/versions.md").read_text()))


def test_the_oldest_and_the_newest_transformer_engine_are_tested() -> None:
    pattern = r"transformer-engine\[.*\]>=(\d+)\.(\d+).*,<(\d+)\.(\d+)"
    (bounds,) = re.findall(pattern, (ROOT / "pyproject.toml").read_text())
    tested = re.findall(r"make test-te VERSION=(\S+)", (ROOT / ".ci/run").read_text())
    first, last = sorted(set(tested), key=lambda version: [int(number) for number in version.split(".")])
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
    """It also gets companions that it has in an older version; each has its checksums."""
    for newer, count in ((False, absent), (True, older)):
        requirements = missing(LOCK, installed, newer=newer)
        assert requirements.count("==") == count
        assert requirements.count("--hash") in ((3,) if count == 2 else (0, 2))
        assert requirements.endswith(LOCK[LOCK.index("Some") :] if count else "")
