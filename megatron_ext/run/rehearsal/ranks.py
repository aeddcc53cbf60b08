"""Parse the options of tools/rehearse.py."""

from __future__ import annotations

from megatron_ext.config import Config
from megatron_ext.errors import UserError


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
