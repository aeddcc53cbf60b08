"""Rows laid end to end, and shared out: literal arrays, and every token on exactly one rank."""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.batch import Places, RowScores, assemble, lay_end_to_end, pack
from megatron_ext.context_parallel.choice import CPOptions
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.data.row import TokenRow
from megatron_ext.masks import MaskOptions

ROWS = [
    TokenRow(np.array([1, 2, 3, 4, 5]), np.array([3]), np.array([True, True, False, True])),
    TokenRow(np.array([6, 7, 8, 9, 10]), np.array([], dtype=np.int64), np.ones(4, dtype=np.bool_)),
]


def test_literal_rows() -> None:
    batch = pack(ROWS, 4, MaskOptions(document_mask=True))
    assert batch.tokens_t.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert batch.labels_t.tolist() == [2, 3, 4, 5, 7, 8, 9, 10]
    assert batch.positions_t.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.trained_t.tolist() == [True, True, False, True, True, True, True, True]
    assert batch.weights_t.tolist() == [1.0] * 8
    assert batch.layout.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert (batch.wanted, batch.places, batch.scores, len(batch.attention)) == (None, None, None, 1)
    restarts = pack(ROWS, 3, MaskOptions(document_mask=False)).layout  # the window, at each row
    assert restarts.cu_seqlens.tolist() == [0, 3, 4, 7, 8]
    rows = [replace(row, weights=np.float32([1, 2, 3, n])) for n, row in enumerate(ROWS)]
    assert lay_end_to_end(rows).weights.tolist() == [1, 2, 3, 0, 1, 2, 3, 1]
    places = Places((2, 0, 3), torch.tensor([4, 1, 0, 2, 3]))
    assert [places.of_rank(rank).tolist() for rank in range(3)] == [[4, 1], [], [0, 2, 3]]


@pytest.mark.parametrize("size", [2, 4])
def test_every_token_is_on_one_rank_and_each_knows_where_all_are(size: int) -> None:
    tokens = lay_end_to_end(ROWS)
    masks = MaskOptions(document_mask=True).at(4, [row.document_ends for row in ROWS], 4)
    trained, labels = torch.from_numpy(tokens.trained), torch.from_numpy(tokens.labels)
    scores = RowScores(trained_T=trained, labels_T=labels, samples=(0, 1), seeds=(0, 1))
    held = []
    for rank in range(size):
        group = CPGroup(rank, size, None)
        context = CPOptions(group=group, policy="balanced", scheme=None, heads=4, key_heads=2)
        batch = assemble(tokens, masks, context, scores)
        rank_tokens = batch.places.of_rank(rank)
        assert batch.tokens_t.tolist() == tokens.tokens[rank_tokens.numpy()].tolist()
        assert [len(batch.places.of_rank(peer)) for peer in range(size)] == list(batch.places.counts)
        held += rank_tokens.tolist()
    assert sorted(held) == list(range(8))
    sampled = assemble(tokens, masks, context, scores, sampled=np.arange(3))
    on_device = list(tensors_of(sampled.to(torch.device("meta"))))
    assert len(on_device) >= 20
    assert {tensor.device.type for tensor in on_device} == {"meta"}


def tensors_of(value_or_carrier: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in dataclasses and tuples."""
    if isinstance(value_or_carrier, torch.Tensor):
        yield value_or_carrier
    for value in (
        value_or_carrier
        if type(value_or_carrier) is tuple
        else vars(value_or_carrier).values()
        if is_dataclass(value_or_carrier)
        else []
    ):
        yield from tensors_of(value)
