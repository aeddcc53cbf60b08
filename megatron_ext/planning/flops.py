"""Training FLOPs under a window schedule, by the accounting of SkyLadder's Table 8 (arXiv 2503.15450)."""

from __future__ import annotations

from collections import Counter

from megatron_ext.checkpoint.names import count_parameters
from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError
from megatron_ext.layout import build_layout
from megatron_ext.presets import PRESETS
from megatron_ext.schedule import WindowSchedule


def training_flops(
    model: str | ModelConfig, schedule: WindowSchedule, row_length: int, steps: int, tokens_per_step: int
) -> float:
    """FLOPs of forward and backward: per token 6 N + 12 * layers * hidden * C.

    C is the effective context of a row under the step's window, (sum of squared segment lengths) / L, the
    shorter last block of the grid included. Documents are not counted: the window alone bounds attention.

    Args:
        model: a preset by its exact name, or the shapes (with `vocab_size`).
        schedule: the window at each step.
        row_length: L in tokens.
        steps: optimizer steps.
        tokens_per_step: tokens of a global batch.

    Raises:
        UserError: no such preset, or a model without `vocab_size`.
    """
    if isinstance(model, str):
        if model not in PRESETS:
            raise UserError(f"model: got {model!r}, needs one of {', '.join(PRESETS)}")
        model = ModelConfig(**PRESETS[model])
    if model.vocab_size is None:
        raise UserError("vocab_size: got nothing, the parameter count needs it; set it in the model's configuration")
    windows = Counter(min(schedule.window_at(step), row_length) for step in range(steps))
    contexts = sum(count * build_layout(row_length, (), window).effective_context for window, count in windows.items())
    parameters = count_parameters(model, model.vocab_size)
    return tokens_per_step * (6.0 * parameters * steps + 12.0 * model.num_layers * model.hidden_size * contexts)
