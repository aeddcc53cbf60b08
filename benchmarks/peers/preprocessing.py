"""Compare preprocessing with datatrove's: python benchmarks/peers/preprocessing.py --datatrove PYTHON

One file of documents is made into a dataset with two workers, by `preprocess` and by datatrove's
MegatronDocumentTokenizer; the token files are the same, byte for byte. "tokens_per_s" is per core second; "after_kill"
is the share of the work that a second run repeats after the first was killed with half of the tokens on disk. Each case
runs in a separate process.

PYTHON is an interpreter that has datatrove:

    python -m venv DIR && DIR/bin/pip install datatrove orjson tokenizers
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 8_000
LONGEST = 4000  # characters of a document
COPIES = 4  # copies of the corpus, so that a run can be killed halfway
WORKERS = 2
BATCH = 256
END = "<|endoftext|>"


def memory_mb() -> float:
    """Return the peak memory of this process, or of the largest child that it has waited for."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def cut(corpus: Path) -> Iterator[str]:
    """Yield the corpus in documents, a file at a time, because this process's memory counts in its children's."""
    for line in corpus.open():
        text: str = json.loads(line)["text"]
        yield from (text[start : start + LONGEST] for start in range(0, len(text), LONGEST))


def with_preprocess(folder: Path) -> dict[str, float]:
    from megatron_ext.data.build.preprocess import PreprocessOptions, preprocess

    options = PreprocessOptions(
        inputs=[str(folder / "documents" / "all.jsonl")],
        output_prefix=str(folder / "preprocess" / "dataset"),
        tokenizer=str(folder / "tokenizer"),
        workers=WORKERS,
        resume=True,
    )
    return timed(lambda: preprocess(options))


def with_document_tokenizer(folder: Path) -> dict[str, float]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer

    output = folder / "MegatronDocumentTokenizer"
    tokenizer = MegatronDocumentTokenizer(
        str(output), tokenizer_name_or_path=str(folder / "tokenizer" / "tokenizer.json"), batch_size=BATCH
    )
    pipeline = LocalPipelineExecutor(
        [JsonlReader(str(folder / "documents")), tokenizer],
        tasks=WORKERS,
        workers=WORKERS,
        logging_dir=str(output / "log"),
        start_method="spawn",  # as in `preprocess`; also includes the workers' CPU time
    )
    row = timed(pipeline.run)
    # the end-of-document token follows the text
    return row | {"spelled_as_text": len(tokenizer.tokenizer.encode(END).ids) > 2}


def timed(run: Callable[[], object]) -> dict[str, float]:
    began, cpu_began = time.perf_counter(), cpu_seconds()
    run()
    return {"wall_s": round(time.perf_counter() - began, 2), "cpu_s": round(cpu_seconds() - cpu_began, 2)}


CASES = {  # by output folder
    "preprocess": with_preprocess,
    "MegatronDocumentTokenizer": with_document_tokenizer,
}


@contextmanager
def started(case: str, python: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a case in a separate process group."""
    command = [python, "-W", "ignore", __file__, "--case", case, "--folder", str(folder)]
    one_core = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    with (folder / "errors").open("w") as errors:
        yield subprocess.Popen(
            command, cwd=ROOT, env=one_core, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )


def measured(case: str, python: str, folder: Path) -> dict[str, float]:
    """Run a case to its end."""
    with started(case, python, folder) as process:
        output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{case} failed:\n{(folder / 'errors').read_text()[-3000:]}")
    return json.loads(output.splitlines()[-1])  # type: ignore[no-any-return]


def resumed(case: str, python: str, folder: Path) -> dict[str, float]:
    """Preprocess twice, with the first attempt killed when half of the tokens are on disk."""
    output, bins = folder / case, "**/*.bin"
    measured(case, python, folder)  # warms the file cache
    shutil.rmtree(output)
    whole = measured(case, python, folder)
    size = sum(path.stat().st_size for path in output.glob(bins))
    shutil.rmtree(output)
    with started(case, python, folder) as process:
        while sum(path.stat().st_size for path in output.glob(bins)) < size / 2:
            assert process.poll() is None, "the attempt ended before it could be killed; raise COPIES"
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rest = measured(case, python, folder)
    tokens = size // 2  # two bytes each
    rate, share = round(tokens / whole["cpu_s"]), round(rest["cpu_s"] / whole["cpu_s"], 2)
    return whole | {"tokens": tokens, "tokens_per_s": rate, "after_kill": share}


def compare(corpus_bytes: int, datatrove: str) -> Iterator[dict[str, object]]:
    """Measure both, each in a separate process, and check that their datasets are the same."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
        for command in (
            ["tools/gather_corpus.py", "--output", corpus, "--max-bytes", corpus_bytes],
            ["tools/train_tokenizer.py", "--input", corpus, "--vocab-size", VOCABULARY, "--output", tokenizer],
        ):
            subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, capture_output=True)
        (folder / "documents").mkdir()
        with (folder / "documents" / "all.jsonl").open("w") as documents_file:
            for _ in range(COPIES):
                documents_file.writelines(json.dumps({"text": text}) + "\n" for text in cut(corpus))
        yield resumed("preprocess", sys.executable, folder)
        yield resumed("MegatronDocumentTokenizer", datatrove, folder)
        datasets = (folder / "preprocess" / "dataset", folder / "MegatronDocumentTokenizer" / "00000_tokens")
        for suffix in (".bin", ".idx"):
            assert len({Path(f"{path}{suffix}").read_bytes() for path in datasets}) == 1, suffix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000, help="size of the text")
    parser.add_argument("--datatrove", metavar="PYTHON", default=sys.executable, help="interpreter that has datatrove")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        row = CASES[options.case](options.folder)
        print(json.dumps({"case": options.case, **row, "peak_mb": round(memory_mb())}))
        return
    for line in compare(options.corpus_bytes, options.datatrove):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
