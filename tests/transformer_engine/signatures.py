"""Read from the C++ of transformer_engine_torch what it declares to Python, and write it as JSON.

    python signatures.py FOLDER > signatures.json

FOLDER is an unpacked source distribution. The JSON holds the arguments of each function, [[name, has a default], ...],
null where the sources do not name them, and the members of each enum with their values.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

Arguments = list[tuple[str, bool]]


def sources(folder: Path, pattern: str) -> str:
    """The text of all files of a name, without comments and line continuations."""
    text = "\n".join(path.read_text() for path in sorted(folder.rglob(pattern)))
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).replace("\\\n", "\n")


def split(text: str) -> list[str]:
    """Split at the commas outside of <>, () and {}."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "<({") - (character in ">)}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def in_parentheses(text: str, start: int) -> str:
    """The text between the parenthesis at `start` and the one that closes it."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return text[start + 1 : place]
    return ""


def declared(headers: str) -> dict[str, Arguments]:
    """The arguments of C++ functions, by name: the first declaration of each."""
    functions: dict[str, Arguments] = {}
    for match in re.finditer(r"\b([a-z_]\w*)\s*\(", headers):
        arguments = []
        for part in split(in_parentheses(headers, match.end() - 1)):
            name, equals, _ = part.partition("=")
            arguments.append((re.findall(r"\w+", name)[-1] if re.search(r"\w", name) else "", bool(equals)))
        functions.setdefault(match[1], arguments)
    return functions


def exported(bindings: str, headers: str) -> Iterator[tuple[str, Arguments | None]]:
    """Each function of the module, with the arguments that pybind11 or else its declaration names."""
    in_cpp = declared(headers)
    for match in re.finditer(r"\bm\.def\s*\(", bindings):
        name, target, *options = split(in_parentheses(bindings, match.end() - 1))
        named = re.findall(r'py::arg\("(\w+)"\)\s*(=)?', ",".join(options))
        arguments = [(argument, bool(equals)) for argument, equals in named]
        yield name.strip('"'), arguments or in_cpp.get(target.split("::")[-1])


def enumerators(headers: str) -> dict[str, int]:
    """The value of each C++ enumerator, by its name, and with its enum's name before it."""
    values: dict[str, int] = {}
    for match in re.finditer(r"\benum\s*(?:class\s+)?(\w*)[^{};]*\{([^}]*)\}", headers):
        following = 0
        for part in split(match[2]):
            name, _, value = (word.strip() for word in part.partition("="))
            following = int(value, 0) if re.fullmatch(r"-?\w+", value) and value[-1].isdigit() else following
            values[f"{match[1]}::{name}"] = following
            values.setdefault(name, following)
            following += 1
    return values


def enums(bindings: str, headers: str) -> dict[str, dict[str, int]]:
    """The members of each enum of the module."""
    values = enumerators(headers)
    members_by_enum = {}
    for match in re.finditer(r'enum_<[^>]*>\s*\(\s*m,\s*"(\w+)"[^;]*;', bindings):
        members = re.findall(r'\.value\(\s*"(\w+)",\s*([\w:]+)', match[0])
        members_by_enum[match[1]] = {name: values["::".join(target.split("::")[-2:])] for name, target in members}
    return members_by_enum


def main(folder: Path) -> None:
    bindings = sources(folder, "pybind.cpp") + sources(folder, "pybind_helper.h")
    functions = dict(exported(bindings, sources(folder, "extensions.h")))
    assert functions, f"{folder} has no sources of transformer_engine_torch"
    json.dump({"functions": functions, "enums": enums(bindings, sources(folder, "*.h"))}, sys.stdout, indent=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
