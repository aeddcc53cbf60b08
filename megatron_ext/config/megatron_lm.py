"""The table of Megatron-LM's arguments, megatron_lm.yaml, and what to write here for a flag of its scripts.

An argument has its name in Megatron-LM's `args`, which its checkpoints hold, too.

python -m megatron_ext.config.megatron_lm    prints the table of docs/howto/from-megatron-lm.md
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_ext.config.schema import FIELDS, flag

_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Argument:
    """An argument of Megatron-LM and its place here; the groups and texts are described in megatron_lm.yaml."""

    name: str
    group: Literal["carried", "model", "training", "silent"]
    text: str
    default: Any = None  # Megatron-LM's
    needed: Any = None  # model and training: the only value that is supported here

    @property
    def has_same_name(self) -> bool:
        return self.group == "carried" and self.name in FIELDS

    def allows(self, value: Any) -> bool:
        """Return whether a value has the same effect as the needed one."""
        return bool(value == self.needed or not (value or self.needed))


ARGUMENTS: dict[str, Argument] = {
    name: Argument(name, group, text, default, _TABLE["only"].get(name, default))
    for group in ("carried", "model", "training")
    for text, names in _TABLE[group].items()
    for name, default in names.items()
}
DEFAULTS: dict[str, Any] = {argument.name: argument.default for argument in ARGUMENTS.values()}
_SILENT: dict[str, str] = {name: text for text, names in _TABLE["silent"].items() for name in names.split()}

_OWN = {flag(prefix + name) for name in FIELDS for prefix in ("", "no_")}


def find_argument(name: str) -> Argument | None:
    """Return the argument with this name; None if the table does not know it."""
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    for pattern, text in _SILENT.items():
        if fnmatchcase(name, pattern):
            return Argument(name, "silent", text)
    return None


def set_by(word: str) -> tuple[Argument, bool] | None:
    """Return the argument that a flag such as --no-rope-fusion belongs to, and whether it sets or clears it."""
    word = word.removeprefix("--")
    if word in _TABLE["switched_off_by"]:
        name = _TABLE["switched_off_by"][word]
        return find_argument(name) or Argument(name, "silent", ""), False
    name = _TABLE["flags"].get(word, word.replace("-", "_"))
    for prefix in ("", "no_", "disable_"):
        if not name.startswith(prefix):
            continue
        argument = find_argument(name.removeprefix(prefix))
        if argument is not None:
            return argument, not prefix
    return None


def parse_value(word: str) -> int | float | str:
    """Return the number that a word of a command line is, or the word."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def equivalent(word: str, value: str) -> str | None:
    """Return what to write here instead of a flag of Megatron-LM with this value; None for other flags."""
    place = set_by(word)
    if place is None or word in _OWN:
        return None
    argument, is_set = place
    if argument.name in FIELDS:
        prefix = "" if is_set else "no_"
        return flag(prefix + argument.name)
    if argument.group == "silent":
        return f"not needed ({argument.text}); leave it out"
    if argument.group == "carried":
        return argument.text
    is_switch = value.startswith("--") or not value
    if argument.allows(is_set if is_switch else parse_value(value)):
        return "the default here; leave it out"
    return argument.text


def differences() -> str:
    """Return a Markdown table of the options that have the same name in both, but another default or meaning."""
    rows = ["| flag | default there | default here | what differs |", "|---|---|---|---|"]
    for argument in ARGUMENTS.values():
        if argument.has_same_name:
            ours = FIELDS[argument.name].default
            same = ours == argument.default or not (ours or argument.default)
            if argument.text or not same:
                cells = [f"`{flag(argument.name)}`", _shown(argument.default), _shown(ours), argument.text]
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default == ():
        return "none"
    if isinstance(default, float):
        return format(default, "g")
    return str(default)


if __name__ == "__main__":
    print(differences())
