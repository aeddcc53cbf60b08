"""A run continues under another configuration: what may change, what needs a word, what is impossible.

free        layout, logging, checkpoints, how often to evaluate, how a step is cut up: the numbers stay
override    data, window, weights of tokens, optimizer, seed, dropout: the run becomes another one, if asked
impossible  shapes of the weights, precision of the optimizer's state
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.arguments import from_dict, to_dict
from megatron_ext.config import Config
from megatron_ext.errors import UserError

_FREE_SECTIONS = {"parallel", "checkpoint", "logging"}
_FREE = {
    "model_preset",
    "init_method_std",
    "micro_batch_size",
    "balance_batches",
    "loss_block_tokens",
    "eval_interval",
    "eval_iters",
    "eval_lengths",
    "eval_packing",
}
_LENGTH = {"train_iters", "lr_decay_iters"}  # free where no step's learning rate or window changes
_SOFT_MODEL = {
    "norm_epsilon",
    "rotary_base",
    "local_window",
    "window_attn_skip_freq",
    "no_rope_freq",
    "hidden_dropout",
    "attention_dropout",
}


@dataclass(frozen=True)
class Change:
    """A field whose value differs from the checkpoint's."""

    name: str
    section: str
    saved: Any
    now: Any

    @property
    def impossible(self) -> bool:
        """Whether the saved tensors do not fit."""
        soft = self.name in _SOFT_MODEL | _FREE or self.name.startswith("rope_")
        return self.name == "bf16" or (self.section == "model" and not soft)

    def __str__(self) -> str:
        return f"{self.name} {_short(self.saved)} -> {_short(self.now)}"


def differences(saved: dict[str, Any], config: Config) -> list[Change]:
    """Every field whose value differs; one that the saved configuration does not know is equal."""
    return [
        Change(name, section, saved[section][name], now)
        for section, entries in json.loads(json.dumps(to_dict(config))).items()  # as the manifest has it
        for name, now in entries.items()
        if name in saved.get(section, {}) and saved[section][name] != now
    ]


def check(saved: dict[str, Any], config: Config, step: int, source: object) -> list[Change]:
    """Refuse what cannot or may not continue after `step` steps; return all changes that stay.

    Args:
        saved: the checkpoint's configuration, section by section.
        config: this run's; its `checkpoint.override` names the fields that may differ.
        source: the checkpoint, for the messages.

    Raises:
        UserError: shapes differ, or fields that `override` does not name.
    """
    changes = check_shapes(saved, config, source)
    asked = [change for change in changes if not _is_free(change, saved, config, step)]
    refused = [change for change in asked if change.name not in config.checkpoint.override]
    if refused:
        words = " ".join(dict.fromkeys(change.name for change in asked))
        raise UserError(
            f"load: {source} was made with other options: {', '.join(map(str, refused))}; "
            f"restore them, or add --override {words} to go on with the new ones"
        )
    return [change for change in changes if change.section not in ("checkpoint", "logging")]


def check_shapes(saved: dict[str, Any], config: Config, source: object) -> list[Change]:
    """Refuse what no tensor of the checkpoint fits; return all changes.

    Raises:
        UserError: shapes or precision differ.
    """
    changes = differences(saved, config)
    for change in changes:
        if change.impossible:
            remedy = "begin anew with --init-from" if change.name == "bf16" else "use its config.yaml"
            raise UserError(f"{change.name}: got {change.now}, {source} needs {change.saved}; {remedy}")
    return changes


def _is_free(change: Change, saved: dict[str, Any], config: Config, step: int) -> bool:
    if change.section in _FREE_SECTIONS or change.name in _FREE:
        return True
    return change.name in _LENGTH and same_schedules(saved, config, step)


def same_schedules(saved: dict[str, Any], config: Config, step: int) -> bool:
    """Whether another length of the run changes neither learning rate nor window of any step that is left."""
    before = from_dict(saved)
    after = replace(
        before,
        training=replace(before.training, train_iters=config.training.train_iters),
        optimizer=replace(before.optimizer, lr_decay_iters=config.optimizer.lr_decay_iters),
    )
    rates = before.learning_rate_schedule(), after.learning_rate_schedule()
    windows = before.window_schedule(), after.window_schedule()
    if rates[0] == rates[1] and windows[0] == windows[1]:
        return True
    return all(
        rates[0].at(t) == rates[1].at(t) and windows[0].window_at(t) == windows[1].window_at(t)
        for t in range(step, config.training.train_iters)
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
