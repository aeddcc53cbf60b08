"""The requirements that pip gets are consistent."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, tuple[str, int]]:
    """Version and number of checksums of each package in requirements.lock."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = [re.match(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.+!-]+)", line) for line in lines]
    assert all(found), lines
    return {
        normalized(one[1]): (one[2], line.count("--hash=sha256:"))
        for one, line in zip(found, lines, strict=True)
        if one
    }


def test_the_lock_has_checksums_of_what_the_constraints_pin() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {normalized(name): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}
    lock = locked()
    assert {name: version for name, (version, _) in lock.items()}.items() <= pins.items(), "make lock writes it anew"
    assert all(checksums for _, checksums in lock.values())
