"""Documents to Megatron's indexed dataset: the work behind tools/preprocess_data.py.

    files --cut--> shards --EncodeJob, in worker processes--> parts --write_dataset--> PREFIX.bin, .idx, .json
    with --concat-by: shards --SpillJob--> texts on disk --group--> shards of whole groups, and on as above

Parts lie in PREFIX.parts until the dataset is complete, so an interrupted run can be resumed. No process holds
more than a batch of documents, and none imports torch or megatron.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from tqdm import tqdm

from megatron_ext.data.build.encode import EncodeJob, Task
from megatron_ext.data.build.groups import SpillJob, group
from megatron_ext.data.build.indexed import MASK, Totals, is_whole, write_dataset
from megatron_ext.data.build.lengths import LengthTable
from megatron_ext.data.build.parts import Part, Record, Settings, WorkFolder, same_when_bad
from megatron_ext.data.build.pool import run_jobs
from megatron_ext.data.build.shards import Cutter, Shard, default_shard_bytes
from megatron_ext.data.text.card import Card, read_card
from megatron_ext.data.text.chat import ChatTemplate
from megatron_ext.data.text.documents import MAX_DOCUMENT_BYTES, PROBLEMS_KEPT, Fields
from megatron_ext.data.text.sentences import check_splitter
from megatron_ext.data.text.sources import Source, find_files
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError

COUNTED = ("documents", "tokens", "skipped", "problems", "too_short", "too_long", "unanswered", "trained")
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

__all__ = ["Card", "PreprocessOptions", "PreprocessReport", "preprocess"]


@dataclass(frozen=True)
class PreprocessOptions:
    """What to preprocess, and how; the flags of tools/preprocess_data.py.

    Attributes:
        messages_field: the field of lists of messages, instead of `text_field`: conversations, see `data.chat`.
        append_eod: end documents by an EOD (default: texts, not conversations).
        concat_by: the field whose value is the same in documents that are to be one.
        split_sentences: make each sentence a sequence of its document.
        language: of the sentences.
        min_tokens, max_tokens: leave out documents with fewer or more, the end token counted.
        max_document_bytes: the longest document that is taken, see `Fields.limit`.
        shard_bytes: input per shard, the unit of work and of resuming (None: by the size of the inputs).
        resume: go on with what an interrupted run has finished.
    """

    inputs: Sequence[str]
    output_prefix: str
    tokenizer: str
    text_field: str = "text"
    workers: int = 1
    messages_field: str | None = None
    append_eod: bool | None = None
    eod_token: str | None = None
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
        """
        Raises:
            UserError: a number out of range, or options that exclude one another.
        """
        for name in ("workers", "min_tokens", "max_tokens", "max_document_bytes", "shard_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: got {value}, needs at least 1")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise UserError(f"max_tokens: got {self.max_tokens}, needs at least min_tokens, {self.min_tokens}")
        if self.resume and "-" in self.inputs:
            raise UserError("resume: standard input cannot be read again; put it into a file, or leave --resume out")
        if self.messages_field is not None:
            for name in ("concat_by", "split_sentences"):
                if getattr(self, name):
                    raise UserError(
                        f"{name}: is for texts, not for the conversations of messages_field; use one of them"
                    )
        if self.split_sentences:
            check_splitter(self.language)


@dataclass(frozen=True)
class PreprocessReport:
    """What came out.

    Attributes:
        skipped, problems: bad documents left out, and the first of them.
        too_short, too_long: documents left out by `min_tokens` and `max_tokens`.
        unanswered: conversations left out because the assistant says nothing.
        trained: tokens of the assistants.
        lengths: documents and tokens by length.
        reused: shards that an interrupted run had finished.
        complete: the very dataset was there already, and no work was done.
    """

    documents: int
    tokens: int
    skipped: int
    problems: list[str] = field(default_factory=list)
    too_short: int = 0
    too_long: int = 0
    unanswered: int = 0
    trained: int = 0
    lengths: LengthTable = field(default_factory=LengthTable)
    reused: int = 0
    complete: bool = False


def preprocess(options: PreprocessOptions) -> PreprocessReport:
    """Tokenize every document of the inputs and write them as one dataset.

    Documents keep the order of the inputs (with `concat_by`: that of a hash of their keys). The output is the
    same, byte for byte, with any number of workers and however often the work was interrupted and resumed. A
    program that calls this needs `if __name__ == "__main__":`, for its workers import it.

    Raises:
        UserError: an existing output (before any work), bad inputs or options, a bad document, no token, a
            full disk. Finished shards are kept then, for `resume`.
    """
    options.check()
    if not (options.overwrite or options.resume):
        _refuse_existing(options.output_prefix)
    tokenizer = Tokenizer(options.tokenizer, options.eod_token)
    chat = None if options.messages_field is None else ChatTemplate.of(options.tokenizer)
    settings = _settings(options, tokenizer, chat)
    sources = [Source.of(path) for path in find_files(options.inputs)]
    if chat is not None:
        _refuse_texts(sources)
    earlier = _complete(options, settings, sources) if options.resume else None
    if earlier is None and not options.overwrite:
        _refuse_existing(options.output_prefix)
    folder = WorkFolder(options.output_prefix, settings, resume=options.resume, overwrite=options.overwrite)
    keep = False
    try:
        return earlier or _Run(options, settings, sources, folder.path, chat).run()
    except BaseException as error:
        keep = folder.finished > 0 and "-" not in options.inputs
        raise _with_hint(error, folder, keep) from None
    finally:
        folder.close(remove=not keep)


def _refuse_texts(sources: Sequence[Source]) -> None:
    for source in sources:
        if source.ending in (".txt", ".parquet"):
            raise UserError(f"input: {source.name} holds no lines of JSON, which messages_field needs; convert it")


def _refuse_existing(prefix: str) -> None:
    for suffix in (".bin", ".idx", ".json", MASK):
        if Path(prefix + suffix).exists():
            raise UserError(f"output_prefix: {prefix}{suffix} exists; pass --overwrite or another --output-prefix")


def _with_hint(error: BaseException, folder: WorkFolder, keep: bool) -> BaseException:
    """The error, in words where it is a full disk, with what to do about parts that are kept."""
    if isinstance(error, OSError) and error.errno in FULL:
        error = UserError(f"{folder.path}: {error.strerror}; make room and start again")
    if isinstance(error, UserError) and keep:
        return UserError(f"{error}; {folder.finished} finished parts are kept, --resume goes on with them")
    return error


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
    )


def _complete(options: PreprocessOptions, settings: Settings, sources: list[Source]) -> PreprocessReport | None:
    """What an earlier run made of these very inputs and settings, if it came to its end."""
    card = read_card(options.output_prefix) if Path(f"{options.output_prefix}.idx").exists() else None
    if not card or {**card, **asdict(settings)} != card:
        return None
    made_with = card.get("max_document_bytes", 0)  # cards of before have none
    if not same_when_bad(card["skipped"], made_with, options.max_document_bytes, options.skip_bad_lines):
        return None
    totals = Totals(card["documents"], card["sequences"], card["tokens"])
    if not is_whole(options.output_prefix, settings.dtype, totals, settings.chat_template is not None):
        return None
    if card["sources"] != [_about(source, source.checksum()) for source in sources]:
        return None
    return PreprocessReport(
        **{name: card[name] for name in COUNTED}, lengths=LengthTable.of_card(card["lengths"]), complete=True
    )


def _about(source: Source, checksum: str) -> Card:
    return {"path": source.name, "bytes": source.size, "sha256": checksum}


J = TypeVar("J", EncodeJob, SpillJob)


class _Run:
    """The work, once all options are known to be good."""

    def __init__(
        self,
        options: PreprocessOptions,
        settings: Settings,
        sources: list[Source],
        folder: Path,
        chat: ChatTemplate | None,
    ) -> None:
        self._options = options
        self._settings = settings
        self._sources = sources
        self._fields = Fields(settings.text_field, options.concat_by, options.max_document_bytes, chat)
        self._task = Task(folder, settings, options.tokenizer, self._fields, options.skip_bad_lines)
        self._shard_bytes = options.shard_bytes or default_shard_bytes(sources)
        self._cutter = Cutter(self._fields, self._shard_bytes, folder)
        self._reused = 0

    def run(self) -> PreprocessReport:
        options, task = self._options, self._task
        shards: Iterable[Shard] = self._cutter.cut(self._sources)
        spills: list[Part] = []
        if options.concat_by is not None:
            spills = self._do((SpillJob(task, shard) for shard in shards), "group")
            shards = group(spills, task.folder, options.concat_by, self._shard_bytes)
        parts = self._do((EncodeJob(task, shard) for shard in shards), "tokenize")
        left_out = _sum_up([*spills, *parts])
        totals = Totals.of(parts)
        if not totals.tokens:
            raise UserError(
                f"input: nothing is left to write ({left_out.skipped} bad documents, {left_out.too_short} with too few "
                f"tokens, {left_out.too_long} with too many, {left_out.unanswered} without an assistant's turn); check "
                "--input, --min-tokens and --max-tokens"
            )
        card, masked = self._card(totals, left_out), self._settings.chat_template is not None
        write_dataset(options.output_prefix, task.folder, parts, self._settings.dtype, totals, card, masked)
        return PreprocessReport(
            totals.documents,
            totals.tokens,
            left_out.skipped,
            left_out.problems,
            left_out.too_short,
            left_out.too_long,
            left_out.unanswered,
            totals.trained,
            totals.lengths,
            self._reused,
        )

    def _do(self, jobs: Iterator[J], what: str) -> list[Part]:
        """Do the jobs that no earlier run has done; the parts of all, in order."""
        options = self._options
        parts: list[Part] = []

        def missing() -> Iterator[J]:
            for job in jobs:
                parts.append(job.part)
                if job.part.usable(options.max_document_bytes, options.skip_bad_lines):
                    self._reused += 1
                    job.shard.clear()
                else:
                    yield job

        size = None if "-" in options.inputs else sum(source.size for source in self._sources)
        bar: tqdm[NoReturn] = tqdm(total=size, unit="B", unit_scale=True, desc=what, disable=None, leave=False)
        with bar, closing(run_jobs(missing(), options.workers)) as done:
            for job in done:
                job.shard.clear()
                bar.update(job.shard.size)
        return parts

    def _card(self, totals: Totals, left_out: Record) -> Card:
        return {
            "tokenizer": self._options.tokenizer,
            **asdict(self._settings),
            "max_document_bytes": self._options.max_document_bytes,
            "documents": totals.documents,
            "sequences": totals.sequences,
            "tokens": totals.tokens,
            "skipped": left_out.skipped,
            "problems": left_out.problems,
            "too_short": left_out.too_short,
            "too_long": left_out.too_long,
            "unanswered": left_out.unanswered,
            "trained": totals.trained,
            "lengths": totals.lengths.card(),
            "sources": [self._checked(source, left_out) for source in self._sources],
        }

    def _checked(self, source: Source, record: Record) -> Card:
        if source.is_stdin:
            assert self._cutter.stdin_checksum is not None
            checksum, size = self._cutter.stdin_checksum
            return {"path": source.name, "bytes": size, "sha256": checksum}
        return _about(source, record.checksums[source.name])


def _sum_up(parts: Iterable[Part]) -> Record:
    """What was left out of all parts, and the checksums of what went into them."""
    whole = Record()
    for part in parts:
        record = part.record()
        whole.skipped += record.skipped
        whole.too_short += record.too_short
        whole.too_long += record.too_long
        whole.unanswered += record.unanswered
        whole.problems = [*whole.problems, *record.problems][:PROBLEMS_KEPT]
        whole.checksums |= record.checksums
    return whole
