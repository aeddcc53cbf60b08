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

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from megatron_ext.data.build.encode import Encoder, Job, PreprocessOptions
from megatron_ext.data.build.indexed import MASK, SOURCES, document_lengths, join_arrays, suffixes, write_dataset
from megatron_ext.data.build.lengths import length_statistics, length_table
from megatron_ext.data.build.parts import Report, read_report, usable, work_folder
from megatron_ext.data.build.shards import Shard, cut, default_shard_bytes, group
from megatron_ext.data.text.metadata import read_metadata
from megatron_ext.data.text.sources import FileRange, find_files
from megatron_ext.errors import UserError


def preprocess(options: PreprocessOptions) -> Report:
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
    encoder = Encoder(options)
    files = [FileRange.of(path) for path in find_files(options.inputs)]
    for file in files if options.messages_field is not None else []:
        if file.ending in (".txt", ".parquet"):
            raise UserError(f"input: {file.path} holds no lines of JSON, which messages_field needs; convert it")
    made_of = {
        **encoder.settings(),
        "max_document_bytes": options.max_document_bytes,
        "sources": [{"path": str(file.path), "bytes": file.size} for file in files],
    }
    if options.resume and (earlier := _complete(options.output_prefix, made_of)):
        return earlier  # a job restarted after completion must not repeat the work
    _refuse_existing(options)
    with work_folder(options.output_prefix, resume=options.resume, overwrite=options.overwrite) as folder:
        return _make(options, encoder, files, folder, made_of)


def _refuse_existing(options: PreprocessOptions) -> None:
    for suffix in () if options.overwrite else (".bin", ".idx", ".json", MASK, SOURCES):
        if (path := Path(options.output_prefix + suffix)).exists():
            raise UserError(f"output_prefix: {path} exists; pass --overwrite or another --output-prefix")


def _complete(prefix: str, made_of: dict[str, Any]) -> Report | None:
    """Return the report of an earlier run with the same inputs and settings; None if it did not finish."""
    if not all(Path(prefix + suffix).is_file() for suffix in suffixes(made_of)):
        return None
    metadata = read_metadata(prefix)
    if any(metadata.get(name) != value for name, value in made_of.items()):
        return None
    return Report(**{name: metadata[name] for name in Report().counts()})


def _make(
    options: PreprocessOptions, encoder: Encoder, files: list[FileRange], folder: Path, made_of: dict[str, Any]
) -> Report:
    """Cut, (group,) encode, join and publish; the options have been checked."""
    settings, hashable = encoder.settings(), replace(options, inputs=())

    def job(shard: Shard, content: str) -> Job:
        identity = json.dumps([settings, content, shard.identity])
        part = folder / hashlib.sha256(identity.encode()).hexdigest()[:32]
        return Job(part, hashable, shard, texts=content == "texts")

    shard_bytes = options.shard_bytes or default_shard_bytes(files)
    shards = cut(files, encoder.fields, shard_bytes)
    report, texts = Report(), list[Path]()
    if options.concat_by is not None:
        texts = _run([job(shard, "texts") for shard in shards], "group", options, report)
        shards = group(texts, shard_bytes)
    parts = _run([job(shard, "token ids") for shard in shards], "tokenize", options, report)

    for part in (*texts, *parts):
        report.add(read_report(part))
    if not report.tokens:
        raise UserError(
            f"input: nothing is left to write ({report.skipped} bad documents, {report.too_short} with too few "
            f"tokens, {report.too_long} with too many, {report.unanswered} without an assistant's turn); check "
            "--input, --min-tokens and --max-tokens"
        )
    arrays, source_names = join_arrays(parts)
    lengths = document_lengths(arrays["lengths"], arrays["counts"])
    metadata: dict[str, Any] = {
        "tokenizer": options.tokenizer,
        **made_of,
        **report.counts(),
        "lengths": length_table(lengths),
        "length_statistics": length_statistics(lengths),
        "document_sources": source_names,
    }
    write_dataset(options.output_prefix, folder, parts, arrays, metadata)
    return report


def _run(jobs: Sequence[Job], what: str, options: PreprocessOptions, report: Report) -> list[Path]:
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
