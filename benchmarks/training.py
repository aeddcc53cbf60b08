"""A model's optimizer steps on this process, over rows of random tokens; shared by several benchmarks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from record import timed

from megatron_ext.batch import StepBatches, context_options
from megatron_ext.checkpoint.hf.names import count_parameters
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.config.options import PRESETS
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.model import build_chunks
from megatron_ext.engine.optimizer import build_optimizer, set_learning_rate, wrap
from megatron_ext.engine.step import Stepper
from megatron_ext.engine.weights import initialise
from megatron_ext.planning.flops import step_flops
from megatron_ext.run.batches import BatchMaker


def configure(preset: str, length: int, rows: int, *, layers: int | None = None, **parallel: Any) -> Config:
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
    """One model on one process; `config` has a vocabulary size."""

    def __init__(self, config: Config) -> None:
        assert config.model.vocab_size is not None
        self.config, self.vocab_size = config, config.model.vocab_size
        here = platform.choose(config.parallel.device)
        ranks = parallel.start(config.parallel, config.model.num_layers, here, 1)
        chunks = build_chunks(config, self.vocab_size, here)
        initialise(chunks, config.model, self.vocab_size, 1, ranks)
        self.model = wrap(chunks, config)
        optimizer = build_optimizer(self.model, config)
        set_learning_rate(optimizer, 1e-5, 0.1)
        group = parallel.context_group(config.parallel, ranks, here)
        self.stepper = Stepper(self.model, optimizer, here, ranks, config, group)
        self.batch_maker = BatchMaker(config, ranks, context_options(config, group))

    def batches(self, step: int, window: int) -> StepBatches:
        """Make the micro-batches of one step under a window."""
        return self.batch_maker.train(self.row_at, step, step * self.config.data.global_batch_size, window)

    def row_at(self, sample: int) -> TokenRow:
        """Return a row of random tokens: one document."""
        length = self.config.data.seq_length
        tokens = np.random.default_rng(sample).integers(0, self.vocab_size, length + 1)
        return TokenRow(tokens, np.array([length]), np.ones(length, dtype=np.bool_))

    def seconds(self, batches: StepBatches) -> float:
        """Time one optimizer step, including the host's work but not that of making its rows."""
        found: list[float] = []
        with timed(found):
            self.stepper.launch(batches).result()
        return found[0]

    def flops(self, batches: StepBatches) -> float:
        """Count a step's FLOPs, forward and backward; attention counts (query, visible key) pairs."""
        model = self.config.model
        looked_up = self.vocab_size * model.hidden_size if model.untie_embeddings_and_output_weights else 0
        parameters = count_parameters(model, self.vocab_size) - looked_up
        layouts = [batch.layout for batch in batches.train]
        return sum(step_flops(model, parameters, one.tokens, one.attention_pairs() / one.tokens) for one in layouts)
