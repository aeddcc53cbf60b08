"""Documents to token ids: the work behind tools/preprocess_data.py.

    .jsonl, .txt --read_documents--> texts --workers--> token ids [+ EOD] --writer--> PREFIX.bin, .idx, .json

Workers import neither torch nor megatron: the writer of Megatron's format is handed in by the caller.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, NoReturn, Protocol, TypeAlias

import numpy as np
from tqdm import tqdm

from megatron_ext.data.documents import ReadProgress, find_files, read_documents
from megatron_ext.data.tokenizer import Tokenizer
from megatron_ext.errors import UserError

CHUNK_DOCUMENTS = 256
CHUNK_CHARACTERS = 1 << 20
CHUNKS_AHEAD = 4  # per worker: enough to keep it busy, few enough to keep memory small

Card: TypeAlias = "dict[str, object]"


@dataclass(frozen=True)
class WriteCounts:
    """What a writer has written."""

    documents: int
    tokens: int


class Writer(Protocol):
    """Writes PREFIX.bin, PREFIX.idx and the card PREFIX.json, complete or not at all."""

    def __call__(
        self,
        prefix: str,
        documents: Iterable[np.ndarray],
        vocab_size: int,
        *,
        card: Callable[[WriteCounts], Card],
    ) -> WriteCounts: ...


@dataclass(frozen=True)
class PreprocessOptions:
    """What to preprocess, and how; the flags of tools/preprocess_data.py."""

    inputs: Sequence[str]
    output_prefix: str
    tokenizer: str
    text_field: str = "text"
    workers: int = 1
    append_eod: bool = True
    eod_token: str | None = None
    skip_bad_lines: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class PreprocessReport:
    """What came out: counts, and the first of the bad documents that were skipped."""

    documents: int
    tokens: int
    skipped: int
    problems: list[str] = field(default_factory=list)


def preprocess(options: PreprocessOptions, write: Writer) -> PreprocessReport:
    """Tokenize every document of the inputs, in order, and write them as one data set.

    The output is the same, byte for byte, with any number of workers.

    Raises:
        UserError: an existing output (before any work), bad inputs or options, a bad document, no document.
    """
    if options.workers < 1:
        raise UserError(f"workers: got {options.workers}, needs at least 1")
    if not options.overwrite:
        _refuse_existing(options.output_prefix)
    tokenizer = Tokenizer(options.tokenizer, options.eod_token)
    eod_id = tokenizer.eod_id if options.append_eod else None
    encode = _Encoder(options.tokenizer, tokenizer.fingerprint, eod_id)
    files = find_files(options.inputs)
    progress = ReadProgress()
    on_bad: Literal["raise", "skip"] = "skip" if options.skip_bad_lines else "raise"

    def card(counts: WriteCounts) -> Card:
        return {
            "tokenizer": options.tokenizer,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": eod_id,
            "documents": counts.documents,
            "tokens": counts.tokens,
            "skipped": progress.skipped,
            "sources": [str(file) for file in files],
        }

    chunks = _chunks(document.text for document in read_documents(files, options.text_field, on_bad, progress))
    with _bar(files) as bar, closing(_encode_all(encode, chunks, options.workers)) as encoded:
        documents = _tell(bar, progress, encoded)
        counts = write(options.output_prefix, documents, tokenizer.vocab_size, card=card)
    return PreprocessReport(counts.documents, counts.tokens, progress.skipped, progress.problems)


def _refuse_existing(prefix: str) -> None:
    for suffix in (".bin", ".idx", ".json"):
        if Path(prefix + suffix).exists():
            raise UserError(f"output_prefix: {prefix}{suffix} exists; pass --overwrite or another --output-prefix")


@dataclass(frozen=True)
class _Encoder:
    """What a worker must know; its tokenizer is loaded once per process."""

    tokenizer: str
    fingerprint: str
    eod_id: int | None

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids int32 [tokens] of each text, the end token last."""
        tail = [] if self.eod_id is None else [self.eod_id]
        encode = _loaded(self.tokenizer, self.fingerprint).encode
        return [np.array(encode(text) + tail, dtype=np.int32) for text in texts]


@lru_cache(maxsize=1)
def _loaded(path: str, fingerprint: str) -> Tokenizer:
    """The tokenizer, once per process; the fingerprint tells a file from another that took its place."""
    tokenizer = Tokenizer(path)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"tokenizer: {path} has changed since the work began; start again")
    return tokenizer


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists, each large enough to be worth a trip to another process."""
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if len(chunk) >= CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _encode_all(encode: _Encoder, chunks: Iterable[list[str]], workers: int) -> Generator[np.ndarray, None, None]:
    """The token ids of every text of every chunk, in order."""
    if workers == 1:
        for chunk in chunks:
            yield from encode(chunk)
        return
    # Submitting by hand, and not Pool.imap, bounds how far reading runs ahead of writing; and where imap
    # would wait for ever for a worker that the system killed, an executor says so.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        waiting: deque[Future[list[np.ndarray]]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(encode, chunk))
            if len(waiting) >= workers * CHUNKS_AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(f"workers: one of {workers} was killed, perhaps for memory; pass fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _bar(files: list[Path]) -> tqdm[NoReturn]:
    size = sum(file.stat().st_size for file in files)
    return tqdm(total=size, unit="B", unit_scale=True, desc="preprocess", disable=None, leave=False)


def _tell(bar: tqdm[NoReturn], progress: ReadProgress, documents: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Pass documents on while the bar follows the bytes read."""
    for document in documents:
        bar.update(progress.bytes_read - bar.n)
        yield document
