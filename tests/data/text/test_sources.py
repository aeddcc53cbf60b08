"""Files of folders and patterns, compressed files, and lines of bounded length."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.text.sources import find_files, read_lines
from megatron_ext.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.jsonl", "a/b/c.txt", "notes.md", "a.txt", "c.jsonl.gz", "d.jsonl.zst", "e.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def names(folder: Path, *paths: str) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in find_files([str(folder / path) for path in paths])]


def test_folders_are_read_in_order_of_paths(folder: Path) -> None:
    everything = ["a/b/c.txt", "a/z.jsonl", "a.txt", "b.txt", "c.jsonl.gz", "d.jsonl.zst", "e.parquet"]
    assert names(folder, ".") == everything
    assert names(folder, "b.txt", "a") == ["b.txt", "a/b/c.txt", "a/z.jsonl"]


def test_patterns(folder: Path) -> None:
    assert names(folder, "*.txt") == ["a.txt", "b.txt"]
    assert names(folder, "**/*.txt") == ["a/b/c.txt", "a.txt", "b.txt"]
    assert names(folder, "?.jsonl.*") == ["c.jsonl.gz", "d.jsonl.zst"]
    assert names(folder, "*") == names(folder, ".")
    (folder / "a[1].txt").write_text("x")  # a name that looks like a pattern is a name
    assert names(folder, "a[1].txt") == ["a[1].txt"]


def test_links_are_followed_and_each_file_is_taken_once(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = names(folder, ".")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "x.jsonl").write_text("x")
    for name, target in (("z.txt", "a.txt"), ("l1", elsewhere), ("l2", elsewhere)):
        (folder / name).symlink_to(target)
    assert names(folder, "**/*.jsonl") == ["a/z.jsonl", "l1/x.jsonl"]
    (folder / "loop").symlink_to(".")
    assert sorted(names(folder, ".")) == sorted([*before, "l1/x.jsonl"])


def test_bad_paths_are_named(folder: Path) -> None:
    (folder / "empty").mkdir()
    for path, text in (
        ("missing.jsonl", r"missing\.jsonl does not exist"),
        ("empty", r"got .*empty, needs a \.jsonl, .*\.txt file"),
        ("*.csv", r"got .*\*\.csv, needs a \.jsonl"),
        ("notes.md", r"got .*notes\.md, needs a \.jsonl"),
    ):
        with pytest.raises(UserError, match=text):
            find_files([folder / path])


@given(
    content=st.text(alphabet="ab\n", max_size=60).map(str.encode),
    start=st.integers(0, 60),
    end=st.integers(0, 60),
    limit=st.integers(0, 8),
)
def test_lines_of_a_range(content: bytes, start: int, end: int, limit: int) -> None:
    begins = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10)]
    begins = [begin for begin in begins if begin < len(content)]
    wanted = [content[begin:].split(b"\n")[0][: limit + 1] for begin in begins if start <= begin < end]
    assert list(read_lines(io.BytesIO(content), start, end, limit)) == wanted
