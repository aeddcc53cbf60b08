"""Compare tokenizing speed and memory with Megatron-LM's tool: python benchmarks/preprocess.py --megatron-lm DIR

Both tools run as commands with the same tokenizer, documents and number of workers; their .bin must be equal. Each is
timed on all documents and on the first quarter of them: "tokens_per_s" is for all documents, including start-up,
"steady" is computed from the difference of the two, without start-up; "per_cpu_s" counts CPU seconds, which are less
sensitive to other load. The fastest of several alternating rounds counts. "peak_mb" is the largest process's, for both
inputs. Without --input: the sources of Python's standard library, in documents of at most --document-bytes, and a
tokenizer trained on them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 32_000


@dataclass(frozen=True)
class Spent:
    """Resources of a run: wall seconds, CPU seconds, megabytes of the largest process."""

    wall: float
    cpu: float
    peak_mb: float


@dataclass(frozen=True)
class Tool:
    """A command that tokenizes, and the prefix that it writes to."""

    name: str
    command: tuple[str, ...]
    output: str
    path: str = ""

    def run(self) -> Spent:
        """Run it once; the resources include those of its workers."""
        path = os.pathsep.join(filter(None, [self.path, os.environ.get("PYTHONPATH")]))
        with tempfile.TemporaryFile("w+") as errors:
            began = time.perf_counter()
            command = [sys.executable, "-W", "ignore", *self.command]
            environment = {**os.environ, "PYTHONPATH": path}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
            _, status, used = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            if status or not Path(f"{self.output}.idx").exists():
                errors.seek(0)
                raise SystemExit(f"{self.name} failed:\n{errors.read()[-2000:]}")
        return Spent(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def ours(corpus: Path, tokenizer: Path, folder: Path, workers: int) -> Tool:
    output = str(folder / "ours")
    flags = ("--input", str(corpus), "--output-prefix", output, "--tokenizer-model", str(tokenizer), "--overwrite")
    return Tool("megatron_ext", ("tools/preprocess_data.py", *flags, "--workers", str(workers)), output)


def theirs(megatron_lm: Path, corpus: Path, tokenizer: Path, folder: Path, workers: int) -> Tool:
    output = str(folder / "theirs")
    flags = ("--input", str(corpus), "--output-prefix", output, "--append-eod", "--workers", str(workers))
    kind = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer))
    program = str(megatron_lm / "tools" / "preprocess_data.py")
    return Tool("Megatron-LM", (program, *flags, *kind), f"{output}_text_document", str(megatron_lm))


def make_inputs(options: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Write large.jsonl, and small.jsonl with its first documents; from --input or from this machine's own texts."""
    source, size = options.input or folder / "corpus.jsonl", options.document_bytes
    if options.input is None:
        _tool("gather_corpus", "--output", source, "--max-bytes", options.corpus_bytes)
    with source.open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    pieces = [text[i : i + size] for text in texts for i in range(0, len(text), size)]
    paths = folder / "small.jsonl", folder / "large.jsonl"
    for path, count in zip(paths, (max(len(pieces) // 4, 1), len(pieces)), strict=True):
        path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces[:count]))
    return paths


def _tool(name: str, *flags: object) -> None:
    subprocess.run([sys.executable, f"tools/{name}.py", *map(str, flags)], cwd=ROOT, check=True, capture_output=True)


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, list[list[Spent]]], list[int]]:
    """Return the measurements of each round of each tool, for the small and the large input, and the tokens of both."""
    inputs = make_inputs(options, folder)
    tokenizer = options.tokenizer or folder / "tokenizer"
    if options.tokenizer is None:
        _tool("train_tokenizer", "--input", inputs[1], "--vocab-size", VOCABULARY, "--output", tokenizer)
    spent: dict[str, list[list[Spent]]] = {}
    tokens = [0, 0]
    for _ in range(options.rounds):
        for size, corpus in enumerate(inputs):
            tools = [ours(corpus, tokenizer, folder, options.workers)]
            if options.megatron_lm:
                tools.append(theirs(options.megatron_lm, corpus, tokenizer, folder, options.workers))
            for tool in tools:
                spent.setdefault(tool.name, [[], []])[size].append(tool.run())
            if len({Path(f"{tool.output}.bin").read_bytes() for tool in tools}) != 1:
                raise SystemExit("the two tools do not give the same tokens; does the tokenizer add special tokens?")
            tokens[size] = json.loads((folder / "ours.json").read_text())["tokens"]
    return spent, tokens


def rates(rounds: list[list[Spent]], tokens: list[int]) -> dict[str, float]:
    """Compute the tokens per second of the large input, and of its difference from the small one."""
    (small, large), more = rounds, tokens[1] - tokens[0]
    wall, cpu = min(run.wall for run in large), min(run.cpu for run in large)
    return {
        "tokens_per_s": tokens[1] / wall,
        "steady_tokens_per_s": more / (wall - min(run.wall for run in small)),
        "tokens_per_cpu_s": tokens[1] / cpu,
        "steady_tokens_per_cpu_s": more / (cpu - min(run.cpu for run in small)),
    }


def report(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """Yield one row per tool, and one of ratios."""
    spent, tokens = measure(options, folder)
    about = {"workers": options.workers, "document_bytes": options.document_bytes, "tokens": tokens}
    found = {name: rates(rounds, tokens) for name, rounds in spent.items()}
    for name, rounds in spent.items():
        peaks = [round(max(run.peak_mb for run in runs)) for runs in rounds]
        yield {"tool": name, **about, **{key: round(rate) for key, rate in found[name].items()}, "peak_mb": peaks}
    if options.megatron_lm:
        mine, other = found["megatron_ext"], found["Megatron-LM"]
        yield {"tool": "ratio", **about, **{key: round(mine[key] / other[key], 2) for key in mine}}


def main() -> None:
    """Print one JSON object per tool, and the ratio."""
    parser = argparse.ArgumentParser(description="Tokens per second of tools/preprocess_data.py and of Megatron-LM's.")
    parser.add_argument("--megatron-lm", type=Path, help="a checkout of Megatron-LM to measure as well")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--input", type=Path, help=".jsonl with a field text (default: Python's own sources)")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json (default: one trained on the input)")
    parser.add_argument("--corpus-bytes", type=int, default=8_000_000, help="of those sources to use (without --input)")
    parser.add_argument("--document-bytes", type=int, default=1 << 40, help="cut texts into documents of this size")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for row in report(options, Path(folder)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
