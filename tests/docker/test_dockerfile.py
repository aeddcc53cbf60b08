"""The Dockerfile: what can be known without a Docker daemon. `make docker-cpu` is the test with one."""

from __future__ import annotations

import fnmatch
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
STAGES = ("cpu", "gpu")


def instructions(stage: str) -> list[tuple[str, str]]:
    """(keyword, rest) of a stage, continued lines joined, comments left out."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    parted = [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]
    first = next(place for place, (word, rest) in enumerate(parted) if word == "FROM" and rest.endswith(f" AS {stage}"))
    end = next((p for p in range(first + 1, len(parted)) if parted[p][0] == "FROM"), len(parted))
    return parted[first + 1 : end]


def sources(stage: str) -> list[str]:
    copies = [rest.split() for word, rest in instructions(stage) if word == "COPY"]
    return [name for words in copies for name in words[:-1] if not name.startswith("--")]


def checkout(folder: Path) -> Path:
    """The build context: tracked and new files, without those of .dockerignore."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout: which files belong to it is not known")
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in listed:
        if (ROOT / name).is_file() and not any(matches(name, pattern) for pattern in ignored):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def matches(name: str, pattern: str) -> bool:
    """Whether .dockerignore's pattern takes the file or one of its folders."""
    parts = Path(name).parts
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
    return any(fnmatch.fnmatch("/".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


@pytest.mark.parametrize(("stage", "lock"), [("cpu", "requirements.lock"), ("gpu", "/tmp/missing.lock")])
def test_packages_are_installed_by_checksum(stage: str, lock: str) -> None:
    """All but torch, which is another file on each index, and which an image for GPUs brings."""
    runs = [rest for word, rest in instructions(stage) if word == "RUN"]
    installs = [shlex.split(part) for run in runs for part in run.split("&&") if "pip install" in part]
    locked = [words for words in installs if "--require-hashes" in words]
    assert [words[words.index("--requirement") + 1] for words in locked] == [lock]
    for words in installs:
        unlocked = words[-1] == "torch" and "--constraint" in words and stage == "cpu"
        assert "--no-deps" in words or unlocked or "--dry-run" in words, words


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_copied_is_in_the_build_context(stage: str, tmp_path: Path) -> None:
    context = checkout(tmp_path)
    for name in sources(stage):
        assert (context / name).exists(), name
    assert (context / "tools" / "environment.py").is_file()
    assert (context / "tests" / "data" / "test_resume.py").is_file(), "`data` at the root alone is left out"
    for left_out in (".git", ".venv", "data", "runs"):
        assert not (context / left_out).exists()
