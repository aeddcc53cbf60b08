"""A file is old or new, never half written."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.files.aside import file_aside


def test_old_until_the_end_then_new(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with file_aside(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), file_aside(path) as aside:
        aside.write_text(None)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
