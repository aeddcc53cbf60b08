"""Read the arguments of a training program from a shell script, without executing anything.

Known are assignments of texts and arrays, their use as $NAME, ${NAME:-DEFAULT} and ${NAME[@]}, calculations in
$((...)), and `eval` and `bash -c` of such texts. The lines of all branches are read, as if each were executed;
`Script.decide` names the variables of which branches make different values. Files that it sources are not read.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from megatron_ext.errors import echo

_BEFORE_COMMANDS = {"export", "local", "declare", "readonly", "eval", "exec", "while", "time", "!"}
_BEFORE_COMMANDS |= {"if", "then", "elif", "else", "fi", "case", "esac", "do", "done", "{", "}", "&&", "||"}
_PRINTERS = {"echo", "printf", "cat"}
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_BRACED = re.compile(r"(\w+|@|\*)(?:\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def _nested(opening: str, closing: str) -> str:
    """Return a pattern for brackets that contain up to four levels of the same brackets."""
    pattern = rf"\{opening}[^{opening}{closing}]*\{closing}"
    for _ in range(4):
        pattern = rf"\{opening}(?:[^{opening}{closing}]|{pattern})*+\{closing}"
    return pattern


_EXPANSION = rf"\$(?P<call>{_nested('(', ')')})|\$(?P<braced>{_nested('{', '}')})|\$(?P<name>\w+|@|\*)"
_EXPANSION += "|(?P<tick>`[^`]*`)"
_PLAIN_EXPANSION = re.sub(r"\(\?P<\w+>", "(?:", _EXPANSION)
_QUOTED = rf'"(?P<quoted>(?:\\.|{_PLAIN_EXPANSION}|[^"\\])*+)"'
_PART = re.compile(rf"\\(?P<escaped>.)|'(?P<fixed>[^']*)'|{_QUOTED}|{_EXPANSION}|(?P<text>.)", re.DOTALL)
_QUOTED_PART = re.compile(rf'\\(?P<escaped>["\\$`\n])|{_EXPANSION}|(?P<text>.)', re.DOTALL)
_WORD = rf"(?:\\.|'[^']*'|{_QUOTED.replace('?P<quoted>', '?:')}|{_PLAIN_EXPANSION}|[<>]&|&>|[^\s;|&()'\"\\`])++"
_SKIPPED = r"(?:[ \t\r]|\\\n)*+(?:#[^\n]*)?+"
_TOKEN = re.compile(rf"{_SKIPPED}(?:(?P<array>\w+\+?=\()|(?P<word>{_WORD})|(?P<end>;;|&&|\|\||[;|&()\n]))", re.DOTALL)


class Script:
    """A script's variables and commands, after its last line.

    Attributes:
        commands: each command's words, with the values that variables had there.
        branches: by variable, and whether they add to it, the values that branches of the script give.
    """

    def __init__(self, text: str, arguments: Sequence[str] = ()) -> None:
        self.variables: dict[str, list[str]] = {"@": list(arguments), "*": list(arguments)}
        self.variables |= {str(number): [word] for number, word in enumerate(arguments, start=1)}
        self.commands: list[list[str]] = []
        self.branches: dict[tuple[str, bool], list[str]] = {}
        self._depth = 0  # of if and case
        for statement in _statements(text):
            self._read(statement)

    def program_words(self) -> list[str]:
        """Return the words after the Python program that has the most flags; an empty list if there is none."""
        return max(self._programs(), key=_count_flags, default=[])

    def decide(self) -> list[str]:
        """Return a line for each choice between branches or programs that only the user can make."""
        lines = []
        for (name, is_added), values in self.branches.items():
            texts = [echo(readable(value)) for value in dict.fromkeys(values)]
            if is_added:
                lines.append(f"${name}: branches of the script add {', '.join(texts)}; all are read")
            elif len(texts) > 1:
                lines.append(f"${name}: branches of the script make {', '.join(texts)}; the last is read")
        programs = [words for words in self._programs() if _count_flags(words)]
        if any(words != programs[0] for words in programs):
            lines.append(f"the script starts {len(programs)} Python programs with flags; the one with the most is read")
        return lines

    def _programs(self) -> list[list[str]]:
        return [after_program(words) for words in self.commands if words[0] not in _PRINTERS]

    def _read(self, words: list[str]) -> None:
        """Assign the variables of a command, and add the words that remain to `commands`."""
        is_branch = self._depth > 0
        while words:
            assignment = _ASSIGNMENT.fullmatch(words[0])
            if assignment is not None:
                name, plus, value = assignment.groups()
                values = [self._text(value)]
                words = words[1:]
                if value == "(":
                    end = words.index(")")
                    values = self._expand(words[:end])
                    words = words[end + 1 :]
                self._assign(name, values, is_branch, is_added=bool(plus), is_text=value != "(")
            elif words[0] in _BEFORE_COMMANDS or words[0].startswith("-"):
                self._depth += {"if": 1, "case": 1, "fi": -1, "esac": -1}.get(words[0], 0)
                is_branch = self._depth > 0 or words[0] in ("&&", "||")
                words = words[1:]
            else:
                self.commands.append(self._expand(words) or [""])
                return

    def _assign(self, name: str, values: list[str], is_branch: bool, is_added: bool, is_text: bool) -> None:
        former = self.variables.get(name, [])
        if is_branch:
            known = [" ".join(former)] if name in self.variables and not is_added else []
            self.branches.setdefault((name, is_added), []).extend([*known, " ".join(values)])
        elif not is_added:
            self.branches.pop((name, False), None)
            self.branches.pop((name, True), None)
        if is_added and is_text and former:
            self.variables[name] = [*former[:-1], former[-1] + values[0]]
        else:
            self.variables[name] = former + values if is_added else values

    def _expand(self, words: Sequence[str]) -> list[str]:
        """Replace variables; outside of quotes their values become several words."""
        expanded: list[str] = []
        for word in words:
            shell = ""
            for values, is_quoted in self._parts(word, _PART):
                shell += " ".join(shlex.quote(value) if is_quoted else value for value in values)
            expanded += _split(shell)
        return expanded

    def _text(self, word: str, pattern: re.Pattern[str] = _PART) -> str:
        """Replace variables; the result is one text."""
        return "".join(" ".join(values) for values, _ in self._parts(word, pattern))

    def _parts(self, word: str, pattern: re.Pattern[str]) -> Iterator[tuple[list[str], bool]]:
        """Yield the values of each part of a word, and whether blanks in them do not separate words."""
        for match in pattern.finditer(word):
            kind = match.lastgroup
            text = match[kind or 0]
            if kind == "quoted":
                whole = list(self._parts(text, _QUOTED_PART))
                is_list = text.endswith("[@]}") or text in ("$@", "${@}")
                yield whole[0][0] if is_list and len(whole) == 1 else [self._text(text, _QUOTED_PART)], True
            elif kind in ("call", "braced", "name", "tick"):
                yield self._value(kind, text), False
            else:
                yield ["" if match[0] == "\\\n" else text], True

    def _value(self, kind: str, text: str) -> list[str]:
        """Return the values of an expansion: one, or those of an array."""
        if text.startswith("(("):
            return [self._number(text[2:-2])]
        if kind in ("call", "tick"):
            return [_missing("COMMAND")]
        match = _BRACED.fullmatch(text if kind == "name" else text[1:-1])
        if match is None:
            return [_missing(text)]
        name, mode, other = match.groups()
        values = self.variables.get(name)
        if mode in ("+", ":+"):
            return [self._text(other)] if values and any(values) else []
        if mode in ("-", ":-", "=", ":="):
            return values if values and any(values) else [self._text(other)]
        return [_missing(name)] if values is None else values

    def _number(self, text: str) -> str:
        """Return the number that a calculation in $((...)) gives, or what has no value in it."""
        text = re.sub(r"(?<![${\w])([A-Za-z_]\w*)", r"${\1}", text)
        numbers = self._text(text, _QUOTED_PART)
        try:
            return str(_calculate(ast.parse(numbers.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return "".join(_missing(name) for name in missing_variables([numbers]) or [f"(({text}))"])


def _missing(name: str) -> str:
    """Return what stands for a variable without a value."""
    return "\0" + re.sub(r"[\s'\"\\\0\1]", "", name) + "\1"


def missing_variables(words: Sequence[str]) -> list[str]:
    """Return the names of the variables without a value in the words of a command."""
    return sorted(set(re.findall("\0([^\1]*)\1", " ".join(words))))


def readable(word: str) -> str:
    """Return a word with $NAME for each variable that has no value."""
    return word.replace("\0", "$").replace("\1", "")


def after_program(words: list[str]) -> list[str]:
    """Return the words after the first Python file of a command, also of one inside a word, as in `bash -c TEXT`."""
    for place, word in enumerate(words):
        if re.search(r"\.py\s", word):
            return after_program(_split(word))
        if word.endswith(".py"):
            return list(takewhile(lambda word: not re.match(r"[0-9&]*>", word), words[place + 1 :]))
    return []


def _count_flags(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, with their quotes; an array is `NAME=(`, its words and `)`."""
    text = re.sub(r"(?m)^[ \t]*#.*\n?", "", text) + "\n"
    command: list[str] = []
    in_array = False
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:  # a quote that nothing closes: its line is left out
            command = []
            in_array = False
            place = text.index("\n", place)
            continue
        place = match.end()
        if match["end"] is None:
            in_array = in_array or match["array"] is not None
            command.append(match["array"] or match["word"])
        elif in_array:
            in_array = match["end"] != ")"
            command += [] if in_array else [")"]
        else:
            yield command
            command = [match["end"]] if match["end"] in ("&&", "||") else []
    if not in_array:
        yield command


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _calculate(node: ast.AST) -> int:
    """Return the value of a sum, difference, product or quotient of whole numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right))
    raise ValueError
