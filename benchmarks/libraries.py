"""Measure the libraries that data/ does not use beside what it does: python benchmarks/libraries.py

"open_s" is the seconds from an empty process to one that can work, imports included, and "open_mb" its memory then;
"peak_mb" is its memory at the end. Seconds are of one core, which a busy machine disturbs less. Every case runs in a
process of its own, as each worker of a preprocessing does.

- tokenize: `Tokenizer` beside transformers' AutoTokenizer, on the sources of Python's standard library.
  "spelled_as_text" is whether a text that spells the end token gives ordinary characters, as data must.
- write: parts joined by `write_dataset` beside one Megatron IndexedDatasetBuilder that takes every document.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8_000
TOKENS_OF_A_DOCUMENT = 16
DOCUMENTS_OF_A_PART = 1 << 16
BATCH = 256


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tokenize(
    folder: Path, encode: Callable[[list[str]], list[list[int]]], opened: dict[str, float]
) -> dict[str, float]:
    """Encode the corpus in batches, as a worker does."""
    texts = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").open()]
    texts = [text[start : start + 4000] for text in texts for start in range(0, len(text), 4000)]
    began = time.process_time()
    tokens = sum(len(ids) for first in range(0, len(texts), BATCH) for ids in encode(texts[first : first + BATCH]))
    taken = time.process_time() - began
    spelled = encode(["<|endoftext|>"])[0]
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


CASES = {
    "Tokenizer": with_ours,
    "AutoTokenizer": with_auto,
    "AutoTokenizer, split_special_tokens": with_auto_split,
    "write_dataset": with_parts,
    "IndexedDatasetBuilder": with_builder,
}


def compare(documents: int, corpus_bytes: int) -> Iterator[dict[str, object]]:
    """Measure each case on its own; the two datasets must be the same, byte for byte."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
        for command in (
            ["tools/gather_corpus.py", "--output", corpus, "--max-bytes", corpus_bytes],
            ["tools/train_tokenizer.py", "--input", corpus, "--vocab-size", VOCABULARY, "--output", tokenizer],
        ):
            subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, capture_output=True)
        for case in CASES:
            command = [sys.executable, "-W", "ignore", __file__, "--case", case, "--folder", name]
            one_core = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
            command += ["--documents", str(documents)]
            done = subprocess.run(command, cwd=ROOT, env=one_core, check=True, capture_output=True, text=True)
            yield json.loads(done.stdout.splitlines()[-1])
        for suffix in (".bin", ".idx"):
            assert (folder / f"parts{suffix}").read_bytes() == (folder / f"builder{suffix}").read_bytes(), suffix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, help="that are written, of 16 tokens each")
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000, help="of text that is tokenized")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        row = CASES[options.case](options.folder, options.documents)
        print(json.dumps({"case": options.case, **row, "peak_mb": round(memory_mb())}))
        return
    for line in compare(options.documents, options.corpus_bytes):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
