"""Measure whole optimizer steps of the papers' models, and the longest row that one GPU trains.

    python benchmarks/step.py speed [SHAPE ...] [--profile] [--output results.jsonl]
    python benchmarks/step.py length [SHAPE ...] [--modes none full host] [--output results.jsonl]

Speed: tokens/s, MFU, peak memory, and the share of time that the window schedule saves. SHAPE is 120M-8K, 360M-8K,
1B-8K, 1B-32K, 8B-8K or 8B-32K; 8B shapes have 4 of its 32 layers. Steps are timed under the windows of 20 evenly
spaced moments of the schedule, each distinct window once. "saved" is 1 - (mean of the 20 times) / (time at the full
window), next to the same quotient of FLOPs, which bounds it. MFU counts the causal mask's FLOPs against 989 TFLOP/s
(H100 and H200, dense bf16). The peak is shown next to the estimate of --dry-run.

Length: SHAPE is 1B, or 8B with 2 of its 32 layers (a pipeline stage of 16, with both ends). Rows of one document double
from 8K on until a step runs out of memory, with and without recomputation and offloading. The goal is 512K.
"""

import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from clock import CUDA, timed
from record import Records, parser_of, run_apart

from megatron_ext.batch import StepBatches
from megatron_ext.checkpoint.parameters import count_parameters
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.config.options import PRESETS
from megatron_ext.context_parallel.choice import cp_options
from megatron_ext.data.row import TokenRow
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.model import build_chunks
from megatron_ext.engine.optimizer import build_optimizer, set_learning_rate, wrap
from megatron_ext.engine.step import Stepper
from megatron_ext.engine.weights import initialise
from megatron_ext.planning.flops import step_flops
from megatron_ext.planning.memory import estimate
from megatron_ext.run.batches import BatchMaker
from megatron_ext.schedule import build_schedule

PEAK_FLOPS = 989e12
MOMENTS = 20
PAPER_STEPS = 95_367  # of 1,048,576 tokens: arXiv 2503.15450, Tables 8 and 11


@dataclass(frozen=True)
class Shape:
    """A model and its rows."""

    preset: str  # one of megatron_ext.config.options.PRESETS
    length: int  # tokens of a row
    rows: int  # of a step, in micro-batches of `micro`
    micro: int = 1
    layers: int | None = None
    rate: float = 0.125  # tokens by which the window grows in each of the paper's steps
    mfu: float = 0.0  # the goal at the full window
    saving: float | None = None  # the goal, as a share of the step's time

    def windows(self) -> list[int]:
        """Return the windows at evenly spaced moments of the paper's run."""
        schedule = build_schedule(kind="linear", start=32, end=self.length, rate=self.rate)
        return [schedule.window_at(int((k + 0.5) / MOMENTS * PAPER_STEPS)) for k in range(MOMENTS)]


SHAPES = {
    "120M-8K": Shape("120M", 8192, rows=8, micro=4),
    "360M-8K": Shape("360M", 8192, rows=8, micro=4),
    "1B-8K": Shape("1B", 8192, rows=4, mfu=0.45, saving=0.131),
    "1B-32K": Shape("1B", 32768, rows=1, rate=0.5, saving=0.222),
    "8B-8K": Shape("Llama-3-8B", 8192, rows=4, layers=4),
    "8B-32K": Shape("Llama-3-8B", 32768, rows=1, layers=4, rate=0.5, mfu=0.50),
    "dry-run": Shape("tiny-1M", 256, rows=2, rate=0.01),
}
LONG: dict[str, tuple[str, int | None]] = {"1B": ("1B", None), "8B": ("Llama-3-8B", 2), "dry-run": ("tiny-1M", 2)}
FULL = {"recompute_granularity": "full"}
MODES: dict[str, dict[str, Any]] = {"none": {}, "full": FULL, "host": FULL | {"offload_layer_inputs": True}}
FIRST, LAST = (8192, 2**20) if CUDA else (128, 256)
OUT_OF_MEMORY = 3


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
        self.config = config
        self.vocab_size = config.model.vocab_size
        device = platform.choose(config.parallel.device)
        ranks = parallel.start(config.parallel, config.model.num_layers, device, 1)
        chunks = build_chunks(config, self.vocab_size, device)
        initialise(chunks, config.model, self.vocab_size, 1, ranks)
        self.model = wrap(chunks, config)
        optimizer = build_optimizer(self.model, config)
        set_learning_rate(optimizer, 1e-5, 0.1)
        group = parallel.context_group(config.parallel, ranks, device)
        self.stepper = Stepper(self.model, optimizer, device, ranks, config, group)
        self.batch_maker = BatchMaker(config, ranks, cp_options(config, group))

    def batches(self, step: int, window: int) -> StepBatches:
        """Make the micro-batches of one step under a window."""
        return self.batch_maker.train(self.row_at, step, step * self.config.data.global_batch_size, window)

    def row_at(self, sample: int) -> TokenRow:
        """Return a row of random tokens: one document."""
        length = self.config.data.seq_length
        tokens = np.random.default_rng(sample).integers(0, self.vocab_size, length + 1)
        return TokenRow(tokens, np.array([length]), np.ones(length, dtype=np.bool_))

    def seconds(self, batches: StepBatches) -> float:
        """Time one optimizer step, with the host's work but without making its rows."""
        times: list[float] = []
        with timed(times):
            self.stepper.launch(batches).result()
        return times[0]

    def flops(self, batches: StepBatches) -> float:
        """Count a step's FLOPs, forward and backward; attention counts (query, visible key) pairs."""
        model = self.config.model
        looked_up = self.vocab_size * model.hidden_size if model.untie_embeddings_and_output_weights else 0
        parameters = count_parameters(model, self.vocab_size) - looked_up
        layouts = [batch.layout for batch in batches.train]
        return sum(
            step_flops(model, parameters, layout.tokens, layout.attention_pairs() / layout.tokens) for layout in layouts
        )


def measure(name: str, records: Records, *, profile: bool) -> dict[str, Any]:
    """Time a shape under its windows; record a line per window, and return the facts of the shape."""
    shape = SHAPES[name]
    built = configure(shape.preset, shape.length, shape.rows, layers=shape.layers)
    config = replace(built, data=replace(built.data, micro_batch_size=shape.micro))
    training = Training(config)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    facts = {"shape": name, "layers": config.model.num_layers}
    windows = shape.windows()
    times = {}
    flops = {}
    for window in sorted({*windows, shape.length}, reverse=True):  # the full window first: it has the peak
        batches = training.batches(0, window)
        seen = [training.seconds(batches) for _ in range(4 if CUDA else 2)]
        seconds = statistics.median(seen[1:])
        flops[window] = training.flops(batches)
        times[window] = seconds
        rates = {"tokens_per_s": shape.rows * shape.length / seconds, "mfu": flops[window] / seconds / PEAK_FLOPS}
        records.add(**facts, window=window, seconds=seconds, **rates)
    saved, bound = (1 - statistics.mean(of[w] for w in windows) / of[shape.length] for of in (times, flops))
    mfu = flops[shape.length] / times[shape.length] / PEAK_FLOPS
    summary: dict[str, Any] = {"summary": True, "mfu": mfu, "saved": saved, "flops_bound": bound}
    if shape.mfu or shape.saving is not None:
        saved_enough = shape.saving is None or saved >= max(shape.saving, 0.9 * bound)
        summary |= {"mfu_goal": shape.mfu, "saving_goal": shape.saving, "met": mfu >= shape.mfu and saved_enough}
    if CUDA:
        expected = estimate(config, 1, training.vocab_size).total
        peak = torch.cuda.max_memory_allocated()
        summary |= {"peak_bytes": peak, "estimated_bytes": expected, "peak_over_estimate": peak / expected}
    if profile:
        records.add(**facts, kernels=kernel_table(training))
    parallel.stop()
    return {"layers": config.model.num_layers, **summary}


def kernel_table(training: Training, rows: int = 25) -> list[dict[str, Any]]:
    """Return the operators and kernels of one full-window step that take the most time, in microseconds."""
    batches = training.batches(1, training.config.data.seq_length)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if CUDA else []
    with torch.profiler.profile(activities=activities) as profiler:
        training.seconds(batches)
    key = "self_device_time_total" if CUDA else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))
    return [
        {"name": event.key[:100], "calls": event.count, "us": round(getattr(event, key))} for event in events[:rows]
    ]


def attempt(name: str, mode: str, length: int, records: Records) -> int:
    """Train two steps of one row; return `OUT_OF_MEMORY` if it does not fit, after recording it."""
    preset, layers = LONG[name]
    config = configure(preset, length, rows=1, layers=layers, **MODES[mode])
    facts = {"shape": name, "layers": config.model.num_layers, "mode": mode, "length": length}
    try:
        training = Training(config)
        facts["estimated_bytes"] = estimate(config, 1, training.vocab_size).total
        seconds = [training.seconds(training.batches(step, length)) for step in range(2)][-1]
    except torch.OutOfMemoryError:
        records.add(**facts, fits=False)
        return OUT_OF_MEMORY
    peak = torch.cuda.max_memory_allocated() if CUDA else None
    records.add(**facts, fits=True, seconds=seconds, tokens_per_s=length / seconds, peak_bytes=peak)
    parallel.stop()
    return 0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("speed", "length"))
    parser.add_argument("shapes", nargs="*", metavar="SHAPE")
    parser.add_argument("--profile", action="store_true", help="speed: add the kernels that take the most time")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="of length")
    parser.add_argument("--seconds", type=float, default=500, help="length: begin no attempt after so long")
    parser.add_argument("--length", type=int, help="try this one alone, in this process")
    options = parser.parse_args()
    available = SHAPES if options.what == "speed" else LONG
    shapes = options.shapes or [name for name in available if (name == "dry-run") != CUDA]
    for name in set(shapes) - available.keys():
        parser.error(f"SHAPE: got {name!r}, needs one of {', '.join(available)}")
    records = Records("step" if options.what == "speed" else "length", options.output)
    if options.length:
        return attempt(shapes[0], options.modes[0], options.length, records)
    if options.what == "speed" and len(shapes) == 1:
        work = partial(measure, shapes[0], records, profile=options.profile)
        return int(not records.measure(work, shape=shapes[0]))

    # a process for each shape and each length: one that runs out of memory does not affect the others
    if options.what == "speed":
        flags = ["--profile"] if options.profile else []
        statuses = [run_apart(records, "speed", shape, *flags, shape=shape) for shape in shapes]
        return int(any(statuses))
    end = time.monotonic() + options.seconds
    failed = False
    for shape in shapes:
        for mode in options.modes:
            length = FIRST
            status = 0
            while not status and length <= LAST and time.monotonic() < end:
                command = ("length", shape, "--modes", mode, "--length", str(length))
                facts = {"shape": shape, "mode": mode, "length": length}
                status = run_apart(records, *command, statuses=(0, OUT_OF_MEMORY), **facts)
                length *= 2
            failed |= status not in (0, OUT_OF_MEMORY)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
