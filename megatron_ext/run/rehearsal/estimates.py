"""Compare a planned layout with its rehearsal: memory, FLOPs and bytes sent by the fullest rank.

The rehearsal uses the widest window and one document in each row: the upper bound of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ext.config import Config
from megatron_ext.planning.memory import Memory, fullest_rank, fullest_stage, stage_memory
from megatron_ext.planning.step_time import rank_work, work_of
from megatron_ext.run.rehearsal.process import Request, in_process

_GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A configuration to rehearse: a stage of a recipe, or a planned layout.

    Attributes:
        name: the recipe, and its stage if it has several.
        argv: the training flags.
        world_size: number of processes.
        vocab_size: token ids.
        config: the stage's.
    """

    name: str
    argv: tuple[str, ...]
    world_size: int
    vocab_size: int
    config: Config

    @property
    def stage(self) -> int:
        """The fullest pipeline stage."""
        return fullest_stage(self.config, self.world_size, self.vocab_size)

    @property
    def estimate(self) -> Memory:
        """The memory estimate under the widest window."""
        return stage_memory(self.config, self.world_size, self.vocab_size, self.stage)

    def rehearse(self) -> dict[str, Any]:
        """Rehearse one step of the fullest rank; the result is as `rank.Step` in plain types.

        Raises:
            RuntimeError: the step fails.
        """
        rank = fullest_rank(self.config, self.world_size, self.vocab_size)
        window = self.config.window_schedule().end
        found = in_process(Request([*self.argv], self.world_size, rank, [window], "whole"))
        fault = found["fault"] or found["steps"][0]["fault"]
        if fault is not None:
            raise RuntimeError(f"{self.name}: {fault['traceback']}")
        step: dict[str, Any] = found["steps"][0]
        return step


def confirm(case: Case, gpu: str) -> Iterator[str]:
    """Yield a table of a layout's planned values next to its rehearsal.

    It covers one step of the fullest pipeline stage, at the widest window and with one document in each row.

    Raises:
        RuntimeError: the step fails.
    """
    step = case.rehearse()
    last = case.stage == case.config.parallel.pipeline_model_parallel_size - 1
    work = work_of(case.config, case.world_size, gpu, case.vocab_size, case.config.window_schedule().end)
    planned = rank_work(work, head=last)

    def sent(group: str) -> float:
        return float(step["collectives"].get(group, {"sent_bytes": 0})["sent_bytes"]) / _GIB

    experts = case.config.model.num_experts is not None
    yield f"{'of one rank':22} {'planned':>12} {'rehearsed':>12} {'difference':>11}"
    for name, one, other in (
        ("memory, GiB", case.estimate.total / _GIB, sum(step["memory"].values()) / _GIB),
        *([("host memory, GiB", host / _GIB, step["pinned"] / _GIB)] if (host := case.estimate.host) else []),
        ("PFLOP", planned.flops / 1e15, sum(step["flops"].values()) / 1e15),
        ("sent over TP, GiB", planned.tensor_bytes / _GIB, sent("TP")),
        ("sent over CP, GiB", planned.context_bytes / _GIB, sent("CP")),
        *([("sent over EP, GiB", planned.expert_bytes / _GIB, sent("EP"))] if experts else []),
    ):
        difference = f"{one / other - 1:+.1%}" if other else ""
        yield f"{name:22} {one:12.3f} {other:12.3f} {difference:>11}"
