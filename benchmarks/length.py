"""Find the longest row that one GPU trains, by model shape and by recomputation and offloading mode.

Rows double from 8K on until a step runs out of memory; each attempt is a separate process, one micro-batch of one row
at the full window. The goal is 512K.

python benchmarks/length.py [SHAPE ...] [--modes none full host] [--output results.jsonl]
    SHAPE   1B, or 8B with 2 of its 32 layers: a pipeline stage of 16, with both ends
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

import torch
from record import CUDA, Records, add_output
from training import Training, shape

from megatron_ext.engine import parallel
from megatron_ext.planning.memory import estimate

SHAPES: dict[str, tuple[str, int | None]] = {"1B": ("1B", None), "8B": ("Llama-3-8B", 2), "dry-run": ("tiny-1M", 2)}
FULL = {"recompute_granularity": "full"}
MODES: dict[str, dict[str, Any]] = {"none": {}, "full": FULL, "host": FULL | {"offload_layer_inputs": True}}
FIRST, LAST = (8192, 2**20) if CUDA else (128, 256)
OUT_OF_MEMORY = 3


def attempt(name: str, mode: str, length: int, records: Records) -> int:
    """Train two steps of one row; return `OUT_OF_MEMORY` if it does not fit, after reporting it."""
    preset, layers = SHAPES[name]
    config = shape(preset, length, rows=1, layers=layers, **MODES[mode])
    facts = {"shape": name, "layers": config.model.num_layers, "mode": mode, "length": length}
    try:
        training = Training(config)
        facts["estimated_bytes"] = estimate(config, 1, training.vocab_size).total
        seconds = [training.seconds(training.batches(config, step, length)) for step in range(2)][-1]
    except torch.OutOfMemoryError:
        records.add(**facts, fits=False)
        return OUT_OF_MEMORY
    peak = torch.cuda.max_memory_allocated() if CUDA else None
    records.add(**facts, fits=True, seconds=round(seconds, 3), tokens_per_s=round(length / seconds), peak_bytes=peak)
    parallel.stop()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in SHAPES if (name == "dry-run") != CUDA]
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", default=default)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--seconds", type=float, default=500, help="begin no further attempt after so long")
    parser.add_argument("--length", type=int, help="try this one alone, in this process")
    add_output(parser)
    options = parser.parse_args()
    for name in set(options.shapes) - SHAPES.keys():
        parser.error(f"SHAPE: got {name!r}, needs one of {', '.join(SHAPES)}")
    if options.length:
        return attempt(options.shapes[0], options.modes[0], options.length, Records("length", options.output))
    began, failed = time.monotonic(), False
    output = ["--output", str(options.output)] if options.output else []
    for name in options.shapes:
        for mode in options.modes:
            length = FIRST
            while length <= LAST and time.monotonic() - began < options.seconds:
                command = [sys.executable, __file__, name, "--modes", mode, "--length", str(length), *output]
                status = subprocess.run(command, check=False).returncode
                failed = failed or status not in (0, OUT_OF_MEMORY)
                if status:
                    break
                length *= 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
