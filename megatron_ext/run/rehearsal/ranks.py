"""Rehearse ranks one after the other, each in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.config import Config
from megatron_ext.errors import UserError
from megatron_ext.run.rehearsal.process import Request


def check_layers(config: Config) -> None:
    """Check for options that Megatron's local layers do not support.

    Raises:
        UserError: grouped matrix products of experts.
    """
    if config.parallel.moe_grouped_gemm:
        raise UserError(
            "moe_grouped_gemm: got true, which needs Transformer Engine; a rehearsal has Megatron's local layers: add "
            "--no-moe-grouped-gemm"
        )


def ranks_of(text: str, config: Config, world_size: int) -> list[int]:
    """Parse "0,7,63" or "stages": the first rank of each pipeline stage.

    Raises:
        UserError: not ranks of this run.
    """
    if text == "stages":
        per_stage = world_size // config.parallel.pipeline_model_parallel_size
        return list(range(0, world_size, per_stage))
    return numbers("ranks", text, 0, world_size - 1, "or stages")


def windows_of(text: str, config: Config) -> list[int]:
    """Parse "32,8192,full", where full is the schedule's last window.

    Raises:
        UserError: not windows of this run.
    """
    length, full = config.data.seq_length, config.window_schedule().end
    return numbers("windows", text.replace("full", str(full)), 1, length, "or full")


def numbers(field: str, text: str, low: int, high: int, other: str) -> list[int]:
    """Parse comma-separated numbers.

    Raises:
        UserError: invalid text, or a number out of range.
    """
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and low <= int(word) <= high for word in words):
        raise UserError(f"{field}: got {text!r}, needs numbers {low}..{high} with commas between them, {other}")
    return list(dict.fromkeys(int(word) for word in words))


def rehearse_ranks(
    argv: Sequence[str],
    world_size: int,
    ranks: Sequence[int],
    windows: Sequence[int],
    documents: str | None,
    expert_load: float = 1.0,
) -> Iterator[dict[str, Any]]:
    """Rehearse each rank and yield its result, as `rank.Rehearsed` in plain types.

    Raises:
        UserError: this machine cannot rehearse, or the configuration cannot be run.
    """
    for rank in ranks:
        yield in_process(Request(list(argv), world_size, rank, list(windows), documents, expert_load))


def in_process(request: Request) -> dict[str, Any]:
    """Run one request in a separate process, which isolates the patches and mocks.

    Raises:
        UserError: the process reports bad input.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder) / "request.json", Path(folder) / "found.json"
        request.write(asked)
        command = [sys.executable, "-m", "megatron_ext.run.rehearsal", str(asked), str(found)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 2:
            raise UserError(done.stderr.strip().splitlines()[-1])
        if done.returncode != 0:
            raise RuntimeError(f"rank {request.rank} died with status {done.returncode}:\n{done.stderr[-4000:]}")
        answer: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        return answer
