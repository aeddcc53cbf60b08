"""Reads the options of a run that an earlier version wrote as what they meant then.

An option that a version does not know had its default: `config.arguments.from_dict`. Here stand those whose meaning
has changed. The configuration that comes of it trains as the run did, so that going on is refused where the new meaning
would change a step.

    window_cycles 3        cyclic_gradual made 2 n - 1 ramps of n cycles    2.5: as many ramps
    local_window 1024      local layers did not follow the schedule         and local_window_fixed
    whole_document         took the first row of a document alone           with rows_per_document=1
    document_mask          bounded evaluations as well                      and eval_document_mask

Where no option of today makes the model of then, `check_model` refuses to go on:

    YaRN, heads turned     its attention factor scaled whole heads          refused
    in part (phi)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.config.arguments import from_dict
from megatron_ext.errors import UserError
from megatron_ext.rope import attention_factor
from megatron_ext.schedule import ScheduleKind

Sections = dict[str, Any]

# In a manifest's `code`: versions that have the same number compute the same of the same options of a model. 1 is not
# written: it had YaRN's attention factor scale whole heads.
MODEL_VERSION = {"model_version": "2"}


def of_its_time(saved: Sections, source: object, override: tuple[str, ...] = ()) -> Sections:
    """Return a saved configuration, section by section, in the words of this version.

    Args:
        saved: as it was written.
        source: the checkpoint, for the messages.
        override: options that the run that goes on may change.

    Raises:
        UserError: a schedule that this version does not have.
    """
    window = saved.get("window", {})
    if not window or "local_window_fixed" in window:  # what this version writes
        return saved
    window = window | {"local_window_fixed": saved.get("model", {}).get("local_window") is not None}
    if window.get("window_schedule") == ScheduleKind.CYCLIC_GRADUAL:
        cycles = window.get("window_cycles", 1)
        if cycles == int(cycles):  # they were 2 n - 1 ramps, which n - 1/2 make today
            window["window_cycles"] = cycles - 0.5
        elif "window_cycles" in override:
            window["window_cycles"] = None
        else:
            raise UserError(
                f"load: {source} has window_cycles {cycles:g} of an earlier version, {2 * cycles - 1:g} ramps; the "
                "last one goes down, which cyclic_gradual has no more; go on with that version, or add "
                "--override window_cycles"
            )
    data = {**saved.get("data", {})}
    if data.get("packing") == "whole_document":
        data["packing_options"] = _first_row(data.get("packing_options", []))
    data["mixture"] = [
        part | {"packing_options": _first_row(part.get("packing_options", []))}
        if part.get("packing") == "whole_document"
        else part
        for part in data.get("mixture", [])
    ]
    training = saved.get("training", {}) | {"eval_document_mask": window.get("document_mask", False)}
    return saved | {"window": window, "data": data, "training": training}


def check_model(saved: Sections, code: Mapping[str, str], source: object, override: tuple[str, ...] = ()) -> None:
    """Refuse to go on with a model that this version computes otherwise.

    Args:
        saved, code: as in `another_model`.
        source: the checkpoint, for the message.
        override: options that the run that goes on may change.

    Raises:
        UserError: it is such a model, and `override` does not name rope_scaling.
    """
    told = another_model(saved, code)
    if told is not None and "rope_scaling" not in override:
        raise UserError(
            f"load: {source} {told}; go on with that version, or add --override rope_scaling to go on as transformers "
            "computes it"
        )


def another_model(saved: Sections, code: Mapping[str, str]) -> str | None:
    """Say in what a checkpoint's model is another one here, of the same options; None: in nothing.

    Args:
        saved: its configuration, as it was written.
        code: what wrote it (`manifest.code_identity`).
    """
    model = from_dict({"model": saved.get("model", {})}).model
    if code.items() >= MODEL_VERSION.items() or model.rotary_size == model.head_size or attention_factor(model) == 1:
        return None
    return (
        "is of an earlier version, where YaRN's attention factor scaled whole heads, and now the "
        f"{model.rotary_size} of {model.head_size} dimensions that are turned"
    )


def _first_row(options: list[str]) -> list[str]:
    return [*options, "rows_per_document=1"]
