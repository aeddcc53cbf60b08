"""Decide which options may change when a run resumes, by comparing effective values.

free        layout, logging, checkpoints, evaluations, micro-batches: the losses do not change
override    data, window, token weights, optimizer, seed, dropout: needs --override
impossible  shapes of the weights, kind and precision of the optimizer's state
"""

from dataclasses import dataclass, replace
from operator import eq
from typing import Any

from megatron_ext.config import Config
from megatron_ext.config.arguments import from_dict, to_dict
from megatron_ext.config.effective import effective
from megatron_ext.data.text.tokenizer import vocabulary_size
from megatron_ext.errors import UserError

_FREE_SECTIONS = {"parallel", "checkpoint", "logging"}
_FREE = {
    "model_preset",
    "init_method_std",
    "init_scheme",
    "micro_batch_size",
    "balance_batches",
    "loss_block_tokens",
    "eval_interval",
    "eval_iters",
    "eval_lengths",
    "eval_packing",
    "eval_document_mask",
    "eval_stride",
    "valid_data_path",
    "data_cache_path",
    "early_stopping_patience",
    "early_stopping_delta",
    "spike_window",
    "spike_deviations",
    "on_spike",
    "on_non_finite",
    "skip_limit",
    "lm_eval_interval",
    "lm_eval_tasks",
    "lm_eval_limit",
    "lm_eval_lengths",
    "lm_eval_include_path",
    "lm_eval_batch_size",
}
_LENGTH = {"train_iters", "lr_decay_iters"}  # free if no step's learning rate or window changes
_VOCABULARY = ("model", "vocab_size"), ("data", "tokenizer_model")
_SOFT_MODEL = {
    "norm_epsilon",
    "rotary_base",
    "rotary_base_local",
    "no_rope_freq",
    "local_window",
    "window_attn_skip_freq",
    "hidden_dropout",
}


@dataclass(frozen=True)
class Change:
    """An option whose value differs from the checkpoint's."""

    name: str
    section: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {self.saved!s:.60} -> {self.now!s:.60}"


def differences(saved: dict[str, Any], config: Config) -> list[Change]:
    """Return the options whose effective values differ.

    An option missing in the saved configuration had its default value. An option that is written in neither
    configuration is not listed, even if its effective value differs because another option changed.
    """
    before = from_dict(saved)
    old = to_dict(before)
    new = to_dict(config)
    written = {(section, name) for section in new for name in new[section] if old[section][name] != new[section][name]}
    if not written:
        return []
    was = to_dict(effective(before))
    now = to_dict(effective(config))
    if was["data"]["mixture"] != now["data"]["mixture"]:  # its packing options depend on the share
        was["data"]["long_share"] = old["data"]["long_share"]
        now["data"]["long_share"] = new["data"]["long_share"]
    if written & set(_VOCABULARY):  # another tokenizer changes the vocabulary size even if neither side sets it
        written.add(_VOCABULARY[0])
        sizes: list[int | None]
        try:
            sizes = [vocabulary_size(c.model.vocab_size, c.data.tokenizer_model) for c in (before, config)]
        except UserError:  # a tokenizer is missing: the shapes of the saved tensors decide
            sizes = [None, None]
        was["model"]["vocab_size"], now["model"]["vocab_size"] = sizes
    changes = []
    for section, entries in new.items():
        for name, value in entries.items():
            if (section, name) in written and was[section][name] != now[section][name]:
                # the written value, or the effective one if the option was omitted
                then = old[section][name]
                if then is None:
                    then = was[section][name]
                if value is None:
                    value = now[section][name]
                changes.append(Change(name, section, then, value))
    return changes


def check(saved: dict[str, Any], config: Config, step: int, source: object) -> list[Change]:
    """Check whether a run can continue from the checkpoint `source` after `step` steps; return the changes to log.

    Raises:
        UserError: shapes differ, or fields that `override` does not name.
    """
    changes = check_shapes(saved, config, source)
    free = set(_FREE)
    if same_schedules(from_dict(saved), config, step):
        free |= _LENGTH
    if config.training.moe_aux_loss_coeff and not config.balances_rows:
        free -= {"micro_batch_size", "balance_batches"}  # they determine the groups over which experts are balanced
    if config.training.early_stopping_patience:  # it would count anew
        free -= {"valid_data_path", "eval_packing"}
    restricted = [change for change in changes if change.section not in _FREE_SECTIONS and change.name not in free]
    refused = [change for change in restricted if change.name not in config.checkpoint.override]
    if refused:
        words = " ".join(change.name for change in restricted)
        raise UserError(
            f"load: {source} was made with other options: {', '.join(map(str, refused))}; "
            f"restore them, or add --override {words} to go on with the new ones"
        )
    return [change for change in changes if change.section not in ("checkpoint", "logging")]


def check_shapes(saved: dict[str, Any], config: Config, source: object) -> list[Change]:
    """Return all changes; raise UserError if shapes, optimizer or precision differ."""
    changes = differences(saved, config)
    for change in changes:
        soft = change.name in _SOFT_MODEL | _FREE or change.name.startswith("rope_")
        if change.name in ("bf16", "optimizer"):
            remedy = "begin anew with --init-from"
        elif change.section == "model" and not soft:
            remedy = "use its config.yaml"
        else:
            continue
        raise UserError(f"{change.name}: got {change.now}, {source} needs {change.saved}; {remedy}")
    return changes


def same_schedules(before: Config, config: Config, step: int) -> bool:
    """Return whether another run length leaves learning rate and window of all remaining steps unchanged."""
    after = replace(
        before,
        training=replace(before.training, train_iters=config.training.train_iters),
        optimizer=replace(before.optimizer, lr_decay_iters=config.optimizer.lr_decay_iters),
    )
    rates = (before.learning_rate_schedule(), after.learning_rate_schedule())
    end = config.training.train_iters
    # only the decays differ: two decays that are equal at both ends, at each turn and after it are equal everywhere
    turns = {step, end - 1}
    for rate in rates:
        for turn in (rate.warmup_steps, rate.decay_steps - rate.wsd_steps, rate.decay_steps):
            turns |= {turn - rate.first_step, turn - rate.first_step + 1}
    windows = (schedule.runs(step, end) for schedule in (before.window_schedule(), after.window_schedule()))
    return all(rates[0].at(t) == rates[1].at(t) for t in turns if step <= t < end) and all(map(eq, *windows))
