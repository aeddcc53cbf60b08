"""Format a rehearsal as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_GIB = 2**30


def describe(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one rank, given as `rank.Rehearsed` in plain types."""
    yield f"rank {found['rank']}: {found['place']}; rows: {found['rows']}"
    if found["fault"] is not None:
        yield from _fault(found["fault"], "the model cannot be built")
    for step in found["steps"]:
        yield ""
        yield from _step(step)


def _step(step: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"  window {step['window']:,}: {step['microbatches']} micro-batches, {step['measured']} of them run with "
        f"{step['segments']:,} segments"
    )
    if step["fault"] is not None:
        yield from _fault(step["fault"], "the step fails")
    peak = sum(step["memory"].values())
    yield f"    peak memory    {peak / _GIB:8.2f} GiB at {step['peak_at']}"
    for part, size in step["memory"].items():
        yield f"      {part:<12} {size / _GIB:8.2f} GiB"
    if step["pinned"] >= 2**20:
        yield f"    pinned memory  {step['pinned'] / _GIB:8.2f} GiB of the host"
    if step["cycles"]:
        yield f"    reference cycles kept {step['cycles'] / _GIB:.2f} GiB until the step's end"
    flops = step["flops"]
    attention = sum(count for name, count in flops.items() if "attn" in name or "attention" in name)
    total = sum(flops.values())
    yield f"    FLOPs          {total:.3e}, of which attention {attention:.3e} ({attention / max(total, 1):.0%})"
    for group, calls in sorted(step["collectives"].items()):
        yield f"    sent over {group:<8} {calls['sent_bytes'] / _GIB:8.3f} GiB in {calls['count']} collectives"
    syncs = step["host_syncs"]
    yield f"    host syncs     {sum(syncs.values())}"
    for what, count in syncs.items():
        yield f"      {count:>4} x {what}"


def _fault(fault: Mapping[str, Any], what: str) -> Iterator[str]:
    yield f"  FAULT: {what}, at {fault['line'] or 'no line of this package'}: {fault['error']}"
