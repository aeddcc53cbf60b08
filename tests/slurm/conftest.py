"""One Slurm for all tests of this folder, and a way to speak to the log of CI."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from slurm.cluster import Cluster, missing_programs

Say = Callable[[str], None]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"no {', '.join(missing)}; apt-get install slurm-wlm munge")
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Prints past pytest's capture, which keeps what a passed test said to itself."""
    began = time.monotonic()

    def print_now(text: str) -> None:
        with capsys.disabled():
            for line in text.splitlines():
                print(f"\n  [slurm {time.monotonic() - began:5.1f} s] {line}", end="", flush=True)

    return print_now
