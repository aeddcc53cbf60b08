"""Measure code that a reader has to follow: files, lines, helpers with one caller, functions called by a step.

python benchmarks/house.py [--root CHECKOUT] [--list]

A helper is a private function of at most ten lines whose name occurs once more in its file: at its only caller. If the
file does not call it there, it is passed on: an entry of a table, a callback, an overriding method. A step's functions
are those that a run of four steps calls more often than one of three. A resume's functions are all those called by a
run that loads a checkpoint and takes one step. --root measures another checkout, such as an earlier commit.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
MOST_LINES_OF_A_HELPER = 10
RUN = """
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --num-query-groups 1 --vocab-size 300
    --seq-length 64 --global-batch-size 4 --window-schedule constant --lr-warmup-iters 0 --lr-decay-iters 9
"""


def functions_of(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_lines(text: str) -> int:
    """Count the lines that hold code: no blank lines, comments or docstrings."""
    doc: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            doc.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in doc for number, line in lines)


def single_caller_helpers(sources: dict[Path, str]) -> list[str]:
    """Return private functions of at most ten lines whose name occurs once in their file beside the definition."""
    found = []
    for path, text in sources.items():
        words = Counter(re.findall(r"\w+", text))
        for node in functions_of(ast.parse(text)):
            private = node.name.startswith("_") and not node.name.startswith("__")
            lines = (node.end_lineno or 0) - node.lineno + 1
            if private and lines <= MOST_LINES_OF_A_HELPER and words[node.name] == 2:
                found.append(f"{path}:{node.lineno} {node.name}")
    return found


def handed_over(helpers: list[str], sources: dict[Path, str]) -> int:
    """Count the helpers whose file names them but does not call them."""
    count = 0
    for helper in helpers:
        path, name = helper.split(":")[0], helper.split()[-1]
        called = re.search(rf"(?<!def )(?<!super\(\)\.)\b{name}\(", sources[Path(path)])
        count += called is None
    return count


def calls_of(root: Path, flags: list[str]) -> Counter[str]:
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
    monitoring = sys.monitoring if sys.version_info >= (3, 12) else None

    def called(code: object) -> None:
        name = code.co_filename  # type: ignore[attr-defined]
        # a class body also runs once if its module is imported late, but is not a function
        if name.startswith(package) and code.co_flags & inspect.CO_OPTIMIZED:  # type: ignore[attr-defined]
            calls[f"{name.removeprefix(package)}:{code.co_qualname}"] += 1  # type: ignore[attr-defined]

    sys.path.insert(0, str(root))
    import megatron_ext.engine  # noqa: F401  # calls of an import are not part of a run
    from pretrain_skyladder import main

    if monitoring is not None:
        monitoring.use_tool_id(monitoring.PROFILER_ID, "house")
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, lambda code, _: called(code))
    else:
        import threading

        def profile(frame: object, event: str, _: object) -> None:
            if event == "call":
                called(frame.f_code)  # type: ignore[attr-defined]

        threading.setprofile(profile)  # type: ignore[arg-type]
        sys.setprofile(profile)  # type: ignore[arg-type]
    status = main(flags)
    sys.setprofile(None)
    if status == 0:
        plain = {name: number for name, number in calls.items() if not name.endswith(">")}
        counts.write_text(json.dumps(plain))
    return status


def traced(root: Path) -> tuple[set[str], set[str]]:
    """Return the functions called by a step, and by a resume."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "texts.jsonl"
        text.write_text("".join(json.dumps({"text": f"document {n} " * (n % 40 + 1)}) + "\n" for n in range(60)))
        command = [sys.executable, "tools/preprocess_data.py", "--input", text, "--output-prefix", folder / "corpus"]
        where = {"cwd": root, "env": os.environ | {"PYTHONPATH": str(root)}}
        subprocess.run([*command, "--tokenizer-model", "bytes"], **where, check=True, capture_output=True)
        common = ["--config", str(root / "examples/configs/cpu_smoke.yaml"), "--no-tensorboard"]
        common += [*RUN.split(), "--data-path", str(folder / "corpus"), "--tokenizer-model", "bytes"]
        three = calls_of(root, [*common, "--train-iters", "3", "--save", str(folder / "three")])
        four = calls_of(root, [*common, "--train-iters", "4", "--save", str(folder / "four")])
        resumed = calls_of(root, [*common, "--train-iters", "4", "--load", str(folder / "three")])
    return {function for function, calls in four.items() if calls > three[function]}, set(resumed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=HERE, help="the checkout to measure")
    parser.add_argument("--list", action="store_true", help="name the helpers and the functions")
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    root = options.root.resolve()
    if options.trace:
        return trace(options.trace, root, flags)
    paths = sorted((root / "megatron_ext").rglob("*.py"))
    sources = {path.relative_to(root): path.read_text(encoding="utf-8") for path in paths}
    functions = [node for text in sources.values() for node in functions_of(ast.parse(text))]
    helpers = single_caller_helpers(sources)
    step, resume = traced(root)
    lines = [text.count("\n") for text in sources.values()]
    print(f"files                                {len(sources):6,}")
    print(f"lines                                {sum(lines):6,}")
    print(f"lines of code                        {sum(map(code_lines, sources.values())):6,}")
    print(f"lines of the median file             {sorted(lines)[len(lines) // 2]:6,}")
    print(f"functions                            {len(functions):6,}")
    handed = handed_over(helpers, sources)
    print(
        f"helpers with a single caller         {len(helpers):6,}  ({len(helpers) / len(functions):.0%} of all; "
        f"{handed} of them are handed over)"
    )
    for name, entered in (("a step", step), ("a resume", resume)):
        files = {function.split(":")[0] for function in entered}
        print(f"{name + ' enters':<36} {len(entered):6,} functions in {len(files)} files")
    if options.list:
        print("\n".join(["", "helpers:", *helpers, "", "step:", *sorted(step), "", "resume:", *sorted(resume)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
