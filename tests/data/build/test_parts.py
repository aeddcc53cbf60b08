"""Parts are complete or absent; what may be used again, and who may use their folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.build.parts import SETTINGS_FILE, Part, PartWriter, Record, Settings, WorkFolder, same_when_bad
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
    with PartWriter(part) as writer:
        writer.write(b"abc")
        writer.write(b"def")
        writer.finish(Record(limit=100, **record), lengths=np.arange(3))  # type: ignore[arg-type]
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


def test_a_finished_part_is_three_files(tmp_path: Path) -> None:
    part = finished(tmp_path, tokens=6)
    assert sorted(tmp_path.iterdir()) == sorted([part.content, part.arrays, part.record_file])
    assert part.content.read_bytes() == b"abcdef"
    assert (part.record().tokens, part.record().limit) == (6, 100)
    assert part.usable(limit=100, skip=False)


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    writer = PartWriter(Part.named(tmp_path, SETTINGS, "tokens"))

    def fail() -> None:
        with writer:
            writer.write(b"abc")
            writer.finish(Record())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_record_gets_its_name_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed between the renames leaves no record, and so no part."""
    names: list[str] = []
    replace_file = Path.replace

    def noted(path: Path, target: Path) -> Path:
        names.append(target.suffix)
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    finished(tmp_path)
    assert names == [".bin", ".npz", ".json"]


@pytest.mark.parametrize("which", ["content", "arrays", "record_file"])
def test_a_damaged_part_is_not_used(tmp_path: Path, which: str) -> None:
    part = finished(tmp_path)
    path: Path = getattr(part, which)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert not part.usable(limit=100, skip=False)
    path.unlink()
    assert not part.usable(limit=100, skip=False)
    path.write_bytes(content)
    assert part.usable(limit=100, skip=False)


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


def test_the_counts_are_those_of_every_part() -> None:
    record = Record(documents=2, too_long=1, size=9)
    assert record.counts()["documents"] == 2
    assert {"skipped", "problems", "trained"} < set(record.counts())
    assert not {"size", "limit", "checksums", "crc"} & set(record.counts())


def test_parts_survive_a_resume_alone(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    folder = WorkFolder(prefix, SETTINGS, resume=False, overwrite=False)
    part = finished(folder.path)
    (folder.path / "copy-0.jsonl").write_text("half")
    with pytest.raises(UserError, match="another run is writing this dataset"):
        WorkFolder(prefix, SETTINGS, resume=True, overwrite=False)
    assert folder.finished == 1
    folder.close(remove=False)
    assert not (folder.path / "copy-0.jsonl").exists()

    with pytest.raises(UserError, match="holds an unfinished run; pass --resume to go on, or --overwrite"):
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


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"'])
def test_settings_that_say_nothing_are_no_earlier_run(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "data.parts"
    folder.mkdir()
    (folder / SETTINGS_FILE).write_text(text)
    WorkFolder(str(tmp_path / "data"), SETTINGS, resume=True, overwrite=False).close(remove=True)
    assert not folder.exists()


def test_a_strange_file_stops_everything(tmp_path: Path) -> None:
    folder = tmp_path / "data.parts"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"mine\.txt: the folder is for unfinished work alone; move the file"):
        WorkFolder(str(tmp_path / "data"), SETTINGS, resume=False, overwrite=True)
    assert (folder / "mine.txt").read_text() == "mine"
