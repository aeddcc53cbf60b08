"""Tensors of a checkpoint are written by several processes and read under any layout."""

import errno
import json
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ext.checkpoint.manifest import MANIFEST, FileFacts, Manifest, facts_of
from megatron_ext.checkpoint.tensors import INDEX, Shard, Stored, write, write_index
from tests.checkpoint.test_manifest import manifest
from tests.conftest import refused

MATRIX = torch.arange(28, dtype=torch.float32).reshape(4, 7)
VECTOR = torch.arange(10, dtype=torch.bfloat16)


def part(name: str, whole: Tensor, *spans: slice) -> Shard:
    """A part of a tensor, in memory of its own."""
    offset = tuple(span.start or 0 for span in (*spans, *[slice(None)] * whole.dim()))[: whole.dim()]
    return Shard.of(name, whole[spans].clone(), tuple(whole.shape), offset)


def written(folder: Path) -> dict[str, FileFacts]:
    """Two processes write a matrix as four rectangles, and a vector."""
    folder.mkdir(exist_ok=True)
    rectangles = [(slice(a, b), slice(c, d)) for a, b in ((0, 1), (1, 4)) for c, d in ((0, 3), (3, 7))]
    parts = [part("matrix", MATRIX, *spans) for spans in rectangles]
    first = write(folder, 0, [part("vector", VECTOR), *parts[:3]])
    return write_index(folder, [first, write(folder, 1, parts[3:])])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path)
    return tmp_path


def test_whole_tensors_come_back_and_safetensors_reads_the_same(folder: Path) -> None:
    stored = Stored(folder)
    shapes = {name: (entry.shape, entry.dtype) for name, entry in stored.tensors.items()}
    assert shapes == {"matrix": ((4, 7), "F32"), "vector": ((10,), "BF16")}
    assert torch.equal(stored.read("matrix"), MATRIX)
    assert torch.equal(stored.read("vector"), VECTOR)
    tensors = load_file(folder / "tensors_00000.safetensors")
    assert sorted(tensors) == ["matrix[0, 0]", "matrix[0, 3]", "matrix[1, 0]", "vector"]
    assert torch.equal(tensors["vector"], VECTOR)
    assert torch.equal(tensors["matrix[1, 0]"], MATRIX[1:, :3])


def test_any_part_is_read_and_each_record_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(folder)
    loads = []
    load = stored._load
    monkeypatch.setattr(stored, "_load", lambda block, dtype: (loads.append(block), load(block, dtype))[1])
    spans = [(slice(a, b), slice(c, d)) for a, b in ((0, 2), (2, 4)) for c, d in ((0, 5), (5, 7))]
    shards = [part("matrix", torch.zeros_like(MATRIX), *span) for span in spans]
    stored.fill(shards)
    for shard, span in zip(shards, spans, strict=True):
        assert torch.equal(shard.data(), MATRIX[span])
    assert len(loads) == len(set(loads)) == 4


def test_files_have_their_checksums_and_the_same_tensors_give_the_same_files(tmp_path: Path) -> None:
    """The files contain neither a path nor a time."""
    first_folder, second_folder = tmp_path / "one", tmp_path / "other"
    facts = written(first_folder)
    assert facts == {path.name: facts_of(path) for path in first_folder.iterdir()}
    assert written(second_folder) == facts


def test_one_shard_at_a_time_is_in_memory(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def make(number: int) -> Tensor:
        assert all(reference() is None for reference in alive)
        tensor = MATRIX + number
        alive.append(weakref.ref(tensor))
        return tensor

    shards = [Shard(str(number), (4, 7), (0, 0), (4, 7), torch.float32, partial(make, number)) for number in range(3)]
    view = Shard.of("view", MATRIX[:, 1:3], (4, 2), (0, 0))
    write_index(tmp_path, [write(tmp_path, 0, [*shards, view])])
    assert [Stored(tmp_path).read(str(number))[0, 0] for number in range(3)] == [0, 1, 2]
    assert torch.equal(Stored(tmp_path).read("view"), MATRIX[:, 1:3])


def test_another_padding_where_it_may_be(folder: Path) -> None:
    longer, shorter = (torch.zeros(rows, 7) for rows in (5, 3))
    for whole in (longer, shorter):
        shard = Shard.of("matrix", whole, tuple(whole.shape), (0, 0))
        assert refused(Stored(folder).fill, [shard]).startswith(f"matrix: got ({len(whole)}, 7), ")
        Stored(folder).fill([shard], padded=True)
    assert torch.equal(longer[:4], MATRIX)
    assert not longer[4].any()
    assert torch.equal(shorter, MATRIX[:3])


def test_what_is_missing_or_damaged_is_named(folder: Path) -> None:
    stored = Stored(folder)
    content = folder / "tensors_00001.safetensors"
    assert "has no tensor norm" in refused(stored.fill, [part("norm", VECTOR)])
    content.write_bytes(content.read_bytes()[:-1])
    assert "tensors_00001.safetensors does not hold what tensors.json says" in refused(stored.read, "matrix")
    content.unlink()
    assert "tensors_00001.safetensors cannot be read" in refused(stored.read, "matrix")
    index = json.loads((folder / INDEX).read_text())
    index["matrix"]["blocks"].pop()
    (folder / INDEX).write_text(json.dumps(index))
    assert "lacks part of matrix" in refused(Stored, folder)


@pytest.mark.parametrize("name", [MANIFEST, INDEX, "tensors_00000.safetensors"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_passing_error_is_not_bad_input(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, verify) -> None:
    """Bad input ends a job for good; after a crash it is started again."""
    original = Path.open
    manifest({path.name: facts_of(path) for path in folder.iterdir()}).write(folder)

    def fails(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        opened(folder, verify)


def opened(folder: Path, verify: bool) -> Tensor:
    read = Manifest.read(folder)
    read.check_files(folder, read.files, content=verify)
    return Stored(folder).read("vector")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("[4,7]", "[4,-7]", "greater than or equal to 0"),
        ('"F32"', '"Tensor"', "Input should be 'F64'"),
        ('"tensors_00000', '"../tensors_00000', "outside its folder"),
        ("{", "", "Invalid JSON"),
    ],
)
def test_a_damaged_index_is_refused(folder: Path, old: str, new: str, text: str) -> None:
    index = (folder / INDEX).read_text()
    assert old in index
    (folder / INDEX).write_text(index.replace(old, new))
    assert text in refused(Stored, folder)
