"""The leak probe on the real model: one changed token changes exactly the losses that may see it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.batch import pack
from megatron_ext.config import Config, DataConfig, ModelConfig
from megatron_ext.data.row import TokenRow
from megatron_ext.masks import MaskOptions
from tests.one_process import build_models, one_process

LENGTH, VOCABULARY, ROWS = 24, 64, 2
ENDS = ([1, 2, 9, 17, 24], [5, 23])  # ends at the first and the last position, and a document of one token
WINDOWS = [1, 2, 5, 7, 12, 23, LENGTH]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A model as the engine builds it, in this process, alone in its groups."""
    config = Config(
        model=ModelConfig(num_layers=3, vocab_size=VOCABULARY, init_method_std=0.2),
        data=DataConfig(seq_length=LENGTH, micro_batch_size=ROWS),
    )
    with one_process():
        (built,) = build_models(config)
        yield built


def rows() -> list[TokenRow]:
    chance = np.random.default_rng(0)
    trained = np.ones(LENGTH, dtype=np.bool_)
    return [TokenRow(chance.integers(1, VOCABULARY, LENGTH + 1), np.array(ends), trained) for ends in ENDS]


def with_token(some: list[TokenRow], row: int, place: int, shift: int) -> list[TokenRow]:
    """The rows with tokens[place] of one row replaced."""
    tokens = some[row].tokens.copy()
    tokens[place] = (tokens[place] + shift) % VOCABULARY
    return [replace(one, tokens=tokens) if number == row else one for number, one in enumerate(some)]


@torch.no_grad()
def losses(model: Any, some: list[TokenRow], window: int, document_mask: bool) -> np.ndarray:
    """float32 [rows, L]."""
    return model(pack(some, window, MaskOptions(document_mask))).cross_entropy_t.view(ROWS, LENGTH).numpy()


def may_change(row: int, place: int, window: int, document_mask: bool) -> np.ndarray:
    """bool [rows, L], from the formulas: who reads tokens[place] of `row` as an input or as its label."""
    positions = np.arange(LENGTH)
    document = np.array([sum(end <= position for end in ENDS[row]) for position in range(LENGTH + 1)])
    changed = np.zeros((ROWS, LENGTH), dtype=np.bool_)
    if place < LENGTH:
        sees = (positions // window == place // window) & (positions >= place)
        changed[row] = sees & (document[:LENGTH] == document[place]) if document_mask else sees
    if place:
        changed[row, place - 1] = True
    return changed


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_one_token_changes_exactly_what_sees_it(model: Any, window: int, document_mask: bool) -> None:
    base = losses(model, rows(), window, document_mask)
    for row in range(ROWS):
        for place in range(LENGTH + 1):
            changed = np.zeros((ROWS, LENGTH), dtype=np.bool_)
            for shift in (1, 20):  # one replacement might leave a loss the same to the last bit by chance
                changed |= losses(model, with_token(rows(), row, place, shift), window, document_mask) != base
            expected = may_change(row, place, window, document_mask)
            np.testing.assert_array_equal(changed, expected, err_msg=f"row {row}, token {place}")
