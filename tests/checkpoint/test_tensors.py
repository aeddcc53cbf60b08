"""Tensors of a checkpoint are written by several processes and read under any layout."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launcher import call
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from megatron_ext.checkpoint.manifest import FileFacts, facts_of
from megatron_ext.checkpoint.tensors import INDEX, Shard, Stored, write
from megatron_ext.errors import UserError

MATRIX = torch.arange(28, dtype=torch.float32).reshape(4, 7)
VECTOR = torch.arange(10, dtype=torch.bfloat16)


def part(name: str, whole: Tensor, *spans: slice) -> Shard:
    """A part of a tensor, in memory of its own."""
    offset = tuple(span.start or 0 for span in (*spans, *[slice(None)] * whole.dim()))[: whole.dim()]
    return Shard.of(name, whole[spans].clone(), tuple(whole.shape), offset)


def written(folder: Path) -> dict[str, FileFacts]:
    """Write both, the matrix as four rectangles."""
    facts: dict[str, FileFacts] = {}
    rectangles = [(slice(a, b), slice(c, d)) for a, b in ((0, 1), (1, 4)) for c, d in ((0, 3), (3, 7))]
    shards = [*(part("matrix", MATRIX, *spans) for spans in rectangles), part("vector", VECTOR)]
    write(folder, [*shards, replace(part("elsewhere", VECTOR), writes=False)], facts.update)
    return facts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path)
    return tmp_path


def test_whole_tensors_come_back_and_torch_reads_the_same(folder: Path) -> None:
    stored = Stored(folder)
    assert {name: (one.shape, one.dtype) for name, one in stored.tensors.items()} == {
        "matrix": ((4, 7), torch.float32),
        "vector": ((10,), torch.bfloat16),
    }
    state = {"matrix": torch.zeros_like(MATRIX), "vector": torch.zeros_like(VECTOR)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name, whole in (("matrix", MATRIX), ("vector", VECTOR)):
        assert torch.equal(stored.read(name), whole)
        assert torch.equal(state[name], whole)


def test_any_part_is_read_and_each_record_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, loads = Stored(folder), []
    load = stored._load
    monkeypatch.setattr(stored, "_load", lambda block: (loads.append(block), load(block))[1])
    spans = [(slice(a, b), slice(c, d)) for a, b in ((0, 2), (2, 4)) for c, d in ((0, 5), (5, 7))]
    shards = [part("matrix", torch.zeros_like(MATRIX), *span) for span in spans]
    stored.fill(shards)
    for shard, span in zip(shards, spans, strict=True):
        assert torch.equal(shard.data(), MATRIX[span])
    assert len(loads) == len(set(loads)) == 4


def test_files_have_their_checksums_and_the_same_tensors_give_the_same_files(tmp_path: Path) -> None:
    """Neither a path nor a time is in them."""
    one, other = tmp_path / "one", tmp_path / "other"
    facts = written(one)
    assert facts == {path.name: facts_of(path) for path in one.iterdir()}
    assert sorted(facts) == [".metadata", "__0_0.distcp", INDEX]
    assert written(other) == facts


def test_memory_of_what_is_made_to_be_written_is_freed(tmp_path: Path) -> None:
    """One tensor at a time; a view is copied, its memory stays."""
    made: list[Tensor] = []

    def make(number: int) -> Tensor:
        made.append(MATRIX + number)
        return made[-1]

    shards = [
        Shard(str(number), (4, 7), (0, 0), (4, 7), torch.float32, partial(make, number), made=True)
        for number in range(3)
    ]
    kept = MATRIX.clone()
    write(tmp_path, [*shards, Shard.of("view", kept[1:2], (1, 7), (0, 0))], lambda files: None)
    assert [tensor.untyped_storage().nbytes() for tensor in made] == [0, 0, 0]
    assert torch.equal(kept, MATRIX)
    assert [Stored(tmp_path).read(str(number))[0, 0] for number in range(3)] == [0, 1, 2]
    assert torch.equal(Stored(tmp_path).read("view"), MATRIX[1:2])
    assert (tmp_path / "__0_0.distcp").stat().st_size < 4 * 3000


def test_another_padding_where_it_may_be(folder: Path) -> None:
    longer, shorter = (torch.zeros(rows, 7) for rows in (5, 3))
    for whole in (longer, shorter):
        shard = Shard.of("matrix", whole, tuple(whole.shape), (0, 0))
        with pytest.raises(UserError, match=rf"^matrix: got \({len(whole)}, 7\), "):
            Stored(folder).fill([shard])
        Stored(folder).fill([shard], padded=True)
    assert torch.equal(longer[:4], MATRIX)
    assert not longer[4].any()
    assert torch.equal(shorter, MATRIX[:3])


def test_what_is_missing_or_damaged_is_named(folder: Path) -> None:
    stored = Stored(folder)
    with pytest.raises(UserError, match="has no tensor norm"):
        stored.read("norm")
    matrix = stored.tensors["matrix"]
    stored.tensors["matrix"] = replace(matrix, blocks=matrix.blocks[:3])
    with pytest.raises(UserError, match="lacks part of matrix"):
        stored.read("matrix")
    stored.tensors["matrix"] = replace(matrix, blocks=(replace(matrix.blocks[0], sizes=(2, 3)), *matrix.blocks[1:]))
    with pytest.raises(UserError, match=r"__0_0\.distcp does not hold what tensors\.json says"):
        stored.read("matrix")
    content = folder / "__0_0.distcp"
    whole = content.read_bytes()
    for damaged in (whole[:100], b"", bytes(len(whole)), b"\x80" * len(whole), b"(" + whole[1:]):
        content.write_bytes(damaged)
        with pytest.raises(UserError, match=r"^load: .*__0_0\.distcp cannot be read \(.+\); take another checkpoint$"):
            [Stored(folder).read(name) for name in ("matrix", "vector")]
    content.unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp cannot be read"):
        Stored(folder).read("vector")


@pytest.mark.parametrize("name", [INDEX, "__0_0.distcp"])
def test_what_may_pass_by_is_no_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Bad input ends a job for good; after a crash it is started again."""
    original = Path.open

    def fails(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        Stored(folder).read("vector")


def halves(rank: int, folder: Path, failing: int | None) -> str:
    """Write a row for each process; what this one is told."""

    def made() -> Tensor:
        if rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return MATRIX[2 * rank : 2 * rank + 2].clone()

    shard = Shard("matrix", (4, 7), (2 * rank, 0), (2, 7), torch.float32, made)
    done: dict[str, FileFacts] = {}
    try:
        write(folder, [shard], done.update, dist.group.WORLD)
    except CheckpointException as error:
        ((number, (failure, _)),) = error.failures.items()
        return f"{number}: {failure!r}"
    return " ".join(sorted(done))


def test_processes_write_together(tmp_path: Path) -> None:
    assert call(halves, 2, tmp_path, None) == [".metadata __0_0.distcp __1_0.distcp tensors.json", ""]
    assert torch.equal(Stored(tmp_path).read("matrix"), MATRIX)


def test_a_process_that_cannot_write_is_named_to_all(tmp_path: Path) -> None:
    message = call(halves, 2, tmp_path, 1)
    assert message[0] == message[1]
    assert message[0].startswith("1: OSError(28")
    assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("[4,7]", "[4,-7]", "greater than or equal to 0"),
        ('"float32"', '"Tensor"', "instance of dtype"),
        ('"__0_0.distcp"', '"../0.distcp"', "outside its folder"),
        ("{", "", "Invalid JSON"),
    ],
)
def test_a_damaged_index_is_refused(folder: Path, old: str, new: str, text: str) -> None:
    index = (folder / INDEX).read_text()
    assert old in index
    (folder / INDEX).write_text(index.replace(old, new))
    with pytest.raises(UserError, match=rf"^load: {folder}/tensors\.json ") as caught:
        Stored(folder)
    assert text in str(caught.value)
