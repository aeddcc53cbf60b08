"""Parse flags, map errors to exit statuses, and dispatch `megatron-ext SUBCOMMAND`.

Exit status:

    0      done
    1      unexpected error: traceback on standard error
    2      bad input, or a user's file that cannot be read or written: one `error:` line; --debug adds the traceback
    130    stopped by Ctrl-C
    141    the reader of standard output has closed it, as in `| head`

Under torchrun each failing process also writes its message to the file that torchrun's own report quotes.
"""

import argparse
import difflib
import functools
import importlib
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.errors import PERMANENT, OtherProcessError, UserError, first_line, missing_package, printable
from megatron_ext.launch import is_first, report_to_torchrun

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT
NO_READER = 128 + signal.SIGPIPE
MAX_LINES = 3
MAX_CHARACTERS = 600
DEBUG = "--debug"
PROGRAM = "megatron-ext"
# by module: the packages that need a choice before `pip install .`, such as CUDA or not
INSTALLED_FIRST = {"torch": "torch", "megatron": "megatron-core"}
# subcommand: module whose main(argv) runs; in a checkout, a script of the same name
COMMANDS = {
    "pretrain": "pretrain_skyladder",
    "preprocess": "tools.preprocess_data",
    "train-tokenizer": "tools.train_tokenizer",
    "convert-tokenizer": "tools.convert_tokenizer",
    "gather-corpus": "tools.gather_corpus",
    "pack": "tools.pack_data",
    "inspect-pack": "tools.inspect_pack",
    "score": "tools.score_tokens",
    "recipes": "tools.recipes",
    "twin": "tools.twin_recipe",
    "plan": "tools.plan_run",
    "rehearse": "tools.rehearse",
    "report": "tools.report",
    "inspect-step": "tools.inspect_step",
    "checkpoints": "tools.checkpoints",
    "convert": "tools.convert_checkpoint",
    "translate-megatron-lm": "tools.translate_megatron_lm",
    "generate": "tools.generate",
    "evaluate": "tools.evaluate",
    "environment": "tools.environment",
}


def main() -> int:
    """Run `megatron-ext SUBCOMMAND [flags]`, the console command of an installed package."""
    name, *words = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        usage = f"usage: {PROGRAM} SUBCOMMAND [--flag value ...]; SUBCOMMAND --help lists its flags"
        usage += f"\nsubcommands: {', '.join(COMMANDS)}"
        if name in ("-h", "--help"):
            print(usage)
            return 0
        print(usage, file=sys.stderr)
        return BAD_INPUT
    sys.argv = [f"{PROGRAM} {name}", *words]
    package = Path(__file__).parent
    module = COMMANDS[name]
    if (package / "tools").exists():  # installed; in a checkout, tools/ is beside the package
        module = module.replace("tools.", "megatron_ext.tools.")
    else:
        sys.path.insert(0, str(package.parent))
    status: int = importlib.import_module(module).main(words)
    return status


def program(name: str) -> str:
    """Return the command of one of `COMMANDS`: `megatron-ext report`, or `python tools/report.py` in a checkout."""
    if Path(sys.argv[0]).name.startswith(PROGRAM):
        return f"{PROGRAM} {name}"
    return f"python {COMMANDS[name].replace('.', '/')}.py"


def command(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Decorate the `main(argv) -> exit status` of a command so that errors end as the module's docstring describes."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        if argv is None:
            argv = sys.argv[1:]
        for name in ("stdout", "stderr"):  # None if it was closed before Python started, as by >&-
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        try:
            try:
                return main([word for word in argv if word != DEBUG])
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            return NO_READER
        except OtherProcessError as error:  # one line for all processes, however many
            if is_first():
                print(first_line(error), file=sys.stderr)
            else:
                _let_another_print()
            return FAILED
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name in INSTALLED_FIRST:
                error = missing_package("this command", INSTALLED_FIRST[error.name])
            user_must_act = isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in PERMANENT)
            if user_must_act and DEBUG not in argv:
                print_error(error)
            else:
                print_traceback(error)
            if user_must_act:
                return BAD_INPUT
            return FAILED
        finally:
            _drop_unwritten()

    return run


def _drop_unwritten() -> None:
    """Drop output that cannot be written: Python would try again at exit, print a traceback and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk, a terminal that is gone, a reader that has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_error(error: Exception) -> None:
    """Print bad input as `error: ...`, once for all processes with the same error."""
    text = str(error)
    of_this_process = getattr(error, "of_this_process", False)
    if isinstance(error, OSError):
        of_this_process = True
        text = str(error.strerror)
        if error.filename is not None:
            text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    lines = [_shortened(printable(line)) for line in text.splitlines() if line.strip()] or [type(error).__name__]
    report_to_torchrun(lines[0])
    if of_this_process:
        lines[0] = _rank() + lines[0]
    elif not is_first():
        _let_another_print()
        return
    if len(lines) > MAX_LINES and not getattr(error, "lists_all", False):
        lines[MAX_LINES - 1 :] = [f"and {len(lines) - MAX_LINES + 1} more mistakes; {DEBUG} shows all"]
    print("error:", "\n".join(lines), file=sys.stderr)


def _shortened(line: str) -> str:
    end = MAX_CHARACTERS // 3
    if len(line) <= MAX_CHARACTERS:
        return line
    return f"{line[: 2 * end]} ... {line[-end:]}"


def _let_another_print() -> None:
    """Wait under torchrun, which ends all processes when one exits, until another process has printed its error."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(10)


def print_traceback(error: BaseException) -> None:
    report_to_torchrun(f"{type(error).__name__}: {first_line(error)}")
    print(_rank() + "".join(traceback.format_exception(error)), end="", file=sys.stderr)


def _rank() -> str:
    rank = os.environ.get("RANK", "")
    if rank.isdecimal() and os.environ.get("WORLD_SIZE") != "1":
        return f"rank {rank[:9]}: "
    return ""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError for all unknown flags, suggests the nearest, takes no abbreviations."""

    equivalent: Callable[[str, str], str | None] = staticmethod(lambda flag, value: None)  # of an unknown flag

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})
        self.add_argument(DEBUG, action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown_words = self.parse_known_args(args, namespace)
        lines = []
        for word, following in itertools.pairwise([*unknown_words, ""]):
            if word.startswith("-") and word.lstrip("-")[:1].isalpha():
                name, _, value = word.partition("=")
                unknown = f"no such flag{nearest(name, self.flags())}; --help lists all"
                lines.append(f"{name}: {self.equivalent(name, value or following) or unknown}")
        if lines:
            error = UserError("\n".join(dict.fromkeys(lines)))
            error.lists_all = True
            raise error
        if unknown_words:
            raise UserError(f"{unknown_words[0]}: got a word that belongs to no flag; values follow their --flag")
        return options

    def flags(self) -> list[str]:
        """Return all flags, including the flags of subparsers."""
        flags: list[str] = []
        for action in self._actions:
            flags += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    flags += parser.flags()
        return flags

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see --help")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return the `type` of a flag whose value is a whole number from `low` to `high`."""

    def convert(text: str) -> int:
        number = int(text)
        if high is None and number < low:
            raise argparse.ArgumentTypeError(f"got {number}, needs at least {low}")
        if high is not None and not low <= number <= high:
            raise argparse.ArgumentTypeError(f"got {number}, needs {low}..{high}")
        return number

    convert.__name__ = "int"  # for argparse's message about other text
    return convert


positive = integer(1)


# a flag of several values, which may also be given several times
MANY: dict[str, Any] = {"action": "extend", "nargs": "+"}


def output_file(*endings: str) -> Callable[[str], Path]:
    """Return the `type` of a flag that names a file to write, in the format of these `endings`."""

    def convert(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(f"got {text}, needs a file name that ends in {' or '.join(endings)}")
        return path

    return convert


def check_new(output: Path, overwrite: bool) -> None:
    """Raise UserError if an output exists and must not be replaced."""
    if output.exists() and not overwrite:
        raise UserError(f"output: {output} exists; pass --overwrite or another --output")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the commands that compute with trained models: their tokenizer and dtype."""
    add = parser.add_argument
    add("--tokenizer", metavar="FOLDER", help="tokenizer of another folder [each model's own]")
    add("--eod-token", metavar="TOKEN", help="token that ends a text [the tokenizer's]")
    add(
        "--bos",
        action="store_true",
        help="begin texts with the bos_token_id of a Hugging Face folder, or the BOS of a run's tokenizer",
    )
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 on cuda, else float32")


def nearest(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean X?" for the known name most similar to `name`, or "" if none is similar."""
    if name.startswith("-"):
        name = name.replace("_", "-")
    matches = difflib.get_close_matches(name, known, n=1)
    if not matches:
        return ""
    return f"; did you mean {matches[0]}?"


if __name__ == "__main__":
    sys.exit(main())
