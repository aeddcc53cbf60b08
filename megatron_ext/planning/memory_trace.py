"""The memory of one card over the passes of a pipeline step, from the estimate's parts."""

from __future__ import annotations

import numpy as np

from megatron_ext.arrays import Float64
from megatron_ext.config import Config
from megatron_ext.planning.memory import Memory, stage_memory
from megatron_ext.planning.simulation.step import SimulatedStep


def memory_trace(memory: Memory, step: SimulatedStep, stage: int, replica: int) -> tuple[Float64, Float64]:
    """Return seconds and bytes, float64 [n] each, the corners of a line.

    A forward pass adds one micro-batch's activations, a backward pass frees them; while it runs, the gradients of a
    layer stand beside them, and on the last stage, at its beginning, the loss head. The highest point is the estimate's
    total.

    Args:
        memory: of this stage, estimated.
        step: whose passes these are.
        stage: counted from 0.
        replica: which one's times.
    """
    own = np.flatnonzero(step.pipeline.stage == stage)
    forward = step.pipeline.forward[own]
    ends = step.ends[own, replica]
    begins = ends - step.seconds[own, replica]
    living = np.cumsum(np.where(forward, 1, -1))
    unit = memory.activations / living.max()
    ground = memory.static + memory.batches
    times, sizes = [0.0], [float(ground)]
    for begin, end, after, is_forward in zip(begins, ends, living, forward, strict=True):
        before, now = ground + (after - 1 if is_forward else after + 1) * unit, ground + after * unit
        if is_forward:
            times += [begin, end]
            sizes += [before, now]
        else:
            times += [begin, begin, end, end]
            sizes += [before, before + max(memory.logits, memory.layer), now + memory.layer, now]
    times.append(step.total)
    sizes.append(float(ground))
    return np.array(times), np.array(sizes)


def stage_traces(
    config: Config, gpus: int, vocab_size: int, step: SimulatedStep, replica: int
) -> dict[str, tuple[Float64, Float64]]:
    """Return `memory_trace` of the first stage and of the last, by their names."""
    stages = sorted({0, step.pipeline.stages - 1})
    return {
        f"stage {stage}": memory_trace(stage_memory(config, gpus, vocab_size, stage), step, stage, replica)
        for stage in stages
    }
