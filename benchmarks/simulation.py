"""What the simulation (megatron_ext/planning/simulation/) costs, and how far it is off runs of two and four processes.

python benchmarks/simulation.py engines
    one step of 8 stages x 16 micro-batches on 32 replicas: simpy's events against numpy's longest path
    (pip install simpy; the simulation itself does without)
python benchmarks/simulation.py truth [--steps 12] [--rounds 3] [--raw FILE]
    the trainer on this CPU in two and four processes: the speed of this CPU is taken from data parallelism of two, with
    micro-batches of as many tokens, what a step costs beside its rows from one with half of them, and what it costs to
    exchange keys from CP 2 under whole rows;
    step times of pipelines, chunks, context parallelism and mixtures of these are predicted. Measured is CPU time, put
    together as the processes wait for each other (benchmarks/own_cores.py), as if each had a core of its own; the
    clock's time stands beside it, which other work on the machine may lengthen several times. Each round measures all
    cases; a case's time is the median, over rounds, of its ratio to the first case
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from own_cores import step_seconds
from scipy.optimize import brentq

from megatron_ext.config.arguments import parse
from megatron_ext.planning.simulation.cluster import read_cluster
from megatron_ext.planning.simulation.pipeline import Pipeline, pipeline
from megatron_ext.planning.simulation.whole_run import Machine, even_step
from megatron_ext.planning.step_time import Reached, Speeds, read_speeds

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
GOAL = 0.15  # an error
STAGES, MICROS, REPLICAS, MESSAGE = 8, 16, 32, 1e-5


def with_simpy(shape: Pipeline, seconds: np.ndarray) -> float:
    """Run the same step as events: each stage of each replica is a process that waits for what others send."""
    import simpy

    environment = simpy.Environment()
    count = len(shape.stage)
    done = [[environment.event() for _ in range(count)] for _ in range(seconds.shape[1])]

    def stage(number: int, replica: int):  # type: ignore[no-untyped-def]
        for one in np.flatnonzero(shape.stage == number).tolist():
            source = int(shape.source[one])
            if source < count:
                yield done[replica][source]
                ready = done[replica][source].value + (MESSAGE if shape.sent[one] else 0.0)
                if ready > environment.now:
                    yield environment.timeout(ready - environment.now)
            yield environment.timeout(seconds[one, replica])
            done[replica][one].succeed(environment.now)

    for replica in range(seconds.shape[1]):
        for number in range(shape.stages):
            environment.process(stage(number, replica))
    environment.run()
    return float(environment.now)


def engines() -> int:
    shape = pipeline(STAGES, 1, MICROS)
    seconds = np.random.default_rng(0).uniform(0.5, 1.5, (len(shape.stage), REPLICAS))
    times: dict[str, list[float]] = {"simpy": [], "numpy": []}
    for _ in range(7):
        began = time.perf_counter()
        events = with_simpy(shape, seconds)
        times["simpy"].append(time.perf_counter() - began)
        began = time.perf_counter()
        path = float(shape.ends(seconds, MESSAGE).max())
        times["numpy"].append(time.perf_counter() - began)
        assert abs(events - path) < 1e-9 * path, (events, path)
    simpy, numpy = (float(np.median(own)) for own in times.values())
    print(f"{len(shape.stage) * REPLICAS:,} passes: simpy {simpy * 1e3:.1f} ms, numpy {numpy * 1e3:.2f} ms")
    print(f"the same end of the step; numpy is {simpy / numpy:.0f} times as fast")
    return 0


@dataclass(frozen=True)
class Case:
    """One layout of some processes: micro-batches of so many rows, and further `flags` of the trainer."""

    name: str
    rows: int
    flags: tuple[str, ...] = ()
    processes: int = 2


ROW, ROWS, SMALL = 1024, 8, 128
HALF_ROWS = ("--seq-length", "512", "--global-batch-size", "16")
PIPELINE, CONTEXT = ("--pipeline-model-parallel-size", "2"), ("--context-parallel-size", "2")
# the speed of this CPU at micro-batches of so many rows (of a process) is taken from data parallelism
OWN = {rows: Case(f"DP 2, micro-batches of {rows}", rows) for rows in (1, 2, 4)} | {
    0.5: Case("DP 2, micro-batches of half a row", 1, HALF_ROWS)
}
HALF_STEP = Case("DP 2, half the rows", 1, ("--global-batch-size", str(ROWS // 2)))  # what a step costs beside its rows
EXCHANGE = Case("CP 2", 1, CONTEXT)  # under whole rows, what an exchange of keys costs this CPU
CASES = (
    *OWN.values(),
    HALF_STEP,
    Case("PP 2, 8 micro-batches", 1, PIPELINE),
    Case("PP 2, 4 micro-batches", 2, PIPELINE),
    Case("PP 2, 2 micro-batches", 4, PIPELINE),
    Case("PP 2 x 2 chunks, 2 micro-batches", 4, (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")),
    EXCHANGE,
    Case("PP 2 x DP 2, 4 micro-batches", 1, PIPELINE, 4),
    Case("PP 2 x CP 2, 8 micro-batches", 1, (*PIPELINE, *CONTEXT), 4),
    Case("PP 4, 8 micro-batches", 1, ("--pipeline-model-parallel-size", "4"), 4),
    Case("CP 2 x DP 2", 1, CONTEXT, 4),
)
MODEL = """
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --num-query-groups 4 --vocab-size 300
    --init-method-std 0.05 --seq-length 1024 --global-batch-size 8 --tokenizer-model bytes --eval-interval 0
    --no-tensorboard --no-document-mask --lr-warmup-iters 0 --device cpu
"""
FIRST = 2  # steps at each window that are left out: allocations, files read for the first time
LINK = 1.0  # GB/s between two processes of this machine through gloo; assumed
LINKS = (1e-3, LINK)  # GB/s at which keys are exchanged, copies and all: the same cores do it that compute


def flags_of(case: Case, steps: int, folder: Path) -> list[str]:
    """Flags of a run that takes `steps` steps under a small window, and as many under the whole row."""
    window = (
        f"--window-schedule continual --window-start {SMALL} --window-switch-step {steps} --train-iters {2 * steps}"
    )
    rows = ["--micro-batch-size", str(case.rows)]
    return [*MODEL.split(), *window.split(), "--data-path", str(folder / "corpus"), *rows, *case.flags]


def measured(case: Case, steps: int, folder: Path) -> dict[int, tuple[list[float], list[float]]]:
    """Run the trainer in its processes; by window, step seconds on cores of their own, and on the clock."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [
        *launch,
        str(case.processes),
        "benchmarks/own_cores.py",
        str(run),
        *flags_of(case, steps, folder),
        "--save",
        str(run / "save"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{case.name}: the run failed:\n{done.stderr[-3000:]}")
    clock = [json.loads(line)["step_time_s"] for line in (run / "save" / "metrics.jsonl").read_text().splitlines()]
    own = step_seconds(run, case.processes)
    assert len(own) == len(clock) == 2 * steps, (len(own), len(clock))
    small, whole = slice(FIRST, steps), slice(steps + FIRST, None)
    return {SMALL: (own[small], clock[small]), ROW: (own[whole], clock[whole])}


def cpu(products: float, attention: float, link: float = LINK) -> Speeds:
    """A card as fast as this CPU's core: TFLOP/s of matrix products, and of attention; GB/s between two."""
    reached = Reached(matmul=products, flash2=attention, cudnn=1.0, ring=1.0)
    plain = read_speeds()
    core = replace(plain.gpu("CPU"), bf16=1.0, bandwidth=1e9, nvlink=link, network=link)
    return replace(
        plain, gpus={"CPU": core}, reached={"cpu": reached}, eager=1.0, narrow_heads=1.0, bandwidth=1.0, links=1.0
    )


def predicted(case: Case, window: int, speeds: Speeds) -> float:
    """Simulate a step of a case; rows that are shorter than the window are their own windows."""
    window = min(window, parse(flags_of(case, 4, Path())).data.seq_length)
    machine = Machine(gpus=case.processes, gpu="CPU", speeds=speeds, cluster=read_cluster())
    return even_step(parse(flags_of(case, 4, Path())), machine, 300, window).total


def truth(steps: int, rounds: int, raw: Path | None) -> int:
    """Measure all cases, fit the speeds, and print what is predicted; the exit status: 0 where the goal is met."""
    for case in CASES:
        predicted(case, ROW, cpu(1.0, 1.0))  # what cannot be predicted is not measured first
    measurements = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "texts.jsonl"
        text.write_text("".join(json.dumps({"text": f"document {n} " * 200}) + "\n" for n in range(200)))
        command = [sys.executable, "tools/preprocess_data.py", "--input", text, "--output-prefix", folder / "corpus"]
        subprocess.run(
            [*command, "--tokenizer-model", "bytes"], cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True
        )
        for number in range(rounds):
            measurements.append({case: measured(case, steps, folder) for case in CASES})
            print(f"round {number + 1} of {rounds}", flush=True)
    if raw is not None:
        lines = [
            {"round": number, "case": case.name, "window": window, "own_core_s": own, "clock_s": clock}
            for number, cases in enumerate(measurements)
            for case, windows in cases.items()
            for window, (own, clock) in windows.items()
        ]
        raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # [rounds] seconds by case and window, in those of the first case at the same window: a machine's speed drifts
    # from minute to minute
    ratios = {
        (case, window): [
            float(np.median(cases[case][window][0]) / np.median(cases[CASES[0]][window][0])) for cases in measurements
        ]
        for case in CASES
        for window in (SMALL, ROW)
    }
    base = {
        window: np.median([np.median(cases[CASES[0]][window][0]) for cases in measurements]) for window in (SMALL, ROW)
    }
    medians = {(case, window): float(np.median(own) * base[window]) for (case, window), own in ratios.items()}
    rest = beside_rows(medians)
    print(f"this CPU, from {HALF_STEP.name}: {rest:.3f} s of a step are no rows'")
    found = {
        rows: fitted(own, {window: medians[own, window] - rest for window in (SMALL, ROW)}) for rows, own in OWN.items()
    }
    speeds = {case: cpu(*found[case.rows]) for case in CASES} | {own: cpu(*found[rows]) for rows, own in OWN.items()}
    exchanging = cpu(*found[0.5], fitted_link(found[0.5], medians[EXCHANGE, ROW] - rest))
    given = {(case, window) for case in (*OWN.values(), HALF_STEP) for window in (SMALL, ROW)} | {(EXCHANGE, ROW)}
    heads = f"{'measured':>9} {'ratio':>7} {'predicted':>10} {'error':>7} {'in rounds':>12} {'on the clock':>13}"
    print(f"{'case':36}{'window':>7} {heads}")
    errors, pairs = [], []
    for (case, window), seconds in medians.items():
        speed = exchanging if set(CONTEXT) <= set(case.flags) else speeds[case]
        forecast = predicted(case, window, speed) + rest
        error = forecast / seconds - 1
        on_clock = np.median([np.median(cases[case][window][1]) for cases in measurements])
        low, high = min(ratios[case, window]), max(ratios[case, window])
        print(
            f"{case.name:36}{window:>7,} {seconds:>8.3f}s {seconds / base[window]:7.2f} {forecast:>9.3f}s "
            f"{error:+7.1%} {low:6.2f}-{high:4.2f}x {on_clock:>12.3f}s"
        )
        if (case, window) not in given:
            errors.append(abs(error))
            pairs.append((seconds, forecast))
    order = [(a, b) for number, a in enumerate(pairs) for b in pairs[:number] if abs(a[0] / b[0] - 1) > 0.1]
    right = sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in order)
    within = sum(error <= GOAL for error in errors)
    print(
        f"error: median {np.median(errors):.1%}, largest {max(errors):.1%}; {within} of {len(errors)} within {GOAL:.0%}"
    )
    print(f"order: {right} of {len(order)} pairs that differ by more than 10 %")
    return 0 if within == len(errors) and right == len(order) else 1


def beside_rows(seconds: dict[tuple[Case, int], float]) -> float:
    """Find what a step takes however few rows it has: optimizer, records, Python."""
    twice = [2 * seconds[HALF_STEP, window] - seconds[OWN[1], window] for window in (SMALL, ROW)]
    return max(sum(twice) / len(twice), 0.0)


def fitted(own: Case, seconds: dict[int, float]) -> tuple[float, float]:
    """Find the TFLOP/s of products and of attention at which two windows of a case take so many seconds.

    Beside a rest, seconds are linear in the speeds' inverses.
    """
    guess = 0.03
    once = np.array([predicted(own, window, cpu(guess, guess)) for window in seconds])
    parts = 2 * np.array(
        [
            [whole - predicted(own, window, cpu(*pair)) for pair in ((2 * guess, guess), (guess, 2 * guess))]
            for window, whole in zip(seconds, once, strict=True)
        ]
    )
    inverse = np.linalg.solve(parts, np.array(list(seconds.values())) - once + parts.sum(axis=1)) / guess
    if not (inverse > 0).all():
        sys.exit(f"{own.name}: the machine was too busy: seconds by window {seconds}")
    print(f"this CPU, from {own.name}: {1e3 / inverse[0]:.1f} GFLOP/s in products, {1e3 / inverse[1]:.1f} in attention")
    products, attention = (1 / inverse).tolist()
    return products, attention


def fitted_link(own: tuple[float, float], seconds: float) -> float:
    """Find the GB/s of the exchange at which whole rows take so many seconds; an end of `LINKS` where none does."""

    def too_long(link: float) -> float:
        return predicted(EXCHANGE, ROW, cpu(*own, link)) - seconds

    slow, fast = LINKS
    link = fast if too_long(fast) >= 0 else slow if too_long(slow) <= 0 else float(brentq(too_long, slow, fast))
    print(f"this CPU, from {EXCHANGE.name}: {1e3 * link:.0f} MB/s of keys and values exchanged, copies and all")
    return link


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("engines", "truth"))
    parser.add_argument("--steps", type=int, default=12, help="at each window, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--raw", type=Path, help="JSONL for every step's seconds")
    options = parser.parse_args()
    if options.part == "engines":
        return engines()
    return truth(options.steps, options.rounds, options.raw)


if __name__ == "__main__":
    sys.exit(main())
