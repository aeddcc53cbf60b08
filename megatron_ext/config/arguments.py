"""Parse flags and YAML into `Config`, and write it as YAML.

Values are merged in this order, later ones winning: preset, extended file, file, stage, flags. Of several files, each
adds its values and then its stage's values to the files before it. The YAML has one mapping per section of `Config`,
and may have `stages:` (config/stages.py) and `extends: FILE`. A run in a file of many runs (config/matrix.py) is named
FILE#NAME. A flag is a field's name with dashes.
"""

import argparse
import functools
import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from megatron_ext.cli import MANY, Parser, nearest
from megatron_ext.config import Config, ParallelConfig, matrix
from megatron_ext.config.blocks import BLOCKS, mlp_width
from megatron_ext.config.megatron_lm import equivalent
from megatron_ext.config.mixture import expand_mixture, with_weights
from megatron_ext.config.options import OF_ONE_START, PRESETS
from megatron_ext.config.schema import ADAPTER, FIELDS, SECTIONS, Option, flag, validate
from megatron_ext.config.stages import Stage, StageEntry, link_stage, read_entries
from megatron_ext.errors import UserError, echo
from megatron_ext.files.reading import read_yaml

Values = dict[str, dict[str, Any]]
# the flags shown by --help; --help-all shows every one
_COMMON = (
    "model_preset num_layers hidden_size tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "sequence_parallel data_path tokenizer_model seq_length micro_batch_size global_batch_size window_schedule "
    "window_start document_mask token_weighting lr min_lr lr_warmup_iters train_iters bf16 eval_interval save load "
    "save_interval"
)
_HELP = """Pretrain a long-context language model. Flags win over the file.

N is a whole number, X a number; [..] is the default. The value `none` restores the default of an option that is unset
or an empty list by default.
"""


def parse(argv: Sequence[str]) -> Config:
    """Build the configuration from command-line flags and the YAML files of `--config`.

    Raises UserError for an unknown flag, key or preset, an unreadable file, an invalid value, or several stages.
    """
    stages = parse_stages(argv)
    if len(stages) > 1:
        names = ", ".join(str(stage.name) for stage in stages)
        raise UserError(f"stage: got none of {names}; add --stage NAME")
    return stages[0].config


def parse_processes(argv: Sequence[str]) -> ParallelConfig:
    """Parse the `parallel` section alone, for a model that is not trained; flags of other sections are refused."""
    config = parse(argv)
    for name, field in FIELDS.items():
        value = getattr(getattr(config, field.section), name)
        if field.section != "parallel" and value != field.default:
            raise UserError(f"{name}: got {value}, which only training reads; leave {flag(name)} out")
    return config.parallel


def parse_stages(argv: Sequence[str]) -> list[Stage]:
    """Build the stages of a run in order, or only --stage; one without a name if the YAML has no `stages:`."""
    flags = vars(_parser().parse_args(list(argv)))
    wanted = flags["stage"]
    files = [_read_config(path) for path in flags["config"]]
    paths = " ".join(file.path for file in files)
    values = _flag_values(flags)
    names = _stage_names(files)
    if not names:
        if wanted is not None:
            raise UserError(f"stage: got {wanted}, but {paths or 'the run'} has no stages; leave it out")
        return [Stage(None, _build(*(file.sections for file in files), values))]
    stages: list[Stage] = []
    for name in names:
        # a file's init_from applies to the first stage, a flag's to the named one
        layers: list[Values] = []
        keep: Sequence[str] = ()
        for file in files:
            layers.append(_without_init(file.sections) if stages else file.sections)
            if name in file.stages:
                entry = file.stages[name]
                layers.append(entry.sections)
                if "keep" in entry.model_fields_set:
                    keep = entry.keep
        layers.append(_without_init(values) if stages and name != wanted else values)
        before = None
        if stages:
            before = stages[-1]
        stages.append(link_stage(name, _build(*layers), keep, before))
    chosen = [stage for stage in stages if wanted in (None, stage.name)]
    if not chosen:
        raise UserError(f"stage: got {wanted}, {paths} has {', '.join(names)}{nearest(str(wanted), names)}")
    return chosen


def _flag_values(flags: Mapping[str, Any]) -> Values:
    """Return the options that are among the flags, by section."""
    values: Values = {}
    for name, field in FIELDS.items():
        if name in flags:
            value = flags[name]
            if field.default == () and "none" in value and len(value) > 1:
                raise UserError(f"{name}: got {' '.join(value)}, needs none alone, or values; leave none out")
            if value in ("none", ["none"]) and field.default in (None, ()):
                value = field.default
            values.setdefault(field.section, {})[name] = value
    return values


def parse_dry_run(argv: Sequence[str]) -> tuple[str | None, int | None]:
    """Return "lenient" or "strict", None without --dry-run; and the number of processes, None for the actual one."""
    flags = _parser().parse_args(list(argv))
    if flags.world_size is not None and (flags.dry_run is None or flags.world_size < 1):
        raise UserError(f"world_size: got {flags.world_size}, needs --dry-run and at least 1")
    return flags.dry_run, flags.world_size


def dump_yaml(config: Config) -> str:
    """Return all values as YAML, section by section; parsing it gives the same configuration."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def dump_run(config: Config) -> str:
    """Return as YAML what belongs to a run: all values, except `OF_ONE_START`."""
    values = to_dict(config)
    for name in OF_ONE_START:
        del values["checkpoint"][name]
    return yaml.safe_dump(values, sort_keys=False)


def of_start(config: Config) -> dict[str, Any]:
    """Return the values of `OF_ONE_START` that are not the default."""
    values = to_dict(config)["checkpoint"]
    defaults = to_dict(Config())["checkpoint"]
    return {name: values[name] for name in OF_ONE_START if values[name] != defaults[name]}


def to_dict(config: Config) -> Values:
    """Return all values as plain YAML types, section by section."""
    values: Values = ADAPTER.dump_python(config, mode="json")
    return values


def from_dict(values: Values) -> Config:
    """Build the configuration from the result of `to_dict`; unknown options are ignored."""
    return validate(
        {
            section: {name: value for name, value in values.get(section, {}).items() if name in FIELDS}
            for section in SECTIONS
        }
    )


def as_flag(name: str, value: Any) -> str:
    """Return the command-line words that set a field to a value, quoted for a shell."""
    if value is True:
        return flag(name)
    if value is False:
        return flag(f"no_{name}")
    if value in (None, (), []):
        value = "none"
    if not isinstance(value, tuple | list):
        value = [value]
    return shlex.join([flag(name), *map(str, value)])


class _ConfigFile(NamedTuple):
    path: str
    sections: Values  # of all stages
    stages: dict[str, StageEntry]


def _read_config(path: str) -> _ConfigFile:
    sections = _read_yaml(path)
    entries = sections.pop("stages", None)
    stages = {}
    if entries is not None:
        stages = {stage.name: stage for stage in read_entries(entries, path)}
    for stage in stages.values():
        _check_file(stage.sections, path)
    return _ConfigFile(path, sections, stages)


def _stage_names(files: Sequence[_ConfigFile]) -> list[str]:
    """Return the names of the run's stages, which the first file with stages lists.

    Raises UserError for a later file with a stage of another name.
    """
    names: list[str] = []
    for file in files:
        names = names or list(file.stages)
        for name in file.stages:
            if name not in names:
                needs = f"needs a stage of the files before it, {', '.join(names)}{nearest(name, names)}"
                raise UserError(f"{file.path}: stages: got {name}, {needs}")
    return names


def _without_init(layer: Values) -> Values:
    firsts = ("init_from", "init_optimizer")
    return layer | {"checkpoint": {k: v for k, v in layer.get("checkpoint", {}).items() if k not in firsts}}


def _build(*layers: Values) -> Config:
    """Merge the layers over the preset that they name, read the mixture's file, and validate all values."""
    values: Values = functools.reduce(matrix.merge, layers, {section: {} for section in SECTIONS})
    values["model"] = _with_sizes(PRESETS.get(values["model"].get("model_preset") or "", {}) | values["model"])
    for name in ("data_path", "valid_data_path"):
        words = values["data"].get(name)
        if isinstance(words, list | tuple):
            values["data"][name] = with_weights([str(word) for word in words])
    mixture = values["data"].get("mixture")
    if mixture:
        if len(mixture) == 1 and isinstance(mixture[0], str):
            mixture = Path(mixture[0])
        values["data"]["mixture"] = expand_mixture(mixture)
    return validate(values)


def _with_sizes(model: dict[str, Any]) -> dict[str, Any]:
    """Add what follows from a given width and number of heads, as in Megatron-LM: the MLP's width and the key heads."""
    if "num_attention_heads" in model:
        model = {"num_query_groups": model["num_attention_heads"]} | model
    try:
        hidden_size = int(model["hidden_size"])
    except (KeyError, TypeError, ValueError):  # not given, or validation names it
        return model
    block = BLOCKS.get(str(model.get("block")), BLOCKS["llama"])
    return {"ffn_hidden_size": mlp_width(hidden_size, gated=block.gated_mlp)} | model


def _check_file(sections: Values, path: str) -> None:
    """Validate a file's names and values, naming the file in errors; `mixture: FILE` becomes a list."""
    data = sections.get("data")
    if isinstance(data, dict) and isinstance(data.get("mixture"), str):
        data["mixture"] = [data["mixture"]]
    if isinstance(data, dict) and isinstance(data.get("mixture"), list):
        sections = sections | {"data": data | {"mixture": []}}  # read in _build
    validate(sections, f"{path}: ")


def _read_yaml(path: str, inner: tuple[Path, ...] = ()) -> Values:
    """Read a file's sections and stages, merged over the file that it extends."""
    content = read_file(path.partition(matrix.MARK)[0])
    if "families" in content:
        content = matrix.pick(content, path)
    elif matrix.MARK in path:
        raise UserError(f"--config: got {path}, but this file is a single run; leave out what follows {matrix.MARK}")
    content.pop("recipe", None)  # what a paper reports about this run; read by tools/recipes.py
    base = content.pop("extends", None)
    _check_file({section: entries for section, entries in content.items() if section != "stages"}, path)
    if base is None:
        return content
    file = Path(path).parent / str(base)
    if not isinstance(base, str) or file.resolve() in (*inner, Path(path).resolve()):
        raise UserError(
            f"{path}: extends: got {echo(base)}, needs the name of another file, which does not extend this one"
        )
    return matrix.merge(_read_yaml(str(file), (*inner, Path(path).resolve())), content)


def read_file(path: str) -> Values:
    """Return the content of a configuration file, unchecked, after checking that it is a mapping in YAML."""
    content = read_yaml(Path(path), "--config")
    if not isinstance(content, dict):
        raise UserError(f"--config: got {path}, needs a mapping of the sections {', '.join(SECTIONS)}")
    return content


class _HelpAll(argparse.Action):
    def __call__(self, *_: Any) -> None:
        _parser(everything=True).print_help()
        raise SystemExit(0)


@functools.cache
def _parser(everything: bool = False) -> Parser:
    narrow = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
    parser = Parser(usage="%(prog)s --config FILE [--flag value ...]", description=_HELP, formatter_class=narrow)
    parser.equivalent = equivalent
    add = parser.add_argument
    add("--help-all", nargs=0, action=_HelpAll, help="list every flag")
    text = f"YAML file with the sections {', '.join(SECTIONS)}, and stages; of several --config the later ones win"
    add("--config", metavar="FILE", action="append", default=[], help=text)
    add("--stage", metavar="NAME", help="run only this one of the file's `stages:`")
    kinds = ("lenient", "strict")
    text = "describe the run and exit; strict: missing data is an error"
    add("--dry-run", nargs="?", const="lenient", choices=kinds, help=text)
    add("--world-size", type=int, metavar="N", help="number of processes that a dry run assumes")
    groups = {section: parser.add_argument_group(section) for section in SECTIONS}
    for name, field in FIELDS.items():
        group = groups[field.section]
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if everything:
            group.description = SECTIONS[field.section].__doc__
        if everything or name in _COMMON.split():
            options["help"] = (field.description + _default(field.default)).replace("%", "%%")
        if field.is_switch:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(field)
        if field.default == ():
            options |= MANY
        group.add_argument(flag(name), **options)
    return parser


def _default(default: Any) -> str:
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        default = "yes" if default else "no"
    elif isinstance(default, float):
        default = format(default, "g")
    return f" [{default}]"


def _metavar(field: Option) -> str:
    """Return the value shown by --help: {choices}, N, X, or the kind of text."""
    parts = list(dict.fromkeys(value_parts(field.hint)))
    choices = ",".join(part for part in parts if isinstance(part, str))
    if field.shown:
        return field.shown
    if choices:
        return f"{{{choices}}}"
    if int in parts:
        return "N"
    return "X" if float in parts else "TEXT"


def value_parts(hint: Any) -> list[Any]:
    """Return the types and the choices that a type is made of."""
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return [word.value for word in hint]
    parts = get_args(hint)
    if not parts:
        return [hint]
    return [inner for part in parts for inner in value_parts(part)]
