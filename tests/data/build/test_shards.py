"""How sources are cut, which must depend on nothing but the sources."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_ext.data.build.shards import FileShard, cut
from megatron_ext.data.text.documents import Document, Fields
from megatron_ext.data.text.sources import Source, find_files
from megatron_ext.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten small files of 25 bytes, a large one of 2500, the same compressed and as a table of 100 rows."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    lines = [json.dumps({"text": f"{number:04}" * 3}) + "\n" for number in range(100)]
    assert len(lines[0]) == 25
    for number in range(10):
        (inputs / f"a{number}.jsonl").write_text(lines[number])
    (inputs / "b.jsonl").write_text("".join(lines))
    (inputs / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    table = pyarrow.table({"text": [f"{number:04}" * 30 for number in range(100)]})
    pyarrow.parquet.write_table(table, inputs / "d.parquet", row_group_size=10)
    return inputs


def shards_of(folder: Path, shard_bytes: int) -> list[FileShard]:
    return cut([Source.of(path) for path in find_files([folder])], Fields(), shard_bytes)


def test_small_files_share_a_shard_and_large_ones_are_cut(folder: Path) -> None:
    shards = shards_of(folder, 500)
    assert [len(shard.pieces) for shard in shards[:2]] == [11, 1]
    assert len(shards) > 10


@pytest.mark.parametrize("shard_bytes", [1, 30, 500, 10**6])
def test_every_document_once_and_in_order(folder: Path, shard_bytes: int) -> None:
    shards = shards_of(folder, shard_bytes)
    found = [item.text for shard in shards for item in shard.read(Fields()) if isinstance(item, Document)]
    large = [f"{number:04}" * 3 for number in range(100)]
    assert found == [*large[:10], *large, *large, *(f"{number:04}" * 30 for number in range(100))]


def test_a_file_that_changes_is_refused(folder: Path) -> None:
    shards = shards_of(folder, 500)
    (folder / "a0.jsonl").write_text('{"text": "another"}\n')
    with pytest.raises(UserError, match=r"a0\.jsonl changed while it was read"):
        list(shards[0].read(Fields()))
