"""One server of forked runs for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.forks import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with Forks() as server:
        yield server
