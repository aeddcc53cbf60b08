"""Measure how much code a reader has to follow: python benchmarks/code_size.py [--root CHECKOUT]

A helper with one caller is a private function of at most ten lines whose name occurs once more in its file. --root
measures another checkout, such as an earlier commit.
"""

import argparse
import ast
import re
from collections import Counter
from pathlib import Path


def code_lines(text: str) -> int:
    """Count the lines that hold code: no blank lines, comments or docstrings."""
    doc: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            doc.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in doc for number, line in lines)


def functions_of(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]


def helpers_with_one_caller(text: str) -> int:
    """Count the private functions of at most ten lines whose name occurs twice in their file."""
    words = Counter(re.findall(r"\w+", text))
    short = [node.name for node in functions_of(text) if (node.end_lineno or 0) - node.lineno < 10]
    return sum(words[name] == 2 for name in short if re.match("_[^_]", name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to measure")
    root = parser.parse_args().root
    texts = [path.read_text(encoding="utf-8") for path in (root / "megatron_ext").rglob("*.py")]
    figures = {
        "files": len(texts),
        "lines": sum(text.count("\n") for text in texts),
        "lines of code": sum(map(code_lines, texts)),
        "functions": sum(len(functions_of(text)) for text in texts),
        "helpers with one caller": sum(map(helpers_with_one_caller, texts)),
    }
    for name, number in figures.items():
        print(f"{name:32} {number:6,}")


if __name__ == "__main__":
    main()
