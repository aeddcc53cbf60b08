"""Measure the libraries that data/ does not use beside what it does: python benchmarks/libraries.py

"open_s" is the seconds from an empty process to one that can work, imports included, and "open_mb" its memory then;
"peak_mb" is its memory at the end, or that of its largest worker. Seconds are of one core, which a busy machine
disturbs less, but for "wall_s". Every case runs in a process of its own, as each worker of a preprocessing does.

- tokenize: `Tokenizer` beside transformers' AutoTokenizer, on the sources of Python's standard library.
  "spelled_as_text" is whether a text that spells the end token gives ordinary characters, as data must.
- write: parts joined by `write_dataset` beside one Megatron IndexedDatasetBuilder that takes every document, and
  beside datatrove's MegatronTokenizedFile; the files are the same, byte for byte.
- preprocess: one file of documents to a dataset with two workers, by `preprocess` and by datatrove's
  MegatronDocumentTokenizer; the tokens are the same. "tokens_per_s" is per second of a core. "after_kill" is the share
  of the work that is left for a second run where the first was killed with half of the tokens on disk.

datatrove is no dependency. Without it its cases are left out; with it they run under the Python that has it:

    python -m venv DIR && DIR/bin/pip install datatrove orjson tokenizers
    python benchmarks/libraries.py --datatrove DIR/bin/python
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

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8_000
TOKENS_OF_A_DOCUMENT = 16
DOCUMENTS_OF_A_PART = 1 << 16
LONGEST = 4000  # characters of a document
COPIES = 4  # of the corpus in the file that is preprocessed: half of it must be a moment that can be caught
WORKERS = 2
BATCH = 256
END = "<|endoftext|>"


def memory_mb() -> float:
    """Return the peak of this process, or of the largest that it has waited for."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


def cpu_seconds() -> float:
    """Return the seconds of all cores that this process and those that it has waited for have taken."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def cut(corpus: Path) -> Iterator[str]:
    """Yield the corpus in documents, a file at a time: the memory of this process counts as that of those it starts."""
    for line in corpus.open():
        text: str = json.loads(line)["text"]
        yield from (text[start : start + LONGEST] for start in range(0, len(text), LONGEST))


def tokenize(
    folder: Path, encode: Callable[[list[str]], list[list[int]]], opened: dict[str, float]
) -> dict[str, float]:
    """Encode the corpus in batches, as a worker does."""
    texts = list(cut(folder / "corpus.jsonl"))
    began = time.process_time()
    tokens = sum(len(ids) for first in range(0, len(texts), BATCH) for ids in encode(texts[first : first + BATCH]))
    taken = time.process_time() - began
    spelled = encode([END])[0]
    return opened | {"tokens": tokens, "tokens_per_s": round(tokens / taken), "spelled_as_text": len(spelled) > 1}


def with_ours(folder: Path, _: int) -> dict[str, float]:
    began = time.process_time()
    from megatron_ext.data.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder / "tokenizer")
    return tokenize(folder, tokenizer.encode_batch, opened_since(began))


def with_auto(folder: Path, _: int, **options: bool) -> dict[str, float]:
    began = time.process_time()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return tokenize(
        folder, lambda texts: tokenizer(texts, add_special_tokens=False, **options)["input_ids"], opened_since(began)
    )


def with_auto_split(folder: Path, documents: int) -> dict[str, float]:
    return with_auto(folder, documents, split_special_tokens=True)


def opened_since(began: float) -> dict[str, float]:
    return {"open_s": round(time.process_time() - began, 2), "open_mb": round(memory_mb())}


def written(began: float, documents: int, opened: dict[str, float]) -> dict[str, float]:
    return opened | {"documents": documents, "write_s": round(time.process_time() - began, 2)}


def with_parts(folder: Path, documents: int) -> dict[str, float]:
    began = time.process_time()
    import numpy as np

    from megatron_ext.data.build.indexed import Totals, write_dataset
    from megatron_ext.data.build.parts import Part, PartWriter, Record

    opened, began = opened_since(began), time.process_time()
    parts = []
    for first in range(0, documents, DOCUMENTS_OF_A_PART):
        count = min(DOCUMENTS_OF_A_PART, documents - first)
        part = Part(folder, f"part{first}")
        with PartWriter(part) as writer:
            for _ in range(count):
                writer.write(np.arange(TOKENS_OF_A_DOCUMENT, dtype=np.uint16).tobytes())
            record = Record(documents=count, sequences=count, tokens=count * TOKENS_OF_A_DOCUMENT)
            lengths = np.full(count, TOKENS_OF_A_DOCUMENT, np.int32)
            writer.finish(record, lengths=lengths, counts=np.ones(count, np.int32))
        parts.append(part)
    write_dataset(str(folder / "parts"), folder, parts, np.uint16, Totals.of(parts), {})
    return written(began, documents, opened)


def with_builder(folder: Path, documents: int) -> dict[str, float]:
    began = time.process_time()
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    opened, began = opened_since(began), time.process_time()
    builder = IndexedDatasetBuilder(str(folder / "builder.bin"), np.uint16)
    for _ in range(documents):
        builder.add_document(torch.arange(TOKENS_OF_A_DOCUMENT), [TOKENS_OF_A_DOCUMENT])
    builder.finalize(str(folder / "builder.idx"))
    return written(began, documents, opened)


def with_tokenized_file(folder: Path, documents: int) -> dict[str, float]:
    began = time.process_time()
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

    opened, began = opened_since(began), time.process_time()
    file = MegatronTokenizedFile(str(folder), "datatrove", token_size=2)
    for _ in range(documents):
        file.write(list(range(TOKENS_OF_A_DOCUMENT)))
    file.close()
    return written(began, documents, opened)


def with_preprocess(folder: Path, _: int) -> dict[str, float]:
    began = time.process_time()
    from megatron_ext.data.build.preprocess import PreprocessOptions, preprocess

    options = PreprocessOptions(
        inputs=[str(folder / "documents" / "all.jsonl")],
        output_prefix=str(folder / "preprocess" / "dataset"),
        tokenizer=str(folder / "tokenizer"),
        workers=WORKERS,
        resume=True,
    )
    return timed(lambda: preprocess(options), opened_since(began))


def with_document_tokenizer(folder: Path, _: int) -> dict[str, float]:
    began = time.process_time()
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
        start_method="spawn",  # as ours, and so that their seconds are counted
    )
    row = timed(pipeline.run, opened_since(began))
    # the end of the document follows the text
    return row | {"spelled_as_text": len(tokenizer.tokenizer.encode(END).ids) > 2}


def timed(run: Callable[[], object], opened: dict[str, float]) -> dict[str, float]:
    began, cpu_began = time.perf_counter(), cpu_seconds()
    run()
    return opened | {"wall_s": round(time.perf_counter() - began, 2), "cpu_s": round(cpu_seconds() - cpu_began, 2)}


CASES = {
    "Tokenizer": with_ours,
    "AutoTokenizer": with_auto,
    "AutoTokenizer, split_special_tokens": with_auto_split,
    "write_dataset": with_parts,
    "IndexedDatasetBuilder": with_builder,
    "MegatronTokenizedFile": with_tokenized_file,
    "preprocess": with_preprocess,
    "MegatronDocumentTokenizer": with_document_tokenizer,
}
OF_DATATROVE = ("MegatronTokenizedFile", "MegatronDocumentTokenizer")
RESUMED = ("preprocess", "MegatronDocumentTokenizer")  # each writes into the folder of its name


@contextmanager
def started(case: str, python: str, folder: Path, documents: int) -> Iterator[subprocess.Popen[str]]:
    """Start a case in a process group of its own."""
    command = [python, "-W", "ignore", __file__, "--case", case, "--folder", str(folder), "--documents", str(documents)]
    one_core = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    with (folder / "errors").open("w") as errors:
        yield subprocess.Popen(
            command, cwd=ROOT, env=one_core, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )


def measured(case: str, python: str, folder: Path, documents: int) -> dict[str, float]:
    """Run a case to its end."""
    with started(case, python, folder, documents) as process:
        output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{case} failed:\n{(folder / 'errors').read_text()[-3000:]}")
    return json.loads(output.splitlines()[-1])  # type: ignore[no-any-return]


def resumed(case: str, python: str, folder: Path) -> dict[str, float]:
    """Preprocess, and once more with the first attempt killed when half of the tokens are on disk."""
    output, bins = folder / case, "**/*.bin"
    measured(case, python, folder, 0)  # the first attempt reads modules that the others find in memory
    shutil.rmtree(output)
    whole = measured(case, python, folder, 0)
    size = sum(path.stat().st_size for path in output.glob(bins))
    shutil.rmtree(output)
    with started(case, python, folder, 0) as process:
        while sum(path.stat().st_size for path in output.glob(bins)) < size / 2:
            assert process.poll() is None, "the attempt ended before it could be killed; raise COPIES"
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rest = measured(case, python, folder, 0)
    tokens = size // 2  # of two bytes each
    rate, share = round(tokens / whole["cpu_s"]), round(rest["cpu_s"] / whole["cpu_s"], 2)
    return whole | {"tokens": tokens, "tokens_per_s": rate, "after_kill": share}


def compare(documents: int, corpus_bytes: int, datatrove: str) -> Iterator[dict[str, object]]:
    """Measure each case on its own; datasets of the same documents must be the same, byte for byte."""
    probe = subprocess.run([datatrove, "-c", "import datatrove, orjson, tokenizers"], capture_output=True, check=False)
    has_datatrove = probe.returncode == 0
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
        for case in CASES:
            python = datatrove if case in OF_DATATROVE else sys.executable
            if case in OF_DATATROVE and not has_datatrove:
                yield {"case": case, "left_out": f"{python} has no datatrove; --help says how to install it"}
            elif case in RESUMED:
                yield resumed(case, python, folder)
            else:
                yield measured(case, python, folder, documents)
        same = [[folder / "parts", folder / "builder"]]
        if has_datatrove:
            same[0].append(folder / "datatrove")
            same.append([folder / "preprocess" / "dataset", folder / "MegatronDocumentTokenizer" / "00000_tokens"])
        for datasets in same:
            for suffix in (".bin", ".idx"):
                assert len({Path(f"{path}{suffix}").read_bytes() for path in datasets}) == 1, (datasets, suffix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, help="that are written, of 16 tokens each")
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000, help="of text that is tokenized")
    parser.add_argument("--datatrove", metavar="PYTHON", default=sys.executable, help="that has datatrove")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        row = CASES[options.case](options.folder, options.documents)
        print(json.dumps({"case": options.case, **row, "peak_mb": round(memory_mb())}))
        return
    for line in compare(options.documents, options.corpus_bytes, options.datatrove):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
