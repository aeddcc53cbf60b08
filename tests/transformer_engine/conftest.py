"""Fixtures of runs with Transformer Engine's Python on an emulated CUDA machine.

`make test-te` fetches a version and sets TRANSFORMER_ENGINE to its folder.
"""

import os

import pytest

from tests.conftest import SmallData
from tests.runs import Launched
from tests.transformer_engine import SERVER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "TRANSFORMER_ENGINE" not in os.environ:
        for item in (item for item in items if __package__.replace(".", "/") in str(item.path)):
            item.add_marker(pytest.mark.skip(reason="needs the Python of Transformer Engine: make test-te"))


@pytest.fixture(scope="module")
def emulated(small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Runs the trainer on the emulated machine."""
    return Launched(small_data.flags, tmp_path_factory.mktemp("emulated"), SERVER)
