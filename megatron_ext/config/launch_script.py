"""Read the arguments of a training program from a shell script, without executing anything.

Known are assignments of texts and arrays, their use as $NAME, ${NAME:-DEFAULT}, ${NAME//OLD/NEW} and ${NAME[@]},
calculations in $((...)), and `eval` and `bash -c` of such texts. Of `if`, `case`, && and || the branch is read that the
script's own values and arguments choose. Where they do not, as for variables of the environment and files, all branches
are read, and `Script.decide` names the variables of which they make different values. A loop's lines are read once;
files that it sources are not read. `Script.decide` also names functions, which are read where they are defined, and
commands that change variables and are not followed.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, takewhile

from megatron_ext.errors import echo

_BEFORE_COMMANDS = {"export", "local", "declare", "readonly", "eval", "exec", "while", "until", "time", "!", "(", "|"}
_KEYWORDS = {"if", "then", "elif", "else", "fi", "case", ";;", "esac", "do", "done", "{", "}"}
_JOINTS = {"&&", "||", "|", "(", ";;"}  # are kept, as the first word of the next command
_PRINTERS = {"echo", "printf", "cat"}
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_BRACED = re.compile(r"(\w+|@|\*)(?:\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_REPLACED = re.compile(r"(\w+)(//?)([^/*?\[]+)(?:/(.*))?", re.DOTALL)
_COMPARISONS = {"-eq", "-ne", "-lt", "-le", "-gt", "-ge"}
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
_HERE = re.compile(  # a text for a command, as in cat << END
    r"(?P<command>(?<!<)<<-?[ \t]*(['\"]?)(?P<end>\w+)\2[^\n]*\n)(?P<body>(?:[^\n]*\n)*?)[ \t]*(?P=end)[ \t]*(?=\n)"
)
_FUNCTION = re.compile(r"(?m)^[ \t]*(?:function[ \t]+)?([\w-]+)[ \t]*\([ \t]*\)|^[ \t]*function[ \t]+([\w-]+)")
_UNFOLLOWED = re.compile(r"(?m)(?:^|[;&|{(])[ \t]*(set[ \t]+--|unset\b|let\b|read\b|mapfile\b|\(\()")
_STARTS = re.compile(r"(?m)\.py|^\s*(srun|torchrun|mpirun|bash)\b")
_SKIPPED = r"(?:[ \t\r]|\\\n)*+(?:#[^\n]*)?+"
_TOKEN = re.compile(rf"{_SKIPPED}(?:(?P<array>\w+\+?=\()|(?P<word>{_WORD})|(?P<end>;;|&&|\|\||[;|&()\n]))", re.DOTALL)


# whether something holds: 1 if so, 0 if not, UNKNOWN if that depends on more than the script; `and` is min, `or` is
# max, `not` is 1 - x
Truth = float
UNKNOWN = 0.5


@dataclass
class _Block:
    """An `if`, a `case`, a loop or a group of commands that is being read.

    Attributes:
        is_executed: whether its present branch is executed.
        is_past: whether an earlier branch was executed.
        condition: the words of an `if` or `elif` so far, until `then`.
        patterns: the patterns of a branch of a `case`, which `subject` is compared with.
    """

    is_executed: Truth = 1
    is_past: Truth = 0
    is_loop: bool = False
    condition: list[str] | None = None
    subject: str = ""
    patterns: list[str] | None = None

    def enter(self, holds: Truth) -> None:
        """Begin a branch whose own condition holds."""
        self.is_executed = min(1 - self.is_past, holds)
        self.is_past = max(self.is_past, holds)


class Script:
    """A script's variables and commands, after its last line.

    Attributes:
        commands: each command's words, with the values that variables had there.
        branches: by variable, and whether they add to it, the values of branches that may be executed.
    """

    def __init__(self, text: str, arguments: Sequence[str] = ()) -> None:
        self.variables: dict[str, list[str]] = {}
        self._set_arguments(arguments)
        self._functions = [match[1] or match[2] for match in _FUNCTION.finditer(text)]
        self._unfollowed = [" ".join(match[1].split()) for match in _UNFOLLOWED.finditer(text)]
        self.commands: list[list[str]] = []
        self.branches: dict[tuple[str, bool], list[str]] = {}
        self._blocks: list[_Block] = []
        self._list: list[str] = []  # the commands that && and || join, so far
        for statement in _statements(text):
            if statement:
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
        for name in dict.fromkeys(self._functions):
            lines.append(f"{name}(): is read where it is defined, with the script's arguments; compare its calls")
        for name in dict.fromkeys(self._unfollowed):
            lines.append(f"{name}: is not followed; check the variables that it changes")
        programs = [words for words in self._programs() if _count_flags(words)]
        if any(words != programs[0] for words in programs):
            lines.append(f"the script starts {len(programs)} Python programs with flags; the one with the most is read")
        return lines

    def _programs(self) -> list[list[str]]:
        return [after_program(words) for words in self.commands if words[0] not in _PRINTERS]

    def _set_arguments(self, words: Sequence[str]) -> None:
        for number in range(len(self.variables.get("@", ()))):
            del self.variables[str(number + 1)]
        self.variables |= {"@": list(words), "*": list(words)}
        self.variables |= {str(number): [word] for number, word in enumerate(words, start=1)}

    def _read(self, words: list[str]) -> None:
        """Follow a command's keywords and assign its variables; add the words that remain to `commands`."""
        if self._belongs_to_condition(words):
            return
        holds: Truth = 1
        if words[0] in ("&&", "||"):
            holds = self._holds(self._list)
            if words[0] == "||":
                holds = 1 - holds
            self._list = self._list + words
            words = words[1:]
        else:
            self._list = []
        while words and words[0] in _KEYWORDS:
            words = self._follow(words, holds)
        self._list = self._list or words
        for block in self._blocks:
            holds = min(holds, block.is_executed)
        if holds:
            self._execute(words, is_branch=holds == UNKNOWN)
            return
        for assignment in filter(None, map(_ASSIGNMENT.fullmatch, words)):
            self.variables.setdefault(assignment[1], [])  # empty, no variable of the environment

    def _belongs_to_condition(self, words: list[str]) -> bool:
        """Add words to the condition or the patterns that are being read, or, after these, begin their branch."""
        if not self._blocks:
            return False
        block = self._blocks[-1]
        if block.condition is not None:
            if words[0] != "then":
                if words[0] not in _JOINTS:
                    block.condition.append(";")
                block.condition += words
                return True
            block.enter(self._holds(block.condition))
            block.condition = None
        if block.patterns is not None:
            if words[0] == "|" or (not block.patterns and words[0] != "esac"):
                block.patterns += words
                return True
            block.enter(self._matches(block.subject, block.patterns))
            block.patterns = None
        return False

    def _follow(self, words: list[str], holds: Truth) -> list[str]:
        """Follow the keyword that a command begins with, if it `holds`; return the words after it."""
        keyword = words[0]
        following = words[1:]
        if keyword == "if":
            self._blocks.append(_Block(condition=following))
            return []
        if keyword == "case":
            self._blocks.append(_Block(subject=self._text("".join(words[1:2])), patterns=words[3:]))
            return []
        if keyword in ("do", "{"):
            self._blocks.append(_Block(holds, is_loop=keyword == "do"))
        elif not self._blocks:
            return following
        elif keyword == "elif":
            self._blocks[-1].condition = following
            return []
        elif keyword == "else":
            self._blocks[-1].enter(1)
        elif keyword == ";;":
            self._blocks[-1].patterns = []
            if following:
                self._read(following)
            return []
        elif keyword != "then":
            self._blocks.pop()
        return following

    def _execute(self, words: list[str], is_branch: bool) -> None:
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
                words = words[1:]
            elif words[0] == "shift" and not self._blocks:
                count = "1"
                if len(words) > 1:
                    count = self._text(words[1])
                if count.isdecimal():
                    self._set_arguments(self.variables["@"][int(count) :])
                return
            else:
                self.commands.append(self._expand(words) or [""])
                return

    def _holds(self, words: Sequence[str]) -> Truth:
        """Return whether tests that && and || join hold."""
        joints = _JOINTS.union(";").intersection(words)
        if joints - {"&&", "||"} or (len(joints) == 2 and "[[" in words):  # in [[ ]] && binds stronger than ||
            return UNKNOWN
        holds: Truth = 1
        join = min
        test: list[str] = []
        for word in [*words, "&&"]:
            if word in ("&&", "||"):
                holds = join(holds, self._test(test))
                join = {"&&": min, "||": max}[word]
                test = []
            else:
                test.append(word)
        return holds

    def _test(self, words: Sequence[str]) -> Truth:
        """Return whether a test, an assignment, or `true` or `false` holds."""
        if words[:1] == ["!"]:
            return 1 - self._test(words[1:])
        if words[1:2] == ["!"]:
            return 1 - self._test([words[0], *words[2:]])
        inside = [word for word in words if word not in ("[", "[[", "]", "]]", "test")]
        texts = [self._text(word) for word in inside]
        if not inside or any("\0" in text or "$" in text for text in texts):
            return UNKNOWN
        if len(inside) == len(words):
            if _ASSIGNMENT.fullmatch(words[0]):
                return 1
            return {"true": 1, "false": 0}.get(" ".join(texts), UNKNOWN)
        text = texts[-1]
        has_text: Truth = bool(text)
        if not text and re.search(r"\w:?[-+=]", inside[-1]):  # it is a default, such as ${NAME:-}
            has_text = UNKNOWN
        match texts:
            case [_] | ["-n", _]:
                return has_text
            case ["-z", _]:
                return 1 - has_text
            case [left, "=" | "==" | "!=" as comparison, _]:
                is_equal = left == text or fnmatchcase(left, text)
                if comparison == "!=":
                    return not is_equal
                return is_equal
            case [left, comparison, _] if comparison in _COMPARISONS:
                if left.isdecimal() and text.isdecimal():
                    holds: bool = getattr(operator, comparison.removeprefix("-"))(int(left), int(text))
                    return holds
        return UNKNOWN

    def _matches(self, subject: str, patterns: Sequence[str]) -> Truth:
        texts = [self._text(word) for word in patterns if word not in ("|", "(")]
        if any(fnmatchcase(subject, text) for text in texts):
            return 1
        if missing_variables([subject, *texts]):
            return UNKNOWN
        return 0

    def _assign(self, name: str, values: list[str], is_branch: bool, is_added: bool, is_text: bool) -> None:
        former = self.variables.get(name, [])
        if is_branch:
            texts = self.branches.setdefault((name, is_added), [])
            if name in self.variables and not is_added:
                texts.append(" ".join(former))
            texts.append(" ".join(values))
        elif not is_added:
            self.branches.pop((name, False), None)
            self.branches.pop((name, True), None)
        if is_added and is_text and former:
            values = [*former[:-1], former[-1] + values[0]]
        elif is_added:
            values = former + values
        self.variables[name] = values

    def _expand(self, words: Sequence[str]) -> list[str]:
        """Replace variables; outside of quotes their values become several words."""
        expanded: list[str] = []
        for word in words:
            shell = ""
            for values, is_quoted in self._parts(word, _PART):
                if is_quoted:
                    shell += shlex.join(values)
                else:
                    shell += " ".join(values)
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
                if len(whole) == 1 and (text.endswith("[@]}") or text in ("$@", "${@}")):
                    yield whole[0][0], True
                else:
                    yield [self._text(text, _QUOTED_PART)], True
            elif kind in ("call", "braced", "name", "tick"):
                yield self._value(kind, text), False
            elif match[0] != "\\\n":
                yield [text], True

    def _value(self, kind: str, text: str) -> list[str]:
        """Return the value of an expansion, or all values of an array."""
        if text.startswith("(("):
            return [self._number(text[2:-2])]
        if kind in ("call", "tick"):
            return [_missing("COMMAND")]
        inside = text.removeprefix("{").removesuffix("}")
        replaced = _REPLACED.fullmatch(inside)
        if replaced is not None and replaced[1] in self.variables:
            old, new = (self._text(part or "") for part in replaced.group(3, 4))
            count = {"/": 1, "//": -1}[replaced[2]]
            return [value.replace(old, new, count) for value in self.variables[replaced[1]]]
        match = _BRACED.fullmatch(inside)
        if match is None:
            return [_missing(text)]
        name, mode, other = match.groups()
        values = self.variables.get(name)
        if name.isdecimal() and any(block.is_loop for block in self._blocks):
            values = None  # other arguments in each round
        has_text = any(values or ())
        if mode in ("+", ":+"):
            if not has_text:
                return []
            return [self._text(other)]
        if mode in ("-", ":-", "=", ":=") and not has_text:
            values = [self._text(other)]
            if mode in ("=", ":="):
                self.variables[name] = values
        if values is None:
            return [_missing(name)]
        return values

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
    """Return the words after the first Python file of a command, also inside of its words, as in `bash -c TEXT`."""
    for place, word in enumerate(words):
        if re.search(r"\.py\s", word):
            return after_program(_split(word))
        if word.endswith(".py"):
            arguments = takewhile(lambda word: not re.match(r"[0-9&]*>", word), words[place + 1 :])
            return list(chain.from_iterable(map(_split_flags, arguments)))
    return []


def _split_flags(word: str) -> list[str]:
    if re.search(r"\s--\w", word):
        return _split(word)
    return [word]


def _count_flags(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, with their quotes; an array is `NAME=(`, its words and `)`."""
    text += "\n"
    text = _HERE.sub(lambda match: match[0] if _STARTS.search(match["body"]) else match["command"], text)
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
            if match["end"] == ")":
                in_array = False
                command.append(")")
        elif match["end"] != "\n" or command not in (["&&"], ["||"], ["|"]):
            yield command
            command = []
            if match["end"] in _JOINTS:
                command.append(match["end"])
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
