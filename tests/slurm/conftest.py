"""One Slurm for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing_programs


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"no {', '.join(missing)}; apt-get install slurm-wlm munge")
    with Cluster() as cluster:
        yield cluster
