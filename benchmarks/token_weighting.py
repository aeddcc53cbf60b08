"""What unfrozen token weighting costs: step time against uniform training, and the FLOPs floor of both.

Every step and every row is scored, N = 4n. The floor counts multiply-adds alone: of training (forward and twice
that backward) and of the chunks' forward pass, whose output layer sees the scored tokens only. The paper's own figure
is 1.27 times uniform (arXiv 2503.09202, stride 3n/4). Both kinds of step alternate within one process.

python benchmarks/token_weighting.py [--device cuda --bf16] [--output results.jsonl]
"""

from __future__ import annotations

import argparse
import json
import platform as machine
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.batch import PackedBatch
from megatron_ext.checkpoint.hf.names import count_parameters
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig, WeightingConfig
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.engine import compat, parallel, platform
from megatron_ext.engine.model import build_chunks
from megatron_ext.engine.optimizer import build_optimizer, set_learning_rate, wrap
from megatron_ext.engine.step import Stepper
from megatron_ext.engine.weights import initialise
from megatron_ext.run.batches import BatchMaker, StepBatches

GOAL = 1.05


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seq-length", type=int, default=1024, help="N; the short context is N/4")
    add("--stride", type=int, help="s (default 3N/16)")
    add("--hidden-size", type=int, default=512)
    add("--num-layers", type=int, default=4)
    add("--vocab-size", type=int, default=8192)
    add("--rows", type=int, default=2, help="of a step")
    add("--steps", type=int, default=8, help="of each kind, after a first one that is not timed")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--bf16", action="store_true")
    add("--output", type=Path, metavar="FILE", help="add the results to this .jsonl")
    return parser.parse_args()


def configuration(options: argparse.Namespace) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=options.num_layers,
            hidden_size=options.hidden_size,
            ffn_hidden_size=options.hidden_size * 8 // 3 // 64 * 64,
            num_attention_heads=options.hidden_size // 64,
            num_query_groups=options.hidden_size // 128,
            vocab_size=options.vocab_size,
        ),
        parallel=ParallelConfig(device=options.device),
        data=DataConfig(data_path=("random",), seq_length=options.seq_length, global_batch_size=options.rows),
        training=TrainingConfig(bf16=options.bf16),
        weighting=WeightingConfig(
            token_weighting="unfrozen", short_context=options.seq_length // 4, short_stride=options.stride
        ),
    )


def forward_flops(config: Config, batches: list[PackedBatch]) -> float:
    """Two per multiply-add: of the layers' matrices, of attention's two products, of the output layer."""
    model, vocab_size = config.model, config.model.vocab_size or 0
    layers = count_parameters(model, vocab_size) - 2 * vocab_size * model.hidden_size
    total = 0.0
    for batch in batches:
        asked = batch.layout.tokens if batch.wanted is None else len(batch.wanted)
        pairs = batch.layout.attention_pairs()
        width = model.num_attention_heads * model.head_size
        total += 2 * layers * batch.layout.tokens + 4 * model.num_layers * width * pairs
        total += 2 * vocab_size * model.hidden_size * asked
    return total


class Bench:
    """One model, two kinds of step."""

    def __init__(self, config: Config) -> None:
        vocab_size = config.model.vocab_size or 0
        self.config = config
        self.where = platform.choose(config.parallel.device)
        compat.install_optimizer()
        ranks = parallel.start(config.parallel, config.model.num_layers, self.where, 1)
        chunks = build_chunks(config, vocab_size, self.where)
        initialise(chunks, config.model, vocab_size, 1, ranks)
        model = wrap(chunks, config)
        self.optimizer = build_optimizer(model, config)
        set_learning_rate(self.optimizer, 1e-5, 0.1)
        self.configs = {"unfrozen": config, "uniform": replace(config, weighting=WeightingConfig())}
        self.makers = {kind: BatchMaker(one, ranks, None) for kind, one in self.configs.items()}
        self.steppers = {
            kind: Stepper(
                model, self.optimizer, self.where, ranks, one, parallel.context_group(one.parallel, ranks, self.where)
            )
            for kind, one in self.configs.items()
        }

    def row_at(self, sample: int) -> TokenRow:
        """Random tokens, one document."""
        length = self.config.data.seq_length
        tokens = np.random.default_rng(sample).integers(0, self.config.model.vocab_size or 0, length + 1)
        return TokenRow(tokens, np.array([length]), np.ones(length, dtype=np.bool_))

    def batches(self, kind: str, step: int) -> StepBatches:
        config = self.config
        first = step * config.data.global_batch_size
        return self.makers[kind].train(self.row_at, step, first, config.data.seq_length)

    def seconds(self, kind: str, step: int) -> float:
        """Time one optimizer step; its rows are made before."""
        batches, stepper = self.batches(kind, step), self.steppers[kind]
        self._wait()
        began = time.perf_counter()
        stepper.train(batches)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.where.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> int:
    options = parse_options()
    config = configuration(options)
    bench = Bench(config)
    times: dict[str, list[float]] = {"uniform": [], "unfrozen": []}
    for step in range(options.steps + 1):
        for kind, seen in times.items():
            seen.append(bench.seconds(kind, step))
    step = bench.batches("unfrozen", 0)
    training, chunks = 3 * forward_flops(config, step.train), forward_flops(config, step.short)
    floor = 1 + chunks / training
    # step by step: neighbours share the machine's mood
    ratio = statistics.median(b / a for a, b in zip(times["uniform"][1:], times["unfrozen"][1:], strict=True))
    results: dict[str, Any] = {
        "seq_length": options.seq_length,
        "short_context": config.weighting.short().length,
        "short_stride": config.weighting.short().stride,
        "chunk_tokens": sum(batch.layout.tokens for batch in step.short),
        "tokens": sum(batch.layout.tokens for batch in step.train),
        "seconds_uniform": statistics.median(times["uniform"][1:]),
        "seconds_unfrozen": statistics.median(times["unfrozen"][1:]),
        "times_uniform": ratio,
        "flops_floor": floor,
        "over_floor": ratio / floor,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else machine.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
    }
    for name, value in results.items():
        print(f"{name:18} {value:.4f}" if isinstance(value, float) else f"{name:18} {value}")
    if options.output:
        with options.output.open("a") as file:
            file.write(json.dumps({"step": "weighting", **results}) + "\n")
    parallel.stop()
    met = ratio / floor <= GOAL
    print(f"goal: at most {GOAL} x the floor: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
