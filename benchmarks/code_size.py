"""Measure how much code a reader has to follow: python benchmarks/code_size.py [--root CHECKOUT] [--list]

A helper with one caller is a private function of at most ten lines whose name occurs once more in its file. A step's
functions are those that a run of four steps calls more often than one of three; a resume's are all those called by a
run that loads a checkpoint and takes one step. --root measures another checkout, such as an earlier commit.
"""

import argparse
import ast
import inspect
import multiprocessing
import re
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any


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


def calls(root: Path, flags: list[str]) -> Counter[str]:
    """Run the trainer in this process and count the calls of each of the package's functions, on all threads."""
    package, found = str(root / "megatron_ext"), Counter[str]()

    def count(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code  # a class body is no function, but is called once if its module is imported late
        if event == "call" and code.co_filename.startswith(package) and code.co_flags & inspect.CO_OPTIMIZED:
            found[f"{code.co_filename.removeprefix(package)}:{code.co_qualname}"] += not code.co_name.startswith("<")

    sys.path.insert(0, str(root))
    import megatron_ext.engine  # noqa: F401  # calls of an import are not part of a run
    from pretrain_skyladder import main as train

    threading.setprofile(count)
    sys.setprofile(count)
    status = train(flags)
    sys.setprofile(None)
    assert status == 0, flags
    return +found


def entered(root: Path) -> dict[str, set[str]]:
    """Return the functions called by a step, and by a resume, of the run that checks an installation."""
    config = ["--config", str(root / "examples/configs/cpu_smoke.yaml"), "--no-tensorboard", "--train-iters"]
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as new,
    ):
        three = new.apply(calls, (root, [*config, "3", "--save", f"{folder}/3", "--lr-decay-iters", "40"]))
        four = new.apply(calls, (root, [*config, "4", "--save", f"{folder}/4", "--lr-decay-iters", "40"]))
        resume = new.apply(calls, (root, [*config, "4", "--load", f"{folder}/3", "--lr-decay-iters", "40"]))
    return {"a step": {name for name in four if four[name] > three[name]}, "a resume": set(resume)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to measure")
    parser.add_argument("--list", action="store_true", help="name the functions that are called")
    options = parser.parse_args()
    root, called = options.root.resolve(), entered(options.root.resolve())
    texts = [path.read_text(encoding="utf-8") for path in (root / "megatron_ext").rglob("*.py")]
    figures = {
        "files": len(texts),
        "lines": sum(text.count("\n") for text in texts),
        "lines of code": sum(map(code_lines, texts)),
        "functions": sum(len(functions_of(text)) for text in texts),
        "helpers with one caller": sum(map(helpers_with_one_caller, texts)),
        **{f"functions that {name} enters": len(functions) for name, functions in called.items()},
    }
    for name, number in figures.items():
        print(f"{name:32} {number:6,}")
    if options.list:
        for name, functions in called.items():
            print("", f"{name}:", *sorted(functions), sep="\n")


if __name__ == "__main__":
    main()
