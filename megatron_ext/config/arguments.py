"""Reads flags and YAML into `Config` and writes it back: preset < YAML < the stage's YAML < flags.

The YAML has one mapping per section of `Config`, and may have `stages:`; a flag is a field's name with dashes.
`extends: FILE` begins with another file of the same folder or beside it; what stands here wins, value by value. A file
of many runs (config/matrix.py) is named with one of them: FILE#NAME.
Conversion and type errors are pydantic's; a name that no field has is refused with the nearest one that a field has.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import Field, asdict, dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megatron_ext.cli import Parser, nearest
from megatron_ext.config import Config, ParallelConfig, matrix
from megatron_ext.config.presets import PRESETS
from megatron_ext.config.stages import Stage, link_stage, read_entries
from megatron_ext.data.rows.mixture import expand_mixture, read_mixture
from megatron_ext.errors import UserError, echo
from megatron_ext.files.yaml_file import read_yaml

_SECTIONS: dict[str, Any] = get_type_hints(Config)
_FIELDS: dict[str, tuple[str, Field[Any]]] = {
    field.name: (section, field) for section, options in _SECTIONS.items() for field in fields(options)
}
# get_type_hints leaves the limits of types out: validation.py checks them, when all stages are known
_TYPES: dict[str, TypeAdapter[Any]] = {
    section: TypeAdapter(TypedDict(section, get_type_hints(options), total=False))  # type: ignore[operator]
    for section, options in _SECTIONS.items()
}
_HINTS: dict[str, Any] = {
    name: hint for options in _SECTIONS.values() for name, hint in get_type_hints(options).items()
}
_HELP = """Pretrain a long-context language model. Flags win over the file.

N is a whole number, X a number; [..] is the default. The value `none` takes back what the file says of an option that
has no default, or of a list.
"""
_YES_OR_NO = (bool, bool | None)  # None: as the platform has it
Values = dict[str, dict[str, Any]]


def parse(argv: Sequence[str]) -> Config:
    """Build the configuration from command-line flags and the YAML that `--config` names.

    Raises:
        UserError: an unknown flag, key or preset, an unreadable file, a value of the wrong type, or several stages.
    """
    stages = parse_stages(argv)
    if len(stages) > 1:
        names = ", ".join(str(stage.name) for stage in stages)
        raise UserError(f"stage: got none of {names}; add --stage NAME")
    return stages[0].config


def parse_processes(argv: Sequence[str]) -> ParallelConfig:
    """Read how processes share a model that is not trained, from the trainer's flags of that name.

    Raises:
        UserError: as `parse`, or a flag that is training's alone.
    """
    config = parse(argv)
    for section, given in vars(config).items():
        for name, value in vars(given).items():
            if section != "parallel" and value != getattr(getattr(Config(), section), name):
                raise UserError(f"{name}: got {value}, which is training's; leave {flag(name)} out")
    return config.parallel


def parse_stages(argv: Sequence[str]) -> list[Stage]:
    """Build the stages of a run in their order: one without a name where the YAML has no `stages:`.

    `--stage NAME` leaves that one alone.

    Raises:
        UserError: as `parse`, but for several stages.
    """
    flags = _parse_flags(argv)
    path, wanted = flags.pop("config"), flags.pop("stage")
    for name in ("dry_run", "world_size"):
        flags.pop(name)
    content = _read_yaml(path) if path is not None else {}
    entries = content.pop("stages", None)
    given: Values = {}
    for name, value in flags.items():
        section, field = _FIELDS[name]
        if field.default is None and value == "none":
            value = None
        elif field.default == () and value == ["none"]:
            value = []
        given.setdefault(section, {})[name] = value
    if entries is None:
        if wanted is not None:
            raise UserError(f"stage: got {wanted}, but {path or 'the run'} has no stages; leave it out")
        return [Stage(None, _merge(content, given))]
    stages: list[Stage] = []
    for entry in read_entries(entries, path):
        for section, options in entry.sections.items():
            _check_section(path, section, options)
        common, flags_here = content, given
        if stages:  # what the file says for all stages to begin with is the first one's; a flag is the named one's
            common = _without_init(content)
            flags_here = given if entry.name == wanted else _without_init(given)
        config = _merge(common, entry.sections, flags_here)
        stages.append(link_stage(entry.name, config, entry.keep, stages[-1] if stages else None))
    chosen = [stage for stage in stages if wanted in (None, stage.name)]
    if not chosen:
        names = [str(stage.name) for stage in stages]
        raise UserError(f"stage: got {wanted}, {path} has {', '.join(names)}{nearest(str(wanted), names)}")
    return chosen


@dataclass(frozen=True)
class DryRun:
    """Says what `--dry-run` asks for: a run that is described, not done.

    Attributes:
        strict: missing data is a mistake.
        world_size: processes to reckon with; None: as many as there are.
    """

    strict: bool
    world_size: int | None


def parse_dry_run(argv: Sequence[str]) -> DryRun | None:
    """Read what `--dry-run` asks for; None without that flag.

    Raises:
        UserError: an unknown flag, or an impossible number of processes.
    """
    flags = _parse_flags(argv)
    strictness, world_size = flags["dry_run"], flags["world_size"]
    if strictness is None:
        if world_size is not None:
            raise UserError(f"world_size: got {world_size}, needs --dry-run; a run counts its processes itself")
        return None
    if world_size is not None and world_size < 1:
        raise UserError(f"world_size: got {world_size}, needs at least 1")
    return DryRun(strictness == "strict", world_size)


def _without_init(layer: Values) -> Values:
    firsts = ("init_from", "init_optimizer")
    return layer | {"checkpoint": {k: v for k, v in layer.get("checkpoint", {}).items() if k not in firsts}}


def _merge(*layers: Values) -> Config:
    values = _over({section: {} for section in _SECTIONS}, *layers)
    preset = values["model"].get("model_preset")
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            near = nearest(str(preset), list(PRESETS))
            raise UserError(f"model_preset: got {echo(preset)}, needs one of {', '.join(PRESETS)}{near}")
        values["model"] = PRESETS[preset] | values["model"]
    return _build(_with_mixture(values))


def _over(*layers: Values) -> Values:
    """Lay sections over one another, value by value; a later layer wins."""
    merged: Values = {}
    for layer in layers:
        for section, entries in layer.items():
            merged[section] = merged.get(section, {}) | entries if section in _SECTIONS else entries
    return merged


def dump_yaml(config: Config) -> str:
    """Write all values as YAML, section by section; reading it back gives the same configuration."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def to_dict(config: Config) -> Values:
    """Give all values as plain YAML types, section by section."""
    return {section: _plain(entries) for section, entries in asdict(config).items()}


def _plain(value: Any) -> Any:
    """Turn tuples into lists and enums into words, as YAML and JSON give them back."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, StrEnum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def from_dict(values: Values) -> Config:
    """Build the configuration of `to_dict`; missing options have their defaults, unknown ones are left out.

    Raises:
        UserError: a value of the wrong type.
    """
    return _build(
        {
            section: {name: value for name, value in values.get(section, {}).items() if name in _FIELDS}
            for section in _SECTIONS
        }
    )


def flag(name: str) -> str:
    """Spell the command-line flag of a field."""
    return "--" + name.replace("_", "-")


def as_flag(name: str, value: Any) -> str:
    """Spell the words of the command line that give a field a value, as a shell takes them."""
    if _HINTS[name] in _YES_OR_NO and value is not None:
        return flag(name) if value else flag(f"no_{name}")
    words = value if isinstance(value, tuple | list) else ["none" if value is None else value]
    return shlex.join([flag(name), *(str(word) for word in words or ["none"])])


def _parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    known = vars(_parser().parse_args(list(argv)))
    known.pop("debug", None)  # of command_line.py
    return known


class _Help(argparse.RawDescriptionHelpFormatter):
    """Gives the help of a flag the line's width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


@cache
def _parser() -> Parser:
    parser = Parser(
        usage="%(prog)s --config FILE [--flag value ...]",
        description=_HELP,
        formatter_class=_Help,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with the sections " + ", ".join(_SECTIONS) + ", and stages"
    )
    parser.add_argument("--stage", metavar="NAME", help="run only this one of the file's `stages:`")
    parser.add_argument(
        "--dry-run",
        nargs="?",
        const="lenient",
        choices=("lenient", "strict"),
        help="say what the run would be, and leave; strict: missing data is a mistake",
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="processes that a dry run reckons with")
    for section, options in _SECTIONS.items():
        group = parser.add_argument_group(section, options.__doc__)
        hints = get_type_hints(options)
        for field in fields(options):
            _add_flag(group, field, hints[field.name])
    return parser


def _add_flag(group: argparse._ArgumentGroup, field: Field[Any], hint: Any) -> None:
    text = (field.metadata["help"] + _default(field)).replace("%", "%%")
    if hint in _YES_OR_NO:
        group.add_argument(
            flag(field.name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    else:
        many = isinstance(field.default, tuple)
        group.add_argument(
            flag(field.name),
            nargs="+" if many else None,
            metavar=_value(field, hint),
            default=argparse.SUPPRESS,
            help=text,
        )


def _default(field: Field[Any]) -> str:
    """Say a field's default where it is a value; of the others the help says what happens without."""
    default = field.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return f" [{'yes' if default else 'no'}]"
    return f" [{format(default, 'g') if isinstance(default, float) else default}]"


def _value(field: Field[Any], hint: Any) -> str:
    """Say what a flag takes: one of some words, N (a whole number), X (a number), or the kind of text it is."""
    if "shown" in field.metadata:
        return str(field.metadata["shown"])
    if field.name == "model_preset":
        return _one_of(PRESETS)
    choices = _choices(hint)
    if choices:
        return _one_of(choices)
    kinds = {kind for part in (hint, *get_args(hint)) for kind in (part, *get_args(part))}
    return "N" if int in kinds else "X" if float in kinds else "TEXT"


def _one_of(words: Iterable[str]) -> str:
    return "{" + ",".join(words) + "}"


def _choices(hint: Any) -> list[str]:
    """Return the words that a type is made of; none of a type of other values."""
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return [word.value for word in hint]
    found = [word for part in get_args(hint) for word in _choices(part)]
    return list(dict.fromkeys(found))


def _read_yaml(path: str, inner: tuple[Path, ...] = ()) -> Values:
    content = read_mapping(path)
    content.pop("recipe", None)  # what a paper published of this run: planning/recipes.py reads and checks it
    for section, entries in content.items():
        if section not in ("stages", "extends"):
            _check_section(path, section, entries)
    base = content.pop("extends", None)
    if base is None:
        return content
    file = Path(path).parent / str(base)
    if not isinstance(base, str) or file.resolve() in (*inner, Path(path).resolve()):
        raise UserError(
            f"{path}: extends: got {echo(base)}, needs the name of another file, which does not extend this one"
        )
    return _over(_read_yaml(str(file), (*inner, Path(path).resolve())), content)


def read_mapping(path: str) -> Values:
    """Read what a configuration file holds, `recipe:` and `extends:` too; of a file of many runs the one that is named.

    Raises:
        UserError: as `read_file`; no such run in it.
    """
    content = read_file(path.partition(matrix.MARK)[0])
    if "families" in content:
        return matrix.pick(content, path)
    if matrix.MARK in path:
        raise UserError(f"--config: got {path}, but this file is a single run; leave out what follows {matrix.MARK}")
    return content


def read_file(path: str) -> Values:
    """Read a configuration file, whose sections are still unchecked.

    Raises:
        UserError: no readable YAML file in UTF-8, or one that holds no mapping.
    """
    try:
        content = read_yaml(Path(path))
    except OSError as error:
        raise UserError(f"--config: got {path or repr(path)}, needs a readable YAML file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"--config: got {path}, needs a YAML file in UTF-8") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--config: got {path}, needs valid YAML: {reason}") from None
    if not isinstance(content, dict):
        raise UserError(f"--config: got {path}, needs a mapping of the sections {', '.join(_SECTIONS)}")
    mapping: Values = content
    return mapping


def _check_section(path: str, section: Any, entries: Any) -> None:
    if section not in _SECTIONS:
        where = f"; it belongs under `{_FIELDS[section][0]}:`" if section in _FIELDS else ""
        raise UserError(f"{path}: {section}: no such section{where or nearest(str(section), list(_SECTIONS))}")
    if not isinstance(entries, dict):
        raise UserError(f"{path}: {section}: got {echo(entries)}, needs a mapping of options")
    for name, value in entries.items():
        if name not in _FIELDS:
            raise UserError(f"{path}: {section}.{name}: no such option{nearest(str(name), list(_FIELDS))}")
        if _FIELDS[name][0] != section:
            raise UserError(f"{path}: {section}.{name}: belongs under `{_FIELDS[name][0]}:`; move it there")
        if isinstance(value, bool) and _HINTS[name] not in _YES_OR_NO:
            raise UserError(f"{path}: {section}.{name}: got {value}, needs another value: it is no yes-or-no option")
        if isinstance(value, list) and isinstance(_FIELDS[name][1].default, tuple):  # as the flag's words: [0.3, a]
            entries[name] = [str(item) if isinstance(item, int | float) else item for item in value]
        if name == "mixture" and isinstance(value, str):
            entries[name] = [value]


def _with_mixture(values: Values) -> Values:
    """Read the file that `mixture` names, or those that its parts name."""
    given = values["data"].get("mixture")
    if given is None or given == []:
        return values
    if not (isinstance(given, list) and all(isinstance(word, str) for word in given)):
        parts = expand_mixture(given)
    elif len(given) == 1:
        parts = read_mixture(Path(given[0]))
    else:
        raise UserError(f"mixture: got {len(given)} words, needs one YAML file")
    return values | {"data": values["data"] | {"mixture": parts}}


def _build(values: Values) -> Config:
    lines, built = [], {}
    for section, options in _SECTIONS.items():
        try:
            built[section] = options(**_TYPES[section].validate_python(values[section]))
        except ValidationError as error:
            for wrong in error.errors():
                name, reason = ".".join(str(part) for part in wrong["loc"]), wrong["msg"]
                given = echo(wrong["input"])
                lines.append(f"{name}: got {given}, needs another value: {reason[0].lower()}{reason[1:]}")
    if lines:
        raise UserError("\n".join(lines))
    return Config(**built)
