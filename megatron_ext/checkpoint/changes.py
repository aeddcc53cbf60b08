"""A run continues under another configuration: what may change, what needs a word, what is impossible.

free        layout, logging, checkpoints, how often to evaluate, how a step is cut up: the numbers stay
override    data, window, weights of tokens, optimizer, seed, dropout: the run becomes another one, if asked
impossible  shapes of the weights, precision of the optimizer's state
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.config import Config
from megatron_ext.config.arguments import Values, from_dict, to_dict
from megatron_ext.data.text.tokenizer import Tokenizer
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
_VOCABULARY = ("model", "vocab_size"), ("data", "tokenizer_model")
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
    """Every field whose value differs; one that the saved configuration does not know had its default.

    The sizes of a head and of the vocabulary, which a configuration may leave out, are compared as they come out.
    """
    before = {section: entries | saved.get(section, {}) for section, entries in _as_saved(Config()).items()}
    after = _as_saved(config)
    effective = {"kv_channels": (_head_size(before), _head_size(after)), "vocab_size": _vocabularies(before, after)}
    found = []
    for section, entries in after.items():
        for name, now in entries.items():
            old, new = effective.get(name, (before[section][name], now))
            if old != new:
                found.append(Change(name, section, old, new))
    return found


def _as_saved(config: Config) -> Values:
    """As a manifest has it."""
    values: Values = json.loads(json.dumps(to_dict(config)))
    return values


def _head_size(values: Values) -> int:
    model = values["model"]
    return int(model["kv_channels"] or model["hidden_size"] // model["num_attention_heads"])


def _vocabularies(before: Values, after: Values) -> tuple[int | None, int | None]:
    """Both sizes; twice None where one is not known: then the shapes of the saved tensors decide."""
    if all(before[section][name] == after[section][name] for section, name in _VOCABULARY):
        return None, None
    sizes = _vocabulary(before), _vocabulary(after)
    return (None, None) if None in sizes else sizes


def _vocabulary(values: Values) -> int | None:
    given, tokenizer = (values[section][name] for section, name in _VOCABULARY)
    if given is None and tokenizer is not None:
        try:
            return Tokenizer(tokenizer).vocab_size
        except UserError:  # it was there when the checkpoint was written
            return None
    return int(given) if given is not None else None


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
