"""passage.json is read as it was written, and shown token by token."""

from __future__ import annotations

from pathlib import Path

from monitoring.records import write_passage_file

from megatron_ext.token_weighting.passage import Passage


def test_a_passage_is_read_as_it_was_written(tmp_path: Path) -> None:
    passage = Passage(step=3, start=2, tokens=(104, 105), texts=("h", "i"), weights=(0.0, 1.5), scores=(None, 0.25))
    passage.write(tmp_path)
    assert Passage.read(tmp_path) == passage
    assert [path.name for path in tmp_path.iterdir()] == ["passage.json"]
    assert passage.html().count("<span") == 2
    assert Passage.read(write_passage_file(tmp_path, texts=None)).html().count("<span") == 4
