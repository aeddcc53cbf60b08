"""Files and folders are written atomically; fingerprints tell contents apart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.files.atomic import atomic_folder, atomic_write
from megatron_ext.files.fingerprint import fingerprint
from megatron_ext.files.jsonl import read_jsonl
from tests.launcher import ROOT


def fill(path: Path, content: str, *, replace: bool = True) -> None:
    with atomic_folder(path, replace=replace) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text(content)


def killed(path: Path) -> None:
    path.write_text("half")
    raise KeyboardInterrupt


def test_a_file_gets_its_name_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as aside:
        killed(aside)
    with atomic_write(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_final_path(tmp_path: Path) -> None:
    """The temporary one, which the user did not choose, says nothing to them."""
    (tmp_path / "file").touch()
    for place in (tmp_path / "missing" / "a", tmp_path / "file" / "a"):
        with pytest.raises(OSError, match=f"'{place}'"), atomic_write(place) as aside:
            aside.write_text("new")
    place = tmp_path / "file" / "b"
    with pytest.raises(OSError, match=f"'{place}'"), atomic_folder(place):
        pass
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/c/x/y'"), atomic_folder(tmp_path / "c") as aside:
        (aside / "x" / "y").touch()
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    fill(tmp_path / "a", "old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "a") as aside:
        killed(aside / "file")
    assert (tmp_path / "a" / "inner" / "file").read_text() == "old"
    fill(tmp_path / "a", "new")
    assert (tmp_path / "a" / "inner" / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_folder_that_came_first_stays(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()  # an empty one is none
    for content in ("first", "second"):
        fill(tmp_path / "a", content, replace=False)
    assert (tmp_path / "a" / "inner" / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


METRICS = "from tests.monitoring.records import *; MetricsWriter('.', resume_step=0, logging=QUIET, config={})"
WRITERS = {
    "metrics": f"{METRICS}.write('train', step_record(0))",
    "lock": "from pathlib import Path; from megatron_ext.files.lock import lock; lock(Path(), 'save')",
    "array": "from pathlib import Path; import numpy as np; from megatron_ext.files.arrays import save_array; "
    "save_array(Path('a.npy'), np.zeros(100_000))",
    "stdout": "import sys; from megatron_ext.cli import command; sys.exit(command(lambda words: print('a'))())",
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_what_a_full_disk_refused_is_not_written_again(writer: str, tmp_path: Path) -> None:
    """An unwritten buffer is written when its file is closed: Python 3.13, or -X dev, then prints a traceback."""
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    words = [sys.executable, "-X", "dev", "-c", f"{full}; {writer}"]
    with Path("/dev/full").open("w") as out:
        done = subprocess.run(
            words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert "File too large" in done.stderr or "No space left" in done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr


@given(st.lists(st.text() | st.binary(), max_size=4), st.lists(st.text() | st.binary(), max_size=4))
def test_fingerprints_tell_lists_of_parts_apart(parts: list[str | bytes], other_parts: list[str | bytes]) -> None:
    assert (fingerprint(*parts) == fingerprint(*other_parts)) == (parts == other_parts)


def test_a_file_counts_by_content_not_by_name(tmp_path: Path) -> None:
    for name, content in (("a", b"x" * 3_000_000), ("b", b"x" * 3_000_000), ("c", b"x" * 2_999_999 + b"y")):
        (tmp_path / name).write_bytes(content)
    prints = {name: fingerprint("data", tmp_path / name) for name in "abc"}
    assert prints["a"] == prints["b"] != prints["c"]


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats()
TEXTS = st.text(st.characters(exclude_categories=()))  # halves of surrogate pairs too: a path need not be UTF-8
VALUES = st.recursive(NUMBERS | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=5)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_a_record_is_read_as_python_reads_it(
    tmp_path_factory: pytest.TempPathFactory, record: dict[str, object]
) -> None:
    path = tmp_path_factory.mktemp("records") / "metrics.jsonl"
    line = json.dumps(record | {"step": 7})
    path.write_text(line + "\n")
    (read,) = read_jsonl(path)
    assert repr(read) == repr(json.loads(line))  # NaN too
