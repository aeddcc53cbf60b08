"""Count training FLOPs under a window schedule, by the accounting of SkyLadder's Table 8 (arXiv 2503.15450)."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from megatron_ext.checkpoint.parameters import count_active_parameters
from megatron_ext.config import Config, ModelConfig
from megatron_ext.config.options import PRESETS
from megatron_ext.errors import UserError
from megatron_ext.masks import MaskOptions
from megatron_ext.schedule import WindowSchedule, build_schedule

_WINDOW_ALONE = MaskOptions(document_mask=False)


def training_flops(
    model: str | ModelConfig,
    schedule: WindowSchedule,
    row_length: int,
    steps: int,
    tokens_per_step: int,
    *,
    masks: MaskOptions = _WINDOW_ALONE,
) -> float:
    """Return the FLOPs of forward and backward: per token 6 * parameters + 12 * layers * heads * head size * C.

    Only the experts selected for a token count. With latent attention, head size is the mean of the sizes of keys and
    values. C is the effective context of a row under the step's window, (sum of squared segment lengths) / L, including
    the shorter last block of the grid. Documents are not counted: only the window bounds attention.

    Args:
        model: a preset by its exact name, or the shapes (with `vocab_size`).
        schedule: the window at each step.
        row_length: L in tokens.
        steps: optimizer steps.
        tokens_per_step: tokens of a global batch.
        masks: sliding windows and local layers count the keys that they see.

    Raises:
        UserError: no such preset, or a model without `vocab_size`.
    """
    if isinstance(model, str):
        if model not in PRESETS:
            raise UserError(f"model: got {model!r}, needs one of {', '.join(PRESETS)}")
        model = ModelConfig(**PRESETS[model])
    if model.vocab_size is None:
        raise UserError("vocab_size: got nothing, the parameter count needs it; set it in the model's configuration")
    parameters = count_active_parameters(model, model.vocab_size)
    windows = Counter[int]()
    for window, count in schedule.runs(0, steps):
        windows[min(window, row_length)] += count
    return sum(
        count * step_flops(model, parameters, tokens_per_step, masks.whole_row_context(row_length, window))
        for window, count in windows.items()
    )


def step_flops(model: ModelConfig, parameters: int, tokens: float, context: float) -> float:
    """Return the FLOPs of one step of `tokens` in the accounting of `training_flops`; `context` is C, in tokens."""
    pair = model.num_attention_heads * model.key_value_size  # products of two numbers, of scores and weighted values
    return tokens * (6.0 * parameters + 6.0 * model.num_layers * pair * context)


def utilisation(
    model: ModelConfig, parameters: int, tokens: float, context: float, *, seconds: float, peak: float
) -> float:
    """Return the model FLOPs utilization (MFU) of a step; attention's FLOPs are halved for the causal mask.

    `peak` is the FLOP/s of all GPUs together; the other arguments are as for `step_flops`.
    """
    return step_flops(model, parameters, tokens, context / 2) / seconds / peak


class RunFlops(NamedTuple):
    """The FLOPs of a whole run."""

    scheduled: float  # under the run's masks and window schedule
    constant: float  # with the last window from the first step on
    scoring: float  # of the short-context pass of token weighting


def run_flops(config: Config, vocab_size: int) -> RunFlops:
    """Count the FLOPs of a configuration."""
    model = replace(config.model, vocab_size=vocab_size)
    length = config.data.seq_length
    weighting = config.weighting
    steps = config.training.train_iters
    rows = config.data.global_batch_size
    schedule = config.window_schedule()
    scheduled, constant = (
        training_flops(model, each, length, steps, rows * length, masks=config.mask_options())
        for each in (schedule, build_schedule("constant", end=schedule.end))
    )
    scoring = 0.0
    if weighting.token_weighting == "unfrozen" and weighting.needs_short_losses:
        short = weighting.short()
        # the first chunk is also the beginning of the long pass: only the later ones add cost
        tokens = steps * rows * max(-(-(length - short.length) // short.stride), 0) * short.length
        # forward only, a third of training
        scoring = step_flops(model, count_active_parameters(model, vocab_size), tokens, short.length) / 3
    return RunFlops(scheduled, constant, scoring)
