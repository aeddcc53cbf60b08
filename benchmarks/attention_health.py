"""What measuring attention costs: steps with and without it, in turn, in one process.

python benchmarks/attention_health.py [SHAPE ...] [--queries 64] [--interval 100] [--output results.jsonl]
    SHAPE   as in benchmarks/step.py: 120M-8K 360M-8K 1B-8K 1B-32K 8B-8K 8B-32K; without CUDA 1M-512 and 1M-4K

`share` is what an interval of k steps spends on it: x / (k t + x), where a step takes t without and t + x with it. The
goal: at most 1 % at k = 100. Q queries over T tokens cost a layer 2 Q T N H FLOPs, in float32; a step costs it about
6 T (12 D^2 + L N H), backward included: with D = N H = 2048, L = T = 8192 and Q = 64 the one is 0.07 % of the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch
from record import CUDA, Records, add_output
from step import SHAPES, Shape
from training import Training

from megatron_ext.batch import StepBatches
from megatron_ext.config import LoggingConfig
from megatron_ext.engine import parallel

GOAL = 0.01
SMALL = {"1M-512": Shape("tiny-1M", 512, rows=4, micro=2), "1M-4K": Shape("tiny-1M", 4096, rows=1)}


def measure(name: str, shape: Shape, queries: int, interval: int, records: Records) -> None:
    """Time a shape's steps and write down a line."""
    config = shape.config(None)
    if not CUDA:  # where bfloat16 is emulated
        config = replace(config, training=replace(config.training, bf16=False))
    health = LoggingConfig(attention_health_interval=1, attention_health_queries=queries)
    training = Training(config)
    plain = training.batches(config, 0, shape.length)
    measured = training.batches(replace(config, logging=health), 0, shape.length)
    for batches in (plain, measured):
        training.seconds(batches)
    pairs = [(seconds(training, plain), seconds(training, measured)) for _ in range(12)]
    step = statistics.median(one for one, _ in pairs)
    extra = statistics.median(other - one for one, other in pairs)
    share = extra / (interval * step + extra)
    records.add(
        shape=name,
        layers=config.model.num_layers,
        queries=queries,
        step_s=round(step, 4),
        extra_s=round(extra, 4),
        extra_of_step=round(extra / step, 4),
        interval=interval,
        share=round(share, 5),
        goal=GOAL,
        ok=share <= GOAL,
    )
    parallel.stop()


def seconds(training: Training, batches: StepBatches) -> float:
    """Time a step; on a CPU, which others may use as well, by the time that this process has had of it."""
    before = time.process_time()
    passed = training.seconds(batches)
    return passed if CUDA else time.process_time() - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = {name: shape for name, shape in SHAPES.items() if name != "dry-run"} if CUDA else SMALL
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", default=list(shapes))
    parser.add_argument("--queries", type=int, default=64, help="that are measured [64]")
    parser.add_argument("--interval", type=int, default=100, help="steps from one measure to the next [100]")
    add_output(parser)
    options = parser.parse_args()
    for name in set(options.shapes) - shapes.keys():
        parser.error(f"SHAPE: got {name!r}, needs one of {', '.join(shapes)}")
    torch.manual_seed(0)
    records = Records("attention health", options.output)
    for name in options.shapes:
        measure(name, shapes[name], options.queries, options.interval, records)
    return 1 if records.failed else 0


if __name__ == "__main__":
    sys.exit(main())
