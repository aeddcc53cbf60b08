"""Run a model's optimizer steps on this process, over rows of random tokens; shared by several benchmarks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_ext.batch import PackedBatch, StepBatches
from megatron_ext.checkpoint.hf.names import count_parameters
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.config.presets import PRESETS
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.engine import compat, parallel, platform
from megatron_ext.engine.model import build_chunks
from megatron_ext.engine.optimizer import build_optimizer, set_learning_rate, wrap
from megatron_ext.engine.step import Stepper
from megatron_ext.engine.weights import initialise
from megatron_ext.run.batches import BatchMaker, context_options


def shape(preset: str, length: int, rows: int, *, layers: int | None = None, **parallel: Any) -> Config:
    """Configure one process that trains a preset, or some of its layers, on `rows` rows of `length` tokens a step."""
    model = ModelConfig(**PRESETS[preset])
    if model.vocab_size is None:  # the tiny presets take it from a tokenizer
        model = replace(model, vocab_size=1024)
    return Config(
        model=replace(model, num_layers=layers or model.num_layers),
        parallel=ParallelConfig(**parallel),
        data=DataConfig(data_path=("random",), seq_length=length, global_batch_size=rows),
        training=TrainingConfig(bf16=True),
    )


class Training:
    """One model on one process.

    Args:
        config: of the model and of its steps; `vocab_size` is set.
    """

    def __init__(self, config: Config) -> None:
        assert config.model.vocab_size is not None
        self.config, self.vocab_size = config, config.model.vocab_size
        self.where = platform.choose(config.parallel.device)
        compat.install_optimizer()
        self.ranks = parallel.start(config.parallel, config.model.num_layers, self.where, 1)
        chunks = build_chunks(config, self.vocab_size, self.where)
        initialise(chunks, config.model, self.vocab_size, 1, self.ranks)
        self.model = wrap(chunks, config)
        self.optimizer = build_optimizer(self.model, config)
        set_learning_rate(self.optimizer, 1e-5, 0.1)
        self.group = parallel.context_group(config.parallel, self.ranks, self.where)
        self.stepper = self.stepper_of(config)

    def stepper_of(self, config: Config) -> Stepper:
        """Return the stepper of another configuration over this same model."""
        return Stepper(self.model, self.optimizer, self.where, self.ranks, config, self.group)

    def batches(self, config: Config, step: int, window: int) -> StepBatches:
        """Make the micro-batches of one step under a window; a frozen scorer's losses are random."""
        first = step * config.data.global_batch_size
        context = context_options(config, self.ranks, self.group)
        return BatchMaker(config, self.ranks, context, self.short_losses).train(self.row_at, step, first, window)

    def row_at(self, sample: int) -> TokenRow:
        """Return random tokens, as many as the longest row needs: one document."""
        length = self.config.data.seq_length
        tokens = np.random.default_rng(sample).integers(0, self.vocab_size, length + 1)
        return TokenRow(tokens, np.array([length]), np.ones(length, dtype=np.bool_))

    def short_losses(self, sample: int) -> npt.NDArray[np.float32]:
        """Return random losses in place of a frozen scorer's for a row."""
        return np.random.default_rng(sample).exponential(2.0, self.config.data.seq_length).astype(np.float32)

    def seconds(self, batches: StepBatches, stepper: Stepper | None = None) -> float:
        """Time one optimizer step, including the host's work; its rows were made before."""
        self._wait()
        began = time.perf_counter()
        (stepper or self.stepper).train(batches)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.where.device.type == "cuda":
            torch.cuda.synchronize()


def forward_flops(config: Config, batches: Sequence[PackedBatch]) -> float:
    """Count forward FLOPs, two per multiply-add: the layers' matrices, attention's two products, the output layer.

    Attention counts (query, visible key) pairs (half a square for a causal row).
    """
    model, vocab_size = config.model, config.model.vocab_size or 0
    outputs = vocab_size * model.hidden_size
    layers = count_parameters(model, vocab_size) - outputs * (2 if model.untie_embeddings_and_output_weights else 1)
    total = 0.0
    for batch in batches:
        asked = batch.layout.tokens if batch.wanted is None else len(batch.wanted)
        width = model.num_attention_heads * model.head_size
        total += 2 * layers * batch.layout.tokens + 2 * outputs * asked
        total += 4 * model.num_layers * width * batch.layout.attention_pairs()
    return total
