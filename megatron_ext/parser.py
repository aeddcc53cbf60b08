"""How command lines read flags: what argparse refuses is one line of ours, with the nearest flag there is."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_ext.errors import UserError

DEBUG = "--debug"  # read by command_line.py


class Parser(argparse.ArgumentParser):
    """Refuses a flag in one line, as `UserError`, and takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options})
        self.add_argument(DEBUG, action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all words; one that no flag takes is refused with the nearest flag."""
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            self.refuse(rest)
        return known

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Refuse words that no flag takes.

        Raises:
            UserError: always.
        """
        for word in words:
            if word.startswith("-") and len(word) > 1:
                name = word.split("=")[0]
                raise UserError(f"{name}: no such flag{nearest(name, self.flags())}; --help lists all")
        raise UserError(f"{words[0]}: got a word that belongs to no flag; values follow their --flag")

    def flags(self) -> list[str]:
        """Return every flag, of its commands too."""
        found = [option for action in self._actions for option in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [option for parser in action.choices.values() for option in parser.flags()]
        return found

    def error(self, message: str) -> NoReturn:
        """Refuse what argparse refuses, without its usage of up to 80 lines."""
        raise UserError(refusal(message))


_WORDS = {"int": "a whole number", "float": "a number"}


def refusal(message: str) -> str:
    """Say a refusal of argparse as ours are said."""
    if match := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"{match[1]}: got nothing, needs a value; --help says which"
    match = re.fullmatch(r"(?:argument )?(.+?): (.*)", message, re.DOTALL)
    if match is None:
        return f"{message}; --help lists all flags"
    name, reason = match.groups()
    if found := re.fullmatch(r"ignored explicit argument (.*)", reason, re.DOTALL):
        return f"{name.split('/')[0]}: got {found[1]}, needs no value; use {name.replace('/', ' or ')}"
    name = name.split("/")[-1] if name.startswith("-") else name
    if found := re.fullmatch(r"invalid (\w+) value: (.*)", reason, re.DOTALL):
        return f"{name}: got {found[2]}, needs {_WORDS.get(found[1], found[1])}"
    if found := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", reason, re.DOTALL):
        choices = [choice.strip("'") for choice in found[2].split(", ")]
        return f"{name}: got {found[1]!r}, needs one of {', '.join(choices)}{nearest(found[1], choices)}"
    if reason.startswith("expected "):
        return f"{name}: got too few values, needs {reason.removeprefix('expected ').replace('argument', 'value')}"
    return f"{name}: {reason}; --help says what it takes"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean X?" for the known name that is most like `name`, or nothing where none is like it."""
    near = difflib.get_close_matches(name.replace("_", "-") if name.startswith("-") else name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
