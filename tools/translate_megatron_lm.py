"""Translate a launch script or a command line of Megatron-LM into our YAML.

python tools/translate_megatron_lm.py train.sh CHECKPOINTS DATA > run.yaml
python tools/translate_megatron_lm.py torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ... > run.yaml

Words after a script are its own arguments ($1, $2, ...). Nothing is executed: variables, arrays and sums are followed,
and the branches that their values choose. Where these do not choose, all branches are read, and a variable that has no
value, or another one in each branch, is named. What is not given has Megatron-LM's default. Comments after the options
say what has no place here, what is left out, and what to decide.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_ext.cli import Parser, command, program
from megatron_ext.config.arguments import value_parts
from megatron_ext.config.from_megatron_lm import CONVERTED, Translation, translate
from megatron_ext.config.launch_script import Script, after_program, missing_variables, readable
from megatron_ext.config.megatron_lm import ARGUMENTS, find_argument, parse_value, set_by
from megatron_ext.config.schema import FIELDS, SECTIONS, validate
from megatron_ext.errors import UserError, echo, printable

_LISTS = {
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "recompute_modules", "cp_comm_type"),
    *("spec", "iterations_to_skip", "moe_aux_loss_coeff", "moe_router_load_balancing_type"),
}
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr", "train_iters")


class Arguments:
    """The arguments of a command line.

    Attributes:
        values: by name, as Megatron-LM parses them.
        missing: by variable without a value, the flags that need it.
        decide: a line for each word that cannot be translated.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.values: dict[str, Any] = {}
        self.missing: dict[str, list[str]] = defaultdict(list)
        self.decide: list[str] = []
        flags = [place for place, word in enumerate(words) if word.startswith("--")]
        for name in missing_variables(words[: min(flags, default=len(words))]):
            self.missing[name].append("before all flags")
        for place, following in zip(flags, [*flags[1:], len(words)], strict=True):
            word, equals, value = words[place].partition("=")
            self._add(word, ([value] if equals else []) + list(words[place + 1 : following]))

    def _add(self, word: str, values: list[str]) -> None:
        shown = readable(" ".join([word, *values]))
        missing = missing_variables([word, *values])
        for name in missing:
            self.missing[name].append(readable(word))
        place = set_by(word)
        if place is None:
            self.decide.append(f"{shown}: no argument of Megatron-LM that this version knows")
            return
        argument, is_set = place
        set_values = [value for value in values if not missing_variables([value])]
        if isinstance(argument.default, bool) or (set_values and argument.name not in _LISTS):
            values = set_values  # the others stand for further flags
        parsed = [parse_value(readable(value)) for value in values]
        if _is_number(argument.name) and not all(isinstance(value, int | float) for value in parsed):
            if not missing:
                self.decide.append(f"{shown}: needs a number")
            return
        if not values:
            self.values[argument.name] = is_set
        elif argument.name in _LISTS:
            self.values[argument.name] = parsed
        else:
            self.values[argument.name] = parsed[0] if len(parsed) == 1 else parsed


def _is_number(name: str) -> bool:
    """Return whether an argument's value is a number: it is one for the option here, or it becomes steps."""
    if name in FIELDS:
        parts = value_parts(FIELDS[name].hint)
        has_text = any(part is str or isinstance(part, str) for part in parts)
        return FIELDS[name].default != () and not has_text and (int in parts or float in parts)
    return name.endswith("_samples") or name == "lr_warmup_fraction"


def words_of(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of the training program of a command line, or of the script that is its first word.

    The second list has a line for each choice that a script leaves open.

    Raises:
        UserError: there is no such script, or no flag.
    """
    path = Path(argv[0])
    words = list(argv)
    decide: list[str] = []
    if path.suffix != ".py" and path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"script: {path} is no UTF-8 text; give a shell script") from None
        script = Script(text, argv[1:])
        words = script.program_words()
        decide = script.decide()
    elif not argv[0].startswith("--"):
        words = after_program(words)
        if not words and not any(word.endswith(".py") for word in argv):
            raise UserError(f"script: {path} does not exist; check the path")
    if not any(word.startswith("--") for word in words):
        raise UserError(f"script: {path} starts no Python program with flags; paste its command instead")
    return words, decide


def document(words: Sequence[str], decide: Sequence[str] = ()) -> str:
    """Return the YAML, and comments, for the words after the training program, and lines of what to decide."""
    arguments = Arguments(words)
    for name, flags in arguments.missing.items():
        place = "after" if name.isdecimal() else "that can be read from"
        reason = f"has no value {place} the script"
        arguments.decide.append(f"${name} {reason}: {', '.join(dict.fromkeys(flags))}")
    arguments.decide += decide
    result = translate(arguments.values)
    return "\n".join([*_options(result, arguments), *_comments(result, arguments)]) + "\n"


def _options(result: Translation, arguments: Arguments) -> Iterable[str]:
    """Yield the sections, with the options that differ from our defaults."""
    yield "# Translated from Megatron-LM. What is not listed has the same default in both, or is named below."
    for section in SECTIONS:
        lines = []
        for name, value in result.options.items():
            if FIELDS[name].section == section and value != FIELDS[name].default:
                try:
                    validate({section: {name: value}})
                except UserError as error:
                    arguments.decide.append(str(error))
                    continue
                is_copied = name in arguments.values and name not in CONVERTED
                shown = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
                line = f"  {name}: {shown}"
                if is_copied and ARGUMENTS[name].text:
                    line += f"  # {ARGUMENTS[name].text}"
                lines.append(line)
        if lines:
            yield from [f"{section}:", *lines]


def _comments(result: Translation, arguments: Arguments) -> Iterable[str]:
    carried = {name for name, argument in ARGUMENTS.items() if argument.group == "carried"}
    yield from _listed("Changes the model and has no place here, so this is another model", result.model.values())
    lost = [line for name, line in result.training.items() if name not in carried]
    yield from _listed("Changes the training and has no place here", lost)
    yield from _listed("Has another value here", _converted(result, arguments))
    reasons: dict[str, list[str]] = defaultdict(list)
    for name in arguments.values:
        argument = find_argument(name)
        if argument is not None and argument.group == "silent":
            reasons[argument.text].append(name)
    yield from _listed("Left out", [f"{', '.join(names)}: {text}" for text, names in reasons.items()])
    decide = [line for name, line in result.training.items() if name in carried]
    decide += [*result.other.values(), *arguments.decide]
    needed = [name for name in _REQUIRED if name not in result.options and name not in arguments.values]
    decide += [f"{name}: not given, has no default in Megatron-LM" for name in needed]
    yield from _listed("Decide", dict.fromkeys(decide))
    yield f"# Then: {program('pretrain')} --config FILE --dry-run --world-size GPUS"


def _converted(result: Translation, arguments: Arguments) -> Iterable[str]:
    """Yield a line for each given argument whose option of the same name has another value, and why."""
    has_line = result.model | result.training | result.other
    for name, value in arguments.values.items():
        if name in FIELDS and name in CONVERTED and CONVERTED[name] not in has_line:
            option = result.options.get(name, FIELDS[name].default)
            if option not in (value, str(value)) and [option] != value:
                reason = f" ({ARGUMENTS[name].text})" if ARGUMENTS[name].text else ""
                yield f"{name}: got {echo(value)}, here {echo(option)}{reason}"


def _listed(title: str, lines: Iterable[str]) -> Iterable[str]:
    lines = list(lines)
    if lines:
        yield f"# {title}:"
        yield from (f"#   {printable(part)}" for line in lines for part in line.splitlines())


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__, usage="%(prog)s SCRIPT [ARGUMENT ...] | COMMAND ...")
    if not argv or argv[0] in ("-h", "--help"):
        parser.parse_args(argv)
        parser.error("needs a script or a command line")
    print(document(*words_of(argv)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
