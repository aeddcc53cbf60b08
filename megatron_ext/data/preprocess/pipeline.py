"""Convert documents to Megatron's indexed data set; the implementation of tools/preprocess_data.py.

    cut       options, files   --find_files, cut--> shards of files
              --concat-by: shards --make_part, in worker processes--> texts in PREFIX.parts --group--> shards of groups
    encode    shards           --make_part, in worker processes--> token ids in PREFIX.parts, each written atomically
    join      parts, in order  --write_dataset--> dataset.bin, .mask.npy, .sources.npy, .json, .idx in PREFIX.parts
    publish                    renamed to PREFIX.*, .idx last: the data set cannot be read without it

A part is named by a digest of its shard and the settings; `--resume` creates the same shards again and skips those
whose parts are finished. No process holds more than a batch of documents, and none imports torch or megatron.

docs/comparison.md compares the alternatives that were rejected: Megatron-LM's tools/preprocess_data.py, which cannot
resume, and preprocess_data_fast.py, which holds the corpus in memory; Megatron's IndexedDatasetBuilder, whose output is
byte-identical; and datatrove's MegatronDocumentTokenizer, which encodes a text that spells the end token as that token.
"""

import hashlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from megatron_ext.arrays import Int64
from megatron_ext.data.indexed import (
    MASK,
    SOURCES,
    WEIGHTS,
    document_lengths,
    join_arrays,
    read_metadata,
    suffixes,
    write_dataset,
)
from megatron_ext.data.preprocess.encode import Encoder, PreprocessOptions, Report, make_part, read_report, usable
from megatron_ext.data.preprocess.shards import Shard, cut, group
from megatron_ext.data.text.auto_tokenizer import warn_of_other_ids
from megatron_ext.data.text.documents import FileRange, find_files
from megatron_ext.errors import DISK_FULL, UserError
from megatron_ext.files.lock import LOCK_FILE, lock
from megatron_ext.files.reading import JsonObject

logger = logging.getLogger(__name__)
EDGES = np.concatenate([[0], 1 << np.arange(10, 20)])  # of the table of lengths: 0, 1K, 2K ... 512K tokens
LENGTHS = ["below 1K", *(f"{1 << k}K to {2 << k}K" for k in range(9)), "512K and more"]


def preprocess(options: PreprocessOptions) -> Report:
    """Tokenize every document of the inputs and write them as one data set.

    Documents keep the order of the inputs (with `concat_by`, the order of a hash of their keys). The output is
    byte-identical for any number of workers, and after any number of interruptions. A program that calls this function
    needs `if __name__ == "__main__":`, because its workers import it. After a UserError finished shards are kept.
    """
    options.check()
    prefix = options.output_prefix
    encoder = Encoder(options)
    files = [FileRange.of(path) for path in find_files(options.inputs)]
    if options.messages_field is not None:
        for file in files:
            if file.ending == ".txt":
                raise UserError(
                    f"input: {file.path} holds no messages; messages_field needs lines of JSON, or .parquet"
                )
    sources = [{"path": str(file.path), "bytes": file.size, "mtime_ns": file.mtime_ns} for file in files]
    inputs = {**encoder.settings(), "max_document_bytes": options.max_document_bytes, "sources": sources}
    _check_apart(prefix, files)
    state = "exists"
    if options.resume and all(Path(prefix + suffix).is_file() for suffix in suffixes(inputs)):
        earlier = read_metadata(prefix)
        changed = [name for name, value in inputs.items() if earlier.get(name) != value]
        if earlier.get("skipped") and not options.skip_bad_lines:
            changed.append("skip_bad_lines")
        if not changed:  # a job restarted after completion must not repeat the work
            return Report(**{name: earlier[name] for name in asdict(Report()) if name in earlier})
        state = f"is complete, and was made with other {', '.join(changed)}"
    # the files of a complete run are being renamed, .idx last
    publishing = options.resume and not Path(f"{prefix}.idx").exists() and (_parts(prefix) / LOCK_FILE).exists()
    if not (options.overwrite or publishing):
        for suffix in (".bin", ".idx", ".json", MASK, SOURCES):
            path = Path(prefix + suffix)
            if path.exists():
                raise UserError(f"output_prefix: {path} {state}; pass --overwrite or another --output-prefix")
    if Path(prefix + WEIGHTS).exists():
        raise UserError(
            f"output_prefix: {prefix + WEIGHTS} has weights of other tokens; remove it, or pass another one"
        )
    with work_folder(prefix, resume=options.resume, overwrite=options.overwrite) as folder:
        return _make(options, encoder, files, folder, inputs)


def _parts(prefix: str) -> Path:
    return Path(f"{prefix}.parts")


def _check_apart(prefix: str, files: Sequence[FileRange]) -> None:
    """Raise UserError if an input would be replaced by the output."""
    written = {Path(prefix + suffix).resolve() for suffix in (".bin", ".idx", ".json", MASK, SOURCES)}
    for file in files:
        if file.path.resolve() in written:
            raise UserError(f"output_prefix: got {prefix}, which would replace the input {file.path}; pass another one")


def _make(
    options: PreprocessOptions, encoder: Encoder, files: list[FileRange], folder: Path, inputs: JsonObject
) -> Report:
    """Cut, (group,) encode, join and publish; the options have been checked."""
    report = Report()
    settings = encoder.settings()
    turn_end = encoder.turn_end()
    if encoder.fields.chat is not None:
        warn_of_other_ids(encoder.tokenizer)

    def make_parts(shards: Sequence[Shard], what: str) -> list[Path]:
        """Make the parts of the shards that have no finished ones, and return all, in order."""
        parts: dict[Path, Shard] = {}
        missing: dict[Path, Shard] = {}
        for shard in shards:
            part = folder / hashlib.sha256(repr((settings, shard)).encode()).hexdigest()[:32]
            parts[part] = shard
            if not usable(part, options.max_document_bytes, options.skip_bad_lines):
                missing[part] = shard
        report.reused += len(parts) - len(missing)
        make_in_processes(missing, options, what)
        for part in parts:
            report.add(read_report(part)[0])
        return list(parts)

    size = sum(file.size for file in files)
    least = min(max(size // 16, 1 << 20), 4 << 20)
    shard_bytes = options.shard_bytes or min(max(size // 1024, least), 64 << 20)  # about a thousand shards, or fewer
    shards = cut(files, encoder.fields, shard_bytes)
    if options.concat_by is not None:
        shards = group(make_parts(shards, "group"), shard_bytes)
    parts = make_parts(shards, "tokenize")
    if not report.tokens:
        raise UserError(
            f"input: nothing is left to write ({report.skipped} bad documents, {report.empty} empty ones, "
            f"{report.too_short} with too few tokens, {report.too_long} with too many, {report.unanswered} without an "
            "assistant's turn); check --input, --min-tokens and --max-tokens"
        )
    if report.json_in_json:
        logger.warning(
            "messages_field: in %d conversations the arguments of a call are a string of JSON, which the chat template "
            "of %s writes as JSON once more; make them objects", report.json_in_json, options.tokenizer,
        )  # fmt: skip
    arrays, source_names = join_arrays(parts)
    metadata: JsonObject = {
        "tokenizer": options.tokenizer,
        **inputs,
        **{name: count for name, count in asdict(report).items() if name != "reused"},
        "lengths": length_table(document_lengths(arrays["lengths"], arrays["counts"])),
        "document_sources": source_names,
        "turn_end": turn_end,
        "encoder": encoder.tokenizer.encoder,
    }
    write_dataset(options.output_prefix, folder, parts, arrays, metadata)
    return report


@contextmanager
def work_folder(prefix: str, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Yield the folder PREFIX.parts, locked, and remove it at the end; after an exception finished parts are kept."""
    folder = _parts(prefix)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / LOCK_FILE).exists():
        raise UserError(f"{folder}: the folder is for unfinished work and has other files; change the prefix")
    try:
        with _locked(folder, resume=resume, overwrite=overwrite):
            yield folder
    finally:
        with suppress(OSError):  # parts are kept
            folder.rmdir()  # after the lock, because NFS keeps an open file that is removed


@contextmanager
def _locked(folder: Path, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Lock the folder of parts; remove its files, unless an exception leaves finished parts."""
    with lock(folder, "output_prefix"):
        if any(folder.glob("*.npz")) and not (resume or overwrite):
            raise UserError(
                f"{folder} holds an unfinished run; pass --resume to continue it, or --overwrite to start again"
            )
        for path in folder.iterdir():
            if path.name != LOCK_FILE and not resume:
                path.unlink()
        try:
            yield
        except BaseException as error:
            for path in folder.glob("dataset.*"):
                path.unlink()
            finished = len(list(folder.glob("*.npz")))
            if not finished:
                _empty(folder)
            if isinstance(error, OSError) and error.errno in DISK_FULL:  # a failed write does not name its file
                error.filename = error.filename or str(folder)
            elif isinstance(error, UserError) and finished:
                raise UserError(f"{error}; {finished} finished parts are kept, --resume continues from them") from None
            raise
        _empty(folder)


def _empty(folder: Path) -> None:
    """Remove the files of a folder, its lock last: without it a folder with files is not taken for one of parts."""
    for path in folder.iterdir():
        if path.name != LOCK_FILE:
            path.unlink()
    (folder / LOCK_FILE).unlink()


def length_table(lengths: Int64) -> list[JsonObject]:
    """Count documents and tokens by bins of length, as in ProLong's Table 14, with shares of all."""
    bins = np.searchsorted(EDGES, lengths, side="right") - 1
    document_counts = np.bincount(bins, minlength=len(EDGES)).tolist()
    token_counts = np.bincount(bins, weights=lengths, minlength=len(EDGES)).astype(np.int64).tolist()
    all_tokens = max(sum(token_counts), 1)
    return [
        {
            "length": name,
            "documents": documents,
            "share_of_documents": round(documents / max(len(lengths), 1), 6),
            "tokens": tokens,
            "share_of_tokens": round(tokens / all_tokens, 6),
        }
        for name, documents, tokens in zip(LENGTHS, document_counts, token_counts, strict=True)
    ]


def make_in_processes(shards: Mapping[Path, Shard], options: PreprocessOptions, what: str) -> None:
    """Make the part of each shard in a worker process, with a progress bar named `what`.

    After an error no further part begins, and running ones are completed. Ctrl-C ends the workers.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy locks held by tokenizers' threads
    pool = ProcessPoolExecutor(min(options.workers, len(shards)) or 1, spawn, _start_worker)
    hashable = replace(options, inputs=())
    total = sum(shard.size for shard in shards.values())
    bar: tqdm[NoReturn] = tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None, leave=False)
    try:
        # workers start with Ctrl-C blocked, so that it does not interrupt their imports
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # not pool.map, which cancels futures while the pool's thread may be failing them for a killed worker
            futures = [pool.submit(make_part, part, hashable, shard) for part, shard in shards.items()]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        with bar:
            for shard, future in zip(shards.values(), futures, strict=True):
                future.result()
                bar.update(shard.size)
    except (BrokenProcessPool, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of a file; the pool's own has none, if it broke while starting
            raise
        for worker in multiprocessing.active_children():  # the pool would wait for one that started in the meantime
            worker.terminate()
        raise UserError(
            f"workers: one of {options.workers} was killed, perhaps for memory; pass fewer --workers or a smaller "
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
