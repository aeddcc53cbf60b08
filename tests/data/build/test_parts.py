"""The folder of unfinished work, and which finished parts may be used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.data.build.parts import Report, finish_part, usable, work_folder
from megatron_ext.errors import UserError


@pytest.mark.parametrize(
    ("skipped", "made_with", "limit", "skip", "same"),
    [
        (0, 100, 100, False, True),
        (0, 100, 200, False, True),  # nothing was too long
        (0, 100, 50, False, False),  # something may be too long now
        (1, 100, 100, True, True),
        (1, 100, 100, False, False),  # the bad one would stop the run
        (1, 100, 200, True, False),  # the bad one may be good
    ],
)
def test_which_parts_would_be_the_same(
    tmp_path: Path, skipped: int, made_with: int, limit: int, skip: bool, same: bool
) -> None:
    assert not usable(tmp_path / "part", limit, skip)
    finish_part(tmp_path / "part", {}, Report(skipped=skipped), made_with)
    assert usable(tmp_path / "part", limit, skip) == same


def test_two_runs_do_not_write_the_same_dataset(tmp_path: Path) -> None:
    with (
        work_folder(str(tmp_path / "data"), resume=False, overwrite=False),
        pytest.raises(UserError, match="another run is writing this dataset"),
        work_folder(str(tmp_path / "data"), resume=True, overwrite=False),
    ):
        pass


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.parts").mkdir()
    (tmp_path / "data.parts" / "mine.txt").write_text("mine")
    with (
        pytest.raises(UserError, match="the folder is for unfinished work and has other files"),
        work_folder(str(tmp_path / "data"), resume=False, overwrite=True),
    ):
        pass
    assert (tmp_path / "data.parts" / "mine.txt").read_text() == "mine"
