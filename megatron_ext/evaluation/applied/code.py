"""The programs that a model wrote, judged: each in a sandbox, several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_ext.evaluation.applied.questions import Program
from megatron_ext.evaluation.applied.sandbox import Job, Limits, Verdict, judge


def job_of(prompt: str, continuation: str, program: Program) -> Job:
    """Put a program together: what was given, what the model wrote, and the tests."""
    call = "" if program.unittest else f"\ncheck({program.entry_point})\n"
    return Job(f"{prompt}{continuation}\n{program.test}\n{call}", program.unittest)


def judged(jobs: Sequence[Job], limits: Limits, workers: int) -> list[Verdict]:
    """Run programs, `workers` at a time; their verdicts in the same order.

    Raises:
        RefusedError: the kernel does not let them be confined.
    """
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda job: judge(job, limits), jobs))
