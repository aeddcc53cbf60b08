"""Flags and YAML to `Config` and back: preset < YAML < flags.

The YAML has one mapping per section of `Config`; a flag is a field's name with dashes. Conversion and type
errors are pydantic's; a name that no field has is refused with the nearest one that a field has.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_ext.config import Config
from megatron_ext.errors import UserError
from megatron_ext.presets import PRESETS

_SECTIONS: dict[str, Any] = get_type_hints(Config)
_FIELDS: dict[str, tuple[str, Field[Any]]] = {
    field.name: (section, field) for section, kind in _SECTIONS.items() for field in fields(kind)
}
Values = dict[str, dict[str, Any]]


def parse(argv: Sequence[str]) -> Config:
    """Build the configuration from command-line flags and the YAML that `--config` names.

    Raises:
        UserError: an unknown flag, key or preset, an unreadable file, or a value of the wrong type.
    """
    flags = _parse_flags(argv)
    path = flags.pop("config")
    values: Values = {section: {} for section in _SECTIONS}
    for layer in (_read_yaml(path) if path is not None else {}, _by_section(flags)):
        for section, entries in layer.items():
            values[section].update(entries)
    return _build(_with_preset(values))


def load_yaml(path: Path) -> Config:
    """Read a configuration file alone, without flags."""
    return parse(["--config", str(path)])


def dump_yaml(config: Config) -> str:
    """All values, section by section; reading it back gives the same configuration."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def to_dict(config: Config) -> Values:
    """All values as plain YAML types."""
    return {
        section: {name: list(value) if isinstance(value, tuple) else value for name, value in entries.items()}
        for section, entries in asdict(config).items()
    }


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def _parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    parser = _parser()
    known, unknown = parser.parse_known_args(list(argv))
    for word in unknown:
        if word.startswith("-"):
            name = word.split("=")[0]
            options = [option for action in parser._actions for option in action.option_strings]
            raise UserError(f"{name}: no such flag{_nearest(name, options)}; --help lists all")
    if unknown:
        raise UserError(f"{unknown[0]}: got a word that belongs to no flag; values follow their --flag")
    return vars(known)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:  # argparse would print its usage, 80 lines of it
        raise UserError(message.removeprefix("argument "))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        usage="%(prog)s --config FILE [--flag value ...]",
        description="Pretrain a long-context language model. Flags win over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="YAML file with the sections " + ", ".join(_SECTIONS))
    for section, kind in _SECTIONS.items():
        group = parser.add_argument_group(section, kind.__doc__)
        hints = get_type_hints(kind)
        for field in fields(kind):
            _add_flag(group, field, hints[field.name])
    return parser


def _add_flag(group: argparse._ArgumentGroup, field: Field[Any], hint: Any) -> None:
    text = f"{field.metadata['help']} [{field.default}]".replace("%", "%%")
    if hint is bool:
        group.add_argument(
            flag(field.name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    else:
        many = isinstance(field.default, tuple)
        group.add_argument(
            flag(field.name), nargs="+" if many else None, metavar="X", default=argparse.SUPPRESS, help=text
        )


def _by_section(flags: dict[str, Any]) -> Values:
    values: Values = {}
    for name, value in flags.items():
        section, field = _FIELDS[name]
        nothing = value == "none" and field.default is None
        values.setdefault(section, {})[name] = None if nothing else value
    return values


def _read_yaml(path: str) -> Values:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config: got {path or repr(path)}, needs a readable YAML file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"--config: got {path}, needs a YAML file in UTF-8") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--config: got {path}, needs valid YAML: {reason}") from None
    if not isinstance(content, dict):
        raise UserError(f"--config: got {path}, needs a mapping of the sections {', '.join(_SECTIONS)}")
    for section, entries in content.items():
        _check_section(path, section, entries)
    return content


def _check_section(path: str, section: Any, entries: Any) -> None:
    if section not in _SECTIONS:
        where = f"; it belongs under `{_FIELDS[section][0]}:`" if section in _FIELDS else ""
        raise UserError(f"{path}: {section}: no such section{where or _nearest(str(section), list(_SECTIONS))}")
    if not isinstance(entries, dict):
        raise UserError(f"{path}: {section}: got {entries!r}, needs a mapping of options")
    for name, value in entries.items():
        if name not in _FIELDS:
            raise UserError(f"{path}: {section}.{name}: no such option{_nearest(str(name), list(_FIELDS))}")
        if _FIELDS[name][0] != section:
            raise UserError(f"{path}: {section}.{name}: belongs under `{_FIELDS[name][0]}:`; move it there")
        if isinstance(value, bool) and not isinstance(_FIELDS[name][1].default, bool):
            raise UserError(f"{path}: {section}.{name}: got {value}, needs another value: it is no yes-or-no option")
        if isinstance(value, list) and isinstance(_FIELDS[name][1].default, tuple):  # as the flag's words: [0.3, a]
            entries[name] = [str(item) if isinstance(item, int | float) else item for item in value]


def _with_preset(values: Values) -> Values:
    name = values["model"].get("model_preset")
    if name is None:
        return values
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(
            f"model_preset: got {name!r}, needs one of {', '.join(PRESETS)}{_nearest(str(name), list(PRESETS))}"
        )
    return values | {"model": PRESETS[name] | values["model"]}


def _build(values: Values) -> Config:
    try:
        return Config(**{s: TypeAdapter(kind).validate_python(values[s]) for s, kind in _SECTIONS.items()})
    except ValidationError as error:
        raise UserError("\n".join(_one_line(dict(e)) for e in error.errors())) from None


def _one_line(error: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    return f"{name}: got {error['input']!r}, needs another value: {error['msg'][0].lower()}{error['msg'][1:]}"


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-") if name.startswith("-") else name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
