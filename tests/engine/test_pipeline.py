"""The pipeline's schedule with one stage: the mode of the model."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from one_process import build_models, one_process

from megatron_ext.batch import PackedBatch, pack
from megatron_ext.config import Config, DataConfig, ModelConfig
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.step import Pipeline
from megatron_ext.loss import TokenLosses

LENGTH, VOCABULARY = 16, 50

if torch.cuda.is_available():
    pytest.skip("one CPU process", allow_module_level=True)


@pytest.fixture(scope="module")
def chunk() -> Iterator[PackedGPT]:
    config = Config(
        model=ModelConfig(num_layers=2, vocab_size=VOCABULARY, hidden_dropout=0.5), data=DataConfig(seq_length=LENGTH)
    )
    with one_process():
        (built,) = build_models(config)
        yield built


def batch(seed: int) -> PackedBatch:
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, LENGTH + 1)
    row = TokenRow(tokens, np.array([LENGTH]), np.ones(LENGTH, dtype=np.bool_))
    return pack([row], LENGTH, Config().mask_options())


def test_a_forward_pass_has_no_dropout_or_gradients_and_training_has_both(chunk: PackedGPT) -> None:
    modes = []

    def value_of(_: PackedBatch, losses: TokenLosses) -> torch.Tensor:
        modes.append((chunk.training, torch.is_grad_enabled()))
        return losses.cross_entropy_t

    chunk.train()
    pipeline = Pipeline([chunk])
    first, again = pipeline.forward_only([batch(0), batch(0)], value_of)
    assert modes == [(False, False)] * 2
    torch.testing.assert_close(first, again, rtol=0, atol=0)  # in training, dropout would differ
    assert chunk.training
    assert all(parameter.grad is None for parameter in chunk.parameters())

    modes.clear()
    first, again = pipeline.run(
        [batch(0), batch(0)], lambda one, losses: (losses.cross_entropy_t.sum(), value_of(one, losses))
    )
    assert modes == [(True, True)] * 2
    assert not torch.equal(first, again)
    assert any(parameter.grad is not None for parameter in chunk.parameters())
    chunk.zero_grad()
