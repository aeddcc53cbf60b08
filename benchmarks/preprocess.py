"""Compare tokenizing speed and memory with Megatron-LM's tools and with datatrove's MegatronDocumentTokenizer.

    python benchmarks/preprocess.py --megatron-lm DIR       a checkout; its newest need Python 3.12
    python benchmarks/preprocess.py --datatrove PYTHON      an interpreter that has datatrove:
        python -m venv DIR && DIR/bin/pip install datatrove orjson tokenizers

For each tokenizer and size of documents, all tools run as commands with the same documents and number of workers; their
.bin must be equal. "Megatron-LM" is its preprocess_data.py, "Megatron-LM fast" its preprocess_data_fast.py, which uses
gigatoken in threads, and "megatron_ext slow" ours without gigatoken. Each is timed on all documents and on the first
quarter of them: "tokens_per_cpu_s" is for all documents, including start-up, "steady" is computed from the difference
of the two, without start-up; it is null if all take less than 1.25 times as long as the quarter: use a larger input.
The fastest of several alternating rounds counts. "peak_mb" is the largest process's, for both inputs. "after_kill" is
the share of the CPU time that a second run takes after the first was killed with half of the tokens on disk, with
--datatrove (Megatron-LM starts again). Without --input: the sources of Python's standard library. The tokenizers are
trained on the input, in the shapes of real ones (fuzz_ids.py).
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from fuzz_ids import shapes, train
from record import ROOT, Records, parser_of

VOCABULARY = 32_000
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer

if __name__ == "__main__":
    corpus, tokenizer, output, workers = sys.argv[1:]
    folder, _, name = corpus.rpartition("/")
    writer = MegatronDocumentTokenizer(output, tokenizer_name_or_path=tokenizer + "/tokenizer.json", batch_size=256)
    steps = [JsonlReader(folder, glob_pattern=name), writer]
    options = {"tasks": int(workers), "workers": int(workers), "logging_dir": output + "/log", "start_method": "spawn"}
    LocalPipelineExecutor(steps, **options).run()
"""


class Spent(NamedTuple):
    """Resources of a run."""

    cpu: float  # seconds
    peak_mb: float  # of the largest process


@dataclass(frozen=True)
class Tool:
    """A command that tokenizes."""

    name: str
    command: str
    folder: Path  # what it writes; a later run continues there, except Megatron-LM's
    dataset: str  # the prefix of its .bin and .idx
    path: str = ""  # a folder for its imports

    def run(self, fresh: bool = True, kill_at: float | None = None) -> Spent:
        """Run it once, or kill it with `kill_at` bytes of tokens on disk; the resources include its workers'."""
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        path = os.pathsep.join(filter(None, [self.path, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        with (self.folder.parent / "log").open("w+") as log:
            options: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": log}
            process = subprocess.Popen(self.command.split(), start_new_session=True, **options)
            if kill_at is not None:
                while self.written() < kill_at:
                    assert process.poll() is None, "it ended before it could be killed; raise --corpus-bytes"
                    time.sleep(0.001)
                os.killpg(process.pid, signal.SIGKILL)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if kill_at is None and (status or not (self.folder / f"{self.dataset}.idx").exists()):
                log.seek(0)
                raise SystemExit(f"{self.name} failed:\n{log.read()[-2000:]}")
        return Spent(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)

    def written(self) -> int:
        """Return the bytes of tokens on disk."""
        return sum(path.stat().st_size for path in self.folder.glob("**/*.bin"))

    def after_kill(self) -> float:
        """Return the share of the CPU time that a run takes after one was killed half-way."""
        whole = self.run()
        self.run(kill_at=self.written() / 2)
        return self.run(fresh=False).cpu / whole.cpu


def tools_of(options: argparse.Namespace, corpus: Path, tokenizer: Path, folder: Path) -> list[Tool]:
    """Return ours, and those that the options name."""
    python = f"{sys.executable} -W ignore"
    script = "tools/preprocess_data.py"
    flags = f"--input {corpus} --tokenizer-model {tokenizer} --workers {options.workers} --output-prefix {folder}"
    command = f"{python} {script} {flags}/megatron_ext/dataset --resume"
    slow = f"{python} {script} {flags}/slow/dataset --encoder tokenizers"
    tools = [Tool("megatron_ext", command, folder / "megatron_ext", "dataset")]
    tools.append(Tool("megatron_ext slow", slow, folder / "slow", "dataset"))
    if options.megatron_lm:
        checkout = options.megatron_lm.resolve()
        kind = "--append-eod --tokenizer-type HuggingFaceTokenizer"
        script = f"{python} {checkout}/tools/preprocess_data"
        files = ("dataset_text_document", str(checkout))
        command = f"{script}.py {flags}/Megatron-LM/dataset {kind}"
        tools.append(Tool("Megatron-LM", command, folder / "Megatron-LM", *files))
        flags = flags.replace(f"--workers {options.workers} ", "")
        command = f"{script}_fast.py {flags}/fast/dataset {kind} --use-gigatoken"
        tools.append(Tool("Megatron-LM fast", command, folder / "fast", *files))
    if options.datatrove:
        (folder / "run_datatrove.py").write_text(DATATROVE)
        words = f"{folder}/run_datatrove.py {corpus} {tokenizer} {folder}/datatrove {options.workers}"
        tools.append(Tool("datatrove", f"{options.datatrove} {words}", folder / "datatrove", "00000_tokens"))
    return [tool for tool in tools if tool.name in (options.tools or tool.name)]


def read_texts(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the texts of the input, or of Python's standard library."""
    source = options.input or folder / "corpus.jsonl"
    if not source.exists():
        _tool("gather_corpus", "--output", source, "--max-bytes", options.corpus_bytes)
    with source.open() as lines:
        return [json.loads(line)["text"] for line in lines]


def make_tokenizer(options: argparse.Namespace, shape: str, folder: Path) -> Path:
    """Train a tokenizer in one of the shapes of fuzz_ids.py on the texts."""
    about = next(about for name, *about in shapes() if name == shape)
    tokenizer = folder / shape.replace(" ", "")
    train(*about, read_texts(options, folder), tokenizer, VOCABULARY)
    return tokenizer


def write_inputs(options: argparse.Namespace, size: int, folder: Path) -> list[Path]:
    """Write small.jsonl with the first quarter of the documents of `size` characters, and large.jsonl with all."""
    texts = read_texts(options, folder)
    documents = [json.dumps({"text": text[i : i + size]}) + "\n" for text in texts for i in range(0, len(text), size)]
    small = folder / "small.jsonl"
    large = folder / "large.jsonl"
    small.write_text("".join(documents[: max(len(documents) // 4, 1)]))
    large.write_text("".join(documents))
    return [small, large]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, which is not held in memory: a command would seem as large as this process."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tool(name: str, *flags: object) -> None:
    subprocess.run([sys.executable, f"tools/{name}.py", *map(str, flags)], cwd=ROOT, check=True, capture_output=True)


def measure(options: argparse.Namespace, inputs: list[Path], tokenizer: Path, folder: Path, **about: Any) -> None:
    """Record the figures of each tool, and ours over each of the others."""
    spent: dict[str, tuple[list[Spent], list[Spent]]] = {}
    tokens = [0, 0]
    for _ in range(options.rounds):
        for size, corpus in enumerate(inputs):
            tools = tools_of(options, corpus, tokenizer, folder)
            for tool in tools:
                spent.setdefault(tool.name, ([], []))[size].append(tool.run())
            if len({digest(tool.folder / f"{tool.dataset}.bin") for tool in tools}) != 1:
                raise SystemExit("the tools do not give the same tokens; does the tokenizer add special tokens?")
            tokens[size] = json.loads((folder / "megatron_ext" / "dataset.json").read_text())["tokens"]
    records = Records("preprocess", options.output)
    about |= {"workers": options.workers, "tokens": tokens}
    rates_by_tool = {name: rates(*rounds, tokens) for name, rounds in spent.items()}
    for tool in tools:
        figures: dict[str, Any] = dict(rates_by_tool[tool.name])
        figures["peak_mb"] = [round(max(run.peak_mb for run in runs)) for runs in spent[tool.name]]
        if options.datatrove and not tool.name.startswith("Megatron-LM"):
            figures["after_kill"] = tool.after_kill()
        records.add(tool=tool.name, **about, **figures)
    our_rates = rates_by_tool.pop("megatron_ext")
    for name, their_rates in rates_by_tool.items():
        ratios = {
            key: our_rate and their_rates[key] and our_rate / their_rates[key] for key, our_rate in our_rates.items()
        }
        records.add(tool=f"ratio to {name}", **about, **ratios)


def rates(small: list[Spent], large: list[Spent], tokens: list[int]) -> dict[str, float | None]:
    """Compute the tokens per CPU second of the large input, and of its difference from the small one if it is large."""
    less, more = (min(run.cpu for run in runs) for runs in (small, large))
    steady = (tokens[1] - tokens[0]) / (more - less) if more > 1.25 * less else None
    return {"tokens_per_cpu_s": tokens[1] / more, "steady_tokens_per_cpu_s": steady}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megatron-lm", type=Path, metavar="DIR", help="a checkout of Megatron-LM to measure as well")
    parser.add_argument("--datatrove", metavar="PYTHON", help="an interpreter with datatrove, to measure it as well")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--input", type=Path, help=".jsonl with a field text (default: Python's own sources)")
    parser.add_argument("--corpus-bytes", type=int, default=8_000_000, help="of those sources to use (without --input)")
    parser.add_argument("--document-bytes", type=int, nargs="+", default=[2_000, 20_000, 1 << 40], help="their sizes")
    parser.add_argument("--shapes", nargs="+", default=["GPT-2", "Llama 3", "Qwen 2"], help="of the tokenizers")
    parser.add_argument("--tools", nargs="+", help="of those above to measure, with megatron_ext (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    # a command never seems smaller than the process that started it, so the texts are in another one
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(1, get_context("spawn")) as texts_process:
        folder = Path(name)
        for shape in options.shapes:
            tokenizer = texts_process.submit(make_tokenizer, options, shape, folder).result()
            for size in options.document_bytes:
                inputs = texts_process.submit(write_inputs, options, size, folder).result()
                measure(options, inputs, tokenizer, folder, shape=shape, document_bytes=size)


if __name__ == "__main__":
    main()
