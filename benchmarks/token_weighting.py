"""What token weighting costs: step time against uniform training, beside the FLOPs floor.

Unfrozen, every step and every row is scored, N = 4n; frozen, the scores are read, and the floor is 1. The floor counts
multiply-adds alone: of training (forward and twice that backward) and of the chunks' forward pass, whose output layer
sees the scored tokens only. The paper's own figure is 1.27 times uniform (arXiv 2503.09202, stride 3n/4). The kinds of
step alternate within one process.

python benchmarks/token_weighting.py [--device cuda --bf16] [--output results.jsonl]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

from record import Records, add_output
from training import Training, forward_flops

from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig, WeightingConfig
from megatron_ext.engine import parallel

GOALS = {"unfrozen": 1.05, "frozen": 1.03}  # times the floor


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
    add_output(parser)
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


def main() -> int:
    options = parse_options()
    config = configuration(options)
    training = Training(config)
    frozen = replace(config.weighting, token_weighting="frozen", score_store="drawn at random")
    configs = {
        "uniform": replace(config, weighting=WeightingConfig()),
        "unfrozen": config,
        "frozen": replace(config, weighting=frozen),
    }
    steppers = {kind: training.stepper_of(one) for kind, one in configs.items()}
    times: dict[str, list[float]] = {kind: [] for kind in configs}
    for step in range(options.steps + 1):
        for kind, one in configs.items():
            times[kind].append(training.seconds(training.batches(one, step, options.seq_length), steppers[kind]))
    records = Records("weighting", options.output)
    for kind, goal in GOALS.items():
        batches = training.batches(configs[kind], 0, options.seq_length)
        floor = 1 + forward_flops(config, batches.short) / (3 * forward_flops(config, batches.train))
        # step by step: neighbours share the machine's mood
        ratio = statistics.median(b / a for a, b in zip(times["uniform"][1:], times[kind][1:], strict=True))
        records.add(
            kind=kind,
            seq_length=options.seq_length,
            short_context=config.weighting.short().length,
            short_stride=config.weighting.short().stride,
            chunk_tokens=sum(batch.layout.tokens for batch in batches.short),
            tokens=sum(batch.layout.tokens for batch in batches.train),
            seconds_uniform=round(statistics.median(times["uniform"][1:]), 4),
            seconds=round(statistics.median(times[kind][1:]), 4),
            times_uniform=round(ratio, 4),
            flops_floor=round(floor, 4),
            over_floor=round(ratio / floor, 4),
            goal=goal,
            met=ratio / floor <= goal,
        )
    parallel.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
