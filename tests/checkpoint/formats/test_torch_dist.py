"""Checkpoints written and read block by block, against literal tensors and torch's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_ext.checkpoint.formats import torch_dist_writer
from megatron_ext.checkpoint.formats.torch_dist import Block, StoredTensor, TorchDistTensors
from megatron_ext.checkpoint.formats.torch_dist_writer import Layer, write_checkpoint
from megatron_ext.errors import UserError

STACKED = torch.arange(2 * 7 * 3, dtype=torch.float32).reshape(2, 7, 3)  # two layers of [7, 3]
ALONE = torch.arange(10, dtype=torch.bfloat16)


class Layers:
    """The layers of STACKED and ALONE, and which rows of them were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def layer(self, name: str, whole: Tensor, place: tuple[int, ...] = (), stack: tuple[int, ...] = ()) -> Layer:
        def read(first: int, last: int) -> Tensor:
            self.asked.append((name, first, last))
            return whole[first:last]

        return Layer(name, tuple(whole.shape), whole.dtype, place, stack, read)

    def all(self) -> list[Layer]:
        layers = [self.layer("stacked", STACKED[number], (number,), (2,)) for number in range(2)]
        return [*layers, self.layer("alone", ALONE)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Blocks of 24 bytes: two rows of `stacked`, twelve elements of `alone`."""
    monkeypatch.setattr(torch_dist_writer, "BLOCK_BYTES", 24)
    layers = Layers()
    write_checkpoint(tmp_path / "checkpoint", layers.all())
    pieces = [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert sorted(layers.asked) == [("alone", 0, 10), *sorted(("stacked", *piece) for piece in pieces * 2)]
    return tmp_path / "checkpoint"


def rows(tensors: TorchDistTensors, name: str, layer: int | None, first: int, last: int) -> list[Tensor]:
    return [rows.clone() for rows in tensors.rows(name, () if layer is None else (layer,), first, last)]


def test_shapes_and_rows_come_back(folder: Path) -> None:
    tensors = TorchDistTensors(folder)
    assert {name: (one.shape, one.dtype) for name, one in tensors.tensors.items()} == {
        "stacked": ((2, 7, 3), torch.float32),
        "alone": ((10,), torch.bfloat16),
    }
    for layer, first, last in ((0, 0, 7), (1, 0, 7), (1, 3, 5), (0, 6, 7)):
        assert torch.equal(torch.cat(rows(tensors, "stacked", layer, first, last)), STACKED[layer, first:last])
    assert torch.equal(torch.cat(rows(tensors, "alone", None, 2, 9)), ALONE[2:9])


def test_torch_reads_the_same(folder: Path) -> None:
    state = {"stacked": torch.zeros_like(STACKED), "alone": torch.zeros_like(ALONE)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["stacked"], STACKED)
    assert torch.equal(state["alone"], ALONE)


def test_the_same_tensors_give_the_same_files(folder: Path) -> None:
    """Neither a path nor a time is in them."""
    again = folder.with_name("again")
    write_checkpoint(again, Layers().all())
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    for path in folder.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_blocks_side_by_side_are_joined_in_halves(folder: Path) -> None:
    """As two tensor-parallel ranks leave a matrix whose columns are cut: here layer 0 beside layer 1."""
    tensors = TorchDistTensors(folder)
    left, right = (
        next(block for block in tensors.tensors["stacked"].blocks if block.offsets == (layer, 2, 0)) for layer in (0, 1)
    )
    wide = (Block((0, 2, 0), left.sizes, left.stored), Block((0, 2, 3), right.sizes, right.stored))
    tensors.tensors["wide"] = StoredTensor((1, 4, 6), torch.float32, wide)
    halves = rows(tensors, "wide", 0, 2, 4)
    assert [len(half) for half in halves] == [1, 1]
    assert torch.equal(torch.cat(halves), torch.cat([STACKED[0, 2:4], STACKED[1, 2:4]], dim=1))
    with pytest.raises(UserError, match="lacks part of wide; give another checkpoint"):
        rows(tensors, "wide", 0, 0, 4)
    tensors.tensors["narrow"] = StoredTensor((1, 4, 6), torch.float32, wide[:1])
    with pytest.raises(UserError, match="lacks part of narrow"):
        rows(tensors, "narrow", 0, 2, 4)


def test_damage_is_named(folder: Path) -> None:
    tensors = TorchDistTensors(folder)
    content = folder / "__0_0.distcp"
    whole = content.read_bytes()
    for damaged in (whole[:100], b"", bytes(len(whole)), b"\x80" * len(whole), b"(" + whole[1:]):
        content.write_bytes(damaged)
        with pytest.raises(UserError, match=r"__0_0\.distcp is damaged or missing \(.+\); give another checkpoint"):
            [rows(tensors, name, layer, 0, 7) for name, layer in (("stacked", 1), ("stacked", 0), ("alone", None))]
    content.write_bytes(whole)
    (first, *others) = tensors.tensors["stacked"].blocks
    longer = Block(first.offsets, (1, 3, 3), first.stored)
    tensors.tensors["stacked"] = StoredTensor((2, 7, 3), torch.float32, (longer, *others))
    with pytest.raises(UserError, match=r"__0_0\.distcp does not hold what \.metadata says"):
        rows(tensors, "stacked", longer.offsets[0], 0, 3)
    content.unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp is damaged or missing"):
        rows(TorchDistTensors(folder), "alone", None, 0, 1)
