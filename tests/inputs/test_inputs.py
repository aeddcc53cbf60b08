"""The table of wrong inputs: each ends with one short error, and nothing is written."""

import contextlib
from pathlib import Path

import psutil
import pytest

from tests.inputs.table import Wrong, all_inputs
from tests.inputs.world import make, prepare
from tests.launcher import Commands

MEMORY = 6 * 2**30  # bytes that a command may allocate


@pytest.fixture(scope="module")
def world(alone: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "world"
    make(folder, alone.run)
    return folder


def placed(word: str, places: dict[str, Path]) -> str:
    for name, place in places.items():
        word = word.replace(name, str(place))
    return word


@pytest.mark.parametrize("wrong", all_inputs(), ids=lambda wrong: wrong.name[:140])
def test_wrong_input_is_a_short_error(wrong: Wrong, world: Path, tmp_path: Path) -> None:
    """Exit status 2, and from the one `error:` on at most three lines, with the row's fragment."""
    prepare(tmp_path / "in", world / wrong.good if wrong.good else None, wrong.changes)
    (tmp_path / "out").mkdir()
    places = {"{w}": world, "{in}": tmp_path / "in", "{out}": tmp_path / "out"}
    commands = Commands(folder=tmp_path, environment=wrong.environment)  # none needs the repository's folder
    running = commands.start(wrong.script, *(placed(word, places) for word in wrong.words))
    for process in filter(None, running.processes):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            limit = process.memory_info().vms + MEMORY
            process.rlimit(psutil.RLIMIT_AS, (limit, limit))
    (done,) = running.finish(timeout_s=60)
    lines = done.stderr.splitlines()
    (begin,) = (number for number, line in enumerate(lines) if line.startswith("error: "))
    assert done.status == 2, done
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(lines[begin:]) <= 3, done
    assert max(map(len, lines[begin:])) <= 1000, done
    assert wrong.fragment in " ".join(lines[begin:]), done
