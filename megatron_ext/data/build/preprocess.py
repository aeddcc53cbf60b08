"""Convert documents to Megatron's indexed data set; the implementation of tools/preprocess_data.py.

    cut       options, files   --find_files, cut--> shards
              --concat-by: shards --Job(texts=True), in worker processes--> texts on disk --group--> shards of groups
    encode    shards           --Job, in worker processes--> parts in PREFIX.parts, each written atomically
    join      parts, in order  --write_dataset--> dataset.bin, .mask.npy, .sources.npy, .json, .idx in PREFIX.parts
    publish                    renamed to PREFIX.*, .idx last: the data set cannot be read without it

`--resume` creates the same shards again and skips those whose parts are finished. No process holds more than a batch of
documents, and none imports torch or megatron.

Alternatives that were rejected:

- Megatron-LM's tools/preprocess_data.py: 4 to 6 times the CPU time, with 8 times the memory, and it cannot resume
  (benchmarks/results/2026-11-24-preprocess-cpu.txt).
- Megatron's IndexedDatasetBuilder for joining: 11.6 s and 516 MB for a million documents of 16 tokens, compared with
  1.2 s and 41 MB here. The output is byte-identical.
- datatrove's MegatronDocumentTokenizer: 0.47 million tokens per second and core, compared with 0.78 here; a text that
  spells the end token is encoded as that token (benchmarks/results/2026-11-22-libraries-cpu.txt).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from megatron_ext.data.build.encode import Job
from megatron_ext.data.build.indexed import document_lengths, joined, source_numbers, write_dataset
from megatron_ext.data.build.lengths import Statistics, Table, length_statistics, length_table
from megatron_ext.data.build.parts import (
    MASK,
    SOURCES,
    Counts,
    Record,
    Settings,
    finished_parts,
    usable,
    work_folder,
)
from megatron_ext.data.build.shards import cut, default_shard_bytes, group
from megatron_ext.data.text.chat import ChatTemplate
from megatron_ext.data.text.documents import MAX_DOCUMENT_BYTES, Fields
from megatron_ext.data.text.metadata import read_metadata
from megatron_ext.data.text.sentences import check_splitter
from megatron_ext.data.text.sources import Source, find_files
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError


@dataclass(frozen=True)
class PreprocessOptions:
    """The flags of tools/preprocess_data.py, whose --help describes them.

    Attributes:
        append_eod: append an EOD to each document (None: for texts, not for conversations).
        shard_bytes: input per shard, the unit of work and of resuming (None: depends on the size of the inputs).
    """

    inputs: Sequence[str]
    output_prefix: str
    tokenizer: str
    text_field: str = "text"
    workers: int = 1
    messages_field: str | None = None
    append_eod: bool | None = None
    eod_token: str | None = None
    prepend_bos: bool = False
    bos_token: str | None = None
    source_field: str | None = None
    skip_bad_lines: bool = False
    overwrite: bool = False
    concat_by: str | None = None
    split_sentences: bool = False
    language: str = "english"
    min_tokens: int = 1
    max_tokens: int | None = None
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    shard_bytes: int | None = None
    resume: bool = False

    def check(self) -> None:
        """Raise UserError if a number is out of range or options exclude each other."""
        for name in ("workers", "min_tokens", "max_tokens", "max_document_bytes", "shard_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: got {value}, needs at least 1")
        if self.messages_field is not None:
            for name in ("concat_by", "source_field", "split_sentences"):
                if getattr(self, name):
                    raise UserError(
                        f"{name}: is for texts, not for the conversations of messages_field; use one of them"
                    )
        if self.bos_token is not None and not self.prepend_bos:
            raise UserError(f"bos_token: got {self.bos_token!r} without prepend_bos, which uses it; add --prepend-bos")
        if self.split_sentences:
            check_splitter(self.language)


@dataclass
class PreprocessReport(Counts):
    """The result of preprocessing.

    Attributes:
        lengths, length_statistics: document lengths, see `lengths`.
        reused: number of shards that an interrupted run had finished.
    """

    lengths: Table = field(default_factory=list)
    length_statistics: Statistics | None = None
    reused: int = 0


def preprocess(options: PreprocessOptions) -> PreprocessReport:
    """Tokenize every document of the inputs and write them as one data set.

    Documents keep the order of the inputs (with `concat_by`, the order of a hash of their keys). The output is
    byte-identical for any number of workers, and after any number of interruptions. A program that calls this function
    needs `if __name__ == "__main__":`, because its workers import it.

    Raises:
        UserError: an existing output (before any work), bad inputs or options, a bad document, or no token. Finished
            shards are then kept for `resume`.
    """
    options.check()
    if not options.resume:
        _refuse_existing(options)
    tokenizer = Tokenizer(options.tokenizer, options.eod_token, options.bos_token)
    chat = None if options.messages_field is None else ChatTemplate.of(options.tokenizer)
    settings = _settings(options, tokenizer, chat)
    sources = [Source.of(path) for path in find_files(options.inputs)]
    for source in sources if chat is not None else []:
        if source.ending in (".txt", ".parquet"):
            raise UserError(f"input: {source.path} holds no lines of JSON, which messages_field needs; convert it")
    made_of = {
        **asdict(settings),
        "max_document_bytes": options.max_document_bytes,
        "sources": [{"path": str(source.path), "bytes": source.size} for source in sources],
    }
    if options.resume and (earlier := _complete(options.output_prefix, settings, made_of)):
        return earlier  # a job restarted after completion must not repeat the work
    _refuse_existing(options)
    with work_folder(options.output_prefix, resume=options.resume, overwrite=options.overwrite) as folder:
        try:
            return _make(options, settings, sources, chat, folder, made_of)
        except UserError as error:
            if finished := finished_parts(folder):
                raise UserError(f"{error}; {finished} finished parts are kept, --resume continues from them") from None
            raise


def _refuse_existing(options: PreprocessOptions) -> None:
    for suffix in () if options.overwrite else (".bin", ".idx", ".json", MASK, SOURCES):
        if (path := Path(options.output_prefix + suffix)).exists():
            raise UserError(f"output_prefix: {path} exists; pass --overwrite or another --output-prefix")


def _complete(prefix: str, settings: Settings, made_of: dict[str, Any]) -> PreprocessReport | None:
    """Return the report of an earlier run with the same inputs and settings; None if it did not finish."""
    if not all(Path(prefix + suffix).is_file() for suffix in settings.suffixes):
        return None
    metadata = read_metadata(prefix)
    if any(metadata.get(name) != value for name, value in made_of.items()):
        return None
    return PreprocessReport(**{name: metadata[name] for name in (*Counts().counts(), "lengths", "length_statistics")})


def _settings(options: PreprocessOptions, tokenizer: Tokenizer, chat: ChatTemplate | None) -> Settings:
    append_eod = chat is None if options.append_eod is None else options.append_eod
    return Settings(
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id if append_eod else None,
        text_field=options.messages_field or options.text_field,
        concat_by=options.concat_by,
        sentences=options.language if options.split_sentences else None,
        min_tokens=options.min_tokens,
        max_tokens=options.max_tokens,
        chat_template=None if chat is None else chat.fingerprint,
        bos_id=tokenizer.bos_id if options.prepend_bos else None,
        source_field=options.source_field,
    )


def _make(
    options: PreprocessOptions,
    settings: Settings,
    sources: list[Source],
    chat: ChatTemplate | None,
    folder: Path,
    made_of: dict[str, Any],
) -> PreprocessReport:
    """Cut, (group,) encode, join and publish; the options have been checked."""
    fields = Fields(settings.text_field, options.concat_by, options.max_document_bytes, chat, options.source_field)
    job = partial(Job, folder, settings, options.tokenizer, fields, options.skip_bad_lines)
    shard_bytes = options.shard_bytes or default_shard_bytes(sources)
    shards = cut(sources, fields, shard_bytes)
    report, texts = PreprocessReport(), list[Path]()
    if options.concat_by is not None:
        texts = _run([job(shard, texts=True) for shard in shards], "group", options, report)
        shards = group(texts, shard_bytes)
    parts = _run([job(shard) for shard in shards], "tokenize", options, report)

    for part in (*texts, *parts):
        report.add(Record.read(part))
    if not report.tokens:
        raise UserError(
            f"input: nothing is left to write ({report.skipped} bad documents, {report.too_short} with too few "
            f"tokens, {report.too_long} with too many, {report.unanswered} without an assistant's turn); check "
            "--input, --min-tokens and --max-tokens"
        )
    lengths = document_lengths(joined(parts, "lengths"), joined(parts, "counts"))
    report.lengths, report.length_statistics = length_table(lengths), length_statistics(lengths)
    metadata: dict[str, Any] = {
        "tokenizer": options.tokenizer,
        **made_of,
        **report.counts(),
        "lengths": report.lengths,
        "length_statistics": report.length_statistics,
        "document_sources": source_numbers(parts)[0] if SOURCES in settings.suffixes else [],
    }
    write_dataset(options.output_prefix, folder, parts, settings, metadata)
    return report


def _run(jobs: Sequence[Job], what: str, options: PreprocessOptions, report: PreprocessReport) -> list[Path]:
    """Run the jobs without finished parts and return all parts, in order; count those that were finished before."""
    missing = [job for job in jobs if not usable(job.part, options.max_document_bytes, options.skip_bad_lines)]
    report.reused += len(jobs) - len(missing)
    total = sum(job.shard.size for job in missing)
    bar: tqdm[NoReturn] = tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None, leave=False)
    with bar:
        for job in in_processes(missing, options.workers):
            bar.update(job.shard.size)
    return [job.part for job in jobs]


def in_processes(jobs: Sequence[Job], workers: int) -> Iterator[Job]:
    """Run each job in a worker process and yield it when it is done, in order.

    After an error no further job begins, and running ones are completed. Ctrl-C ends the workers.

    Raises:
        UserError: a worker was killed.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy locks held by tokenizers' threads
    pool = ProcessPoolExecutor(min(workers, len(jobs)) or 1, spawn, _start_worker)
    # workers start with Ctrl-C blocked, so that it does not interrupt their imports
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # not pool.map, which cancels futures while the pool's thread may be failing them for a killed worker
        futures = [pool.submit(job) for job in jobs]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    try:
        for job, future in zip(jobs, futures, strict=True):
            future.result()
            yield job
    except BrokenProcessPool:
        raise UserError(
            f"workers: one of {workers} was killed, perhaps for memory; pass fewer --workers or a smaller "
            "--max-document-bytes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Set up a worker process: single-threaded, ended at once by Ctrl-C or with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
