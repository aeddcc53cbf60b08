"""Parts are complete or absent; what may be used again, and who may use their folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.build.parts import Part, Record, Settings, WorkFolder, same_when_bad
from megatron_ext.errors import UserError

SETTINGS = Settings(
    tokenizer_fingerprint="f",
    vocab_size=300,
    eod_id=0,
    text_field="text",
    concat_by=None,
    sentences=None,
    min_tokens=1,
    max_tokens=None,
)


def finished(folder: Path, **record: int) -> Part:
    part = Part.named(folder, SETTINGS, "tokens", "shard 0")
    part.content.write_bytes(b"abcdef")
    part.finish(Record(limit=100, **record), lengths=np.arange(3))  # type: ignore[arg-type]
    return part


def test_a_name_stands_for_settings_and_identity(tmp_path: Path) -> None:
    part = Part.named(tmp_path, SETTINGS, "tokens", "shard 0")
    assert part == Part.named(tmp_path, SETTINGS, "tokens", "shard 0")
    others = [
        Part.named(tmp_path, SETTINGS, "tokens", "shard 1"),
        Part.named(tmp_path, SETTINGS, "texts", "shard 0"),
        Part.named(tmp_path, replace(SETTINGS, min_tokens=2), "tokens", "shard 0"),
    ]
    assert len({part.name, *(other.name for other in others)}) == 4


def test_a_part_without_its_record_is_not_used(tmp_path: Path) -> None:
    part = finished(tmp_path, tokens=6)
    assert (part.record().tokens, part.record().limit) == (6, 100)
    assert part.usable(limit=100, skip=False)
    part.record_file.unlink()
    assert not part.usable(limit=100, skip=False)


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
def test_what_would_be_made_again(skipped: int, made_with: int, limit: int, skip: bool, same: bool) -> None:
    assert same_when_bad(skipped, made_with, limit, skip) == same


def test_parts_survive_a_resume_alone(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    folder = WorkFolder(prefix, SETTINGS, resume=False, overwrite=False)
    part = finished(folder.path)
    with pytest.raises(UserError, match="another run is writing this dataset"):
        WorkFolder(prefix, SETTINGS, resume=True, overwrite=False)
    assert folder.finished == 1
    folder.close(remove=False)
    with pytest.raises(UserError, match="holds an unfinished run; pass --resume"):
        WorkFolder(prefix, SETTINGS, resume=False, overwrite=False)
    other = replace(SETTINGS, max_tokens=7)
    with pytest.raises(UserError, match="was begun with max_tokens None, now it is 7; pass what it was begun with"):
        WorkFolder(prefix, other, resume=True, overwrite=False)
    resumed = WorkFolder(prefix, SETTINGS, resume=True, overwrite=False)
    assert part.usable(limit=100, skip=False)
    resumed.close(remove=False)
    begun_again = WorkFolder(prefix, other, resume=False, overwrite=True)
    assert begun_again.finished == 0
    begun_again.close(remove=True)
    assert not begun_again.path.exists()


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.parts").mkdir()
    (tmp_path / "data.parts" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="the folder is for unfinished work and has other files"):
        WorkFolder(str(tmp_path / "data"), SETTINGS, resume=False, overwrite=True)
    assert (tmp_path / "data.parts" / "mine.txt").read_text() == "mine"
