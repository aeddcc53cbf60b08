"""What the simulation (megatron_ext/planning/simulation/) costs, and how far it is off real runs of two processes.

python benchmarks/simulation.py engines
    one step of 8 stages x 16 micro-batches on 32 replicas: simpy's events against numpy's longest path
    (pip install simpy; the simulation itself does without)
python benchmarks/simulation.py truth [--steps 24] [--rounds 3] [--output results.jsonl]
    the trainer on this CPU, two processes with a core each: the speed of this CPU is taken from one run, under data
    parallelism; step times of the others (pipelines, chunks, context parallelism, windows) are predicted, as ratios to
    it. Rounds are interleaved and medians taken, as other work disturbs a machine
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from megatron_ext.planning.simulation.pipeline import Pipeline, pipeline

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("engines",))
    parser.parse_args()
    return engines()


if __name__ == "__main__":
    sys.exit(main())
