"""Measure how much code a reader has to follow: files, lines, functions, helpers, and what a step and a resume call.

python benchmarks/code_size.py [--root CHECKOUT] [--list]

A helper with one caller is a private function of at most ten lines whose name occurs once more in its file. A step's
functions are those that a run of four steps calls more often than one of three; a resume's are all those called by a
run that loads a checkpoint and takes one step. --root measures another checkout, such as an earlier commit.
"""

import argparse
import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
RUN = """
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --num-query-groups 1 --vocab-size 300
    --seq-length 64 --global-batch-size 4 --window-schedule constant --lr-warmup-iters 0 --lr-decay-iters 9
"""


def code_lines(text: str) -> int:
    """Count the lines that hold code: no blank lines, comments or docstrings."""
    doc: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            doc.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in doc for number, line in lines)


def helpers_with_one_caller(text: str) -> int:
    """Count the private functions of at most ten lines whose name occurs twice in their file."""
    words = Counter(re.findall(r"\w+", text))
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    short = [node.name for node in functions if (node.end_lineno or 0) - node.lineno < 10]
    return sum(words[name] == 2 for name in short if re.match("_[^_]", name))


def calls_of(root: Path, *flags: str) -> Counter[str]:
    """Count the calls of the package's functions in one run of the trainer, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        environment = os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--trace", str(counts), "--root", str(root), *flags]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        if not counts.exists():
            sys.exit(f"the run failed:\n{done.stderr[-3000:]}")
        return Counter(json.loads(counts.read_text()))


def trace(counts: Path, root: Path, flags: list[str]) -> int:
    """Run the trainer and write the number of calls of the package's functions, on all threads."""
    package, calls = str(root / "megatron_ext") + os.sep, Counter[str]()

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        # a class body also runs once if its module is imported late, but is not a function
        if event == "call" and code.co_filename.startswith(package) and code.co_flags & inspect.CO_OPTIMIZED:
            calls[f"{code.co_filename.removeprefix(package)}:{code.co_qualname}"] += 1

    sys.path.insert(0, str(root))
    import megatron_ext.engine  # noqa: F401  # calls of an import are not part of a run
    from pretrain_skyladder import main

    threading.setprofile(profile)
    sys.setprofile(profile)
    status = int(main(flags))
    sys.setprofile(None)
    if status == 0:
        counts.write_text(json.dumps({name: number for name, number in calls.items() if not name.endswith(">")}))
    return status


def traced(root: Path) -> dict[str, set[str]]:
    """Return the functions called by a step, and by a resume."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "texts.jsonl"
        text.write_text("".join(json.dumps({"text": f"document {n} " * (n % 40 + 1)}) + "\n" for n in range(60)))
        command = [sys.executable, "tools/preprocess_data.py", "--input", text, "--output-prefix", folder / "corpus"]
        command += ["--tokenizer-model", "bytes"]
        environment = os.environ | {"PYTHONPATH": str(root)}
        subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
        common = ["--config", str(root / "examples/configs/cpu_smoke.yaml"), "--no-tensorboard", *RUN.split()]
        common += ["--data-path", str(folder / "corpus"), "--tokenizer-model", "bytes", "--train-iters"]
        three = calls_of(root, *common, "3", "--save", str(folder / "three"))
        four = calls_of(root, *common, "4", "--save", str(folder / "four"))
        resume = calls_of(root, *common, "4", "--load", str(folder / "three"))
    return {
        "a step": {function for function, calls in four.items() if calls > three[function]},
        "a resume": set(resume),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=HERE, help="the checkout to measure")
    parser.add_argument("--list", action="store_true", help="name the functions that are called")
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    root = options.root.resolve()
    if options.trace:
        return trace(options.trace, root, flags)
    texts = [path.read_text(encoding="utf-8") for path in (root / "megatron_ext").rglob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    entered = traced(root)
    figures = {
        "files": len(texts),
        "lines": sum(text.count("\n") for text in texts),
        "lines of code": sum(map(code_lines, texts)),
        "functions": sum(isinstance(node, ast.FunctionDef) for node in nodes),
        "helpers with one caller": sum(map(helpers_with_one_caller, texts)),
        **{f"functions that {name} enters": len(functions) for name, functions in entered.items()},
    }
    for name, number in figures.items():
        print(f"{name:32} {number:6,}")
    if options.list:
        for name, functions in entered.items():
            print("\n".join(["", f"{name}:", *sorted(functions)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
