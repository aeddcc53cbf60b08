"""The trainer a step ahead of what it knows, where the first checkpoint is not published before later steps are done.

A checkpoint is written when the next step begins, so that which steps those are is no matter of speed: publishing
begins when one step after the saved one is recorded, and waits for the fourth.
"""

from __future__ import annotations

from pathlib import Path

from launcher import TIMEOUT_S, wait_until
from runs import read_jsonl

from megatron_ext.checkpoint import folders
from tests.parity import one_step_ahead

_publish = folders.publish


def publish(aside: Path) -> Path:
    """Wait in the publishing thread; training that waits for the thread gets an error instead."""
    saved = folders.step_of(aside.with_name(aside.name.split(".")[0]))
    metrics = aside.parents[1] / "metrics.jsonl"
    if not (aside.parent / folders.POINTER).exists():
        assert wait_until(lambda: len(read_jsonl(metrics)) >= saved + 4, TIMEOUT_S), "no step is done meanwhile"
    return _publish(aside)


folders.publish = publish


def main(argv: list[str]) -> int:
    return one_step_ahead.main(argv)
