"""Read the arguments of a training program from a shell script, without executing anything.

Known are assignments of texts and arrays, their use as $NAME, ${NAME:-DEFAULT} and ${NAME[@]}, sums and products in
$((...)), and `eval` and `bash -c` of such texts. The lines of all branches are read, as if each were executed.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

_SEPARATORS = {";", ";;", "&&", "||", "|", "&", "then", "else", "do", "{", "}"}
_WRAPPERS = {"export", "local", "declare", "readonly", "eval", "exec", "if", "elif", "while", "time"}
_PRINTERS = {"echo", "printf", "cat"}
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_INNERMOST = re.compile(r"\$\{(\w+|@|\*)(?:\[[@*]\])?(?:(:?[-=+?])([^${}]*))?\}|\$(\w+|@|\*)")
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv
}  # fmt: skip
_MISSING = "\0"  # before the name of a variable that has no value
_LONGEST = 300  # lines of a quote or an array


class Script:
    """A script's variables and commands, after its last line.

    Attributes:
        commands: each command's words, with the values that variables had there.
    """

    def __init__(self, text: str, arguments: Sequence[str] = ()) -> None:
        self.variables: dict[str, list[str]] = {"@": list(arguments), "*": list(arguments)}
        self.variables |= {str(number): [word] for number, word in enumerate(arguments, start=1)}
        self.commands: list[list[str]] = []
        for statement in _statements(text):
            self._read(statement)

    def program_words(self) -> list[str]:
        """Return the words after the Python program that has the most flags; an empty list if there is none."""
        candidates = [after_program(words) for words in self.commands if words[0] not in _PRINTERS]
        return max(candidates, key=lambda words: sum(word.startswith("--") for word in words), default=[])

    def _read(self, words: list[str]) -> None:
        """Assign the variables of a command, and add the words that remain to `commands`."""
        while words:
            assignment = _ASSIGNMENT.fullmatch(words[0])
            if words[0] in _WRAPPERS:
                words = words[1:]
                continue
            if assignment is None:
                self.commands.append(self._expand(words) or [""])
                return
            name, plus, value = assignment.groups()
            values = [self._replace(value)]
            words = words[1:]
            if not value and words[:1] == ["("]:
                end = words.index(")")
                values = self._expand(words[1:end])
                words = words[end + 1 :]
            self.variables[name] = self.variables.get(name, []) + values if plus else values

    def _expand(self, words: Sequence[str]) -> list[str]:
        """Replace variables; a word that is nothing else becomes as many words as its value has."""
        expanded: list[str] = []
        for word in words:
            match = _INNERMOST.fullmatch(word)
            name = match and (match[1] or match[4])
            if name in self.variables and not (match and match[2] == ":+"):
                values = self.variables[name]
                is_text = len(values) == 1
                for value in values:
                    expanded += _split(value) if is_text or value.startswith("--") else [value]
            else:
                expanded.append(self._replace(word))
        return expanded

    def _replace(self, word: str) -> str:
        """Replace variables and sums inside a word, the innermost first."""
        previous = None
        while word != previous:
            previous = word
            word = _INNERMOST.sub(lambda match: self._value(*match.groups()), word)
        return re.sub("\1([^\2]*)\2", lambda match: self._sum(match[1]), word)

    def _sum(self, text: str) -> str:
        """Return the number that `text`, a sum or product of numbers and variables, is; `text` if it is none."""
        numbers = re.sub(r"[A-Za-z_]\w*", lambda match: " ".join(self.variables.get(match[0], [match[0]])), text)
        try:
            return str(_calculate(ast.parse(numbers, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"{_MISSING}{re.sub(r'[^A-Za-z0-9_]+', '_', text)}"

    def _value(self, braced: str | None, mode: str | None, other: str | None, bare: str | None) -> str:
        name = braced or bare or ""
        value = " ".join(self.variables.get(name, []))
        if mode in ("-", ":-", "=", ":="):
            return value or other or ""
        if mode in ("+", ":+"):
            return (other or "") if value else ""
        return value if name in self.variables else f"{_MISSING}{name}"


def missing_variables(words: Sequence[str]) -> list[str]:
    """Return the names of the variables without a value in the words of a command."""
    return sorted(set(re.findall(f"{_MISSING}(\\w+)", " ".join(words))))


def readable(word: str) -> str:
    """Return a word with $NAME for each variable that has no value."""
    return word.replace(_MISSING, "$")


def after_program(words: list[str]) -> list[str]:
    """Return the words after the first Python file of a command, also of one inside a word, as in `bash -c TEXT`."""
    for place, word in enumerate(words):
        if re.search(r"\.py\s", word):
            return after_program(_split(word))
        if word.endswith(".py"):
            return list(takewhile(lambda word: not re.match(r"[0-9&]*>", word), words[place + 1 :]))
    return []


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; quotes and arrays may extend over several lines."""
    lines = text.replace("\\\n", " ").split("\n")
    start = 0
    while start < len(lines):
        count = 1
        words = _words(lines[start])
        while words is None and count < _LONGEST and start + count < len(lines):
            count += 1
            words = _words("\n".join(lines[start : start + count]))
        start += 1 if words is None else count  # a line that is no shell is left out
        command: list[str] = []
        for word in words or []:
            if word in _SEPARATORS:
                yield command
                command = []
            else:
                command.append(word)
        yield command


def _words(text: str) -> list[str] | None:
    """Return the words of whole lines; None if a quote or an array is still open."""
    text = _SUM.sub(lambda match: "\1" + re.sub(r"[\s${}]", "", match[1]) + "\2", text)
    for _ in range(text.count("$(")):  # the innermost first
        text = re.sub(r"\$\([^()]*\)", f"{_MISSING}COMMAND", text)
    text = re.sub(r"`[^`]*`", f"{_MISSING}COMMAND", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();|&")
    lexer.whitespace_split = True
    try:
        words = [part for word in lexer for part in (["(", ")"] if word == "()" else [word])]
    except ValueError:
        return None
    opened = [place for place, word in enumerate(words[:-1]) if word.endswith("=") and words[place + 1] == "("]
    return None if opened and ")" not in words[opened[-1] :] else words


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
