"""Create the part of a shard in a worker process.

Shard --read--> texts --Tokenizer--> [BOS +] ids [+ EOD] --> a part

In the code a part is the path of its files, without a suffix: .bin has its content (token ids, or texts to be grouped),
.npz the index of the content and its report; it is written last.
"""

import json
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.indexed import dtype_of
from megatron_ext.data.preprocess.shards import FileShard, Shard, write_texts
from megatron_ext.data.text.chat import ChatError, ChatTemplate, Spans
from megatron_ext.data.text.documents import BLOCK, MAX_DOCUMENT_BYTES, Document, Fields, Refuse, stop
from megatron_ext.data.text.fast import PACKAGE
from megatron_ext.data.text.tokenizer import RefusedTextError, Tokenizer
from megatron_ext.errors import UserError, optional_module
from megatron_ext.files.atomic import atomic_write
from megatron_ext.files.reading import JsonObject

logger = logging.getLogger(__name__)
Ids = NDArray[np.uint32]
PROBLEMS_KEPT = 10
COMPARED = 512  # characters of a document that both encoders encode
COMPARED_DOCUMENTS = {8**k for k in range(12)}  # of each part, from 1


@dataclass
class Report:
    """Counts of what was written and omitted, for one part or for all."""

    documents: int = 0
    sequences: int = 0  # sequences of the format: sentences, or whole documents
    tokens: int = 0
    empty: int = 0  # documents omitted because they have no token, or no message
    skipped: int = 0  # bad documents omitted
    problems: list[str] = field(default_factory=list)  # descriptions of the first bad documents
    too_short: int = 0  # documents omitted because of `min_tokens`
    too_long: int = 0  # documents omitted because of `max_tokens`
    unanswered: int = 0  # conversations omitted because they have no assistant's token
    trained: int = 0  # number of the assistant's tokens
    json_in_json: int = 0  # conversations with a call's arguments as the JSON of a string of JSON
    reused: int = 0  # number of parts that an interrupted run had finished

    def add(self, other: "Report") -> None:
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)
        del self.problems[PROBLEMS_KEPT:]

    def skip(self, problem: str) -> None:
        self.add(Report(skipped=1, problems=[problem]))


def finish_part(part: Path, arrays: Mapping[str, np.ndarray], report: Report, limit: int) -> None:
    """Write the index and the report of a part; `limit` is the maximum length of a document, in bytes."""
    about = json.dumps({"limit": limit, "report": asdict(report)})
    with atomic_write(part.with_suffix(".npz")) as partial, partial.open("wb") as file:
        np.savez(file, about=np.array(about), **arrays)  # type: ignore[arg-type]


def read_report(part: Path) -> tuple[Report, int]:
    """Read the report of a finished part, and its limit."""
    with np.load(part.with_suffix(".npz")) as arrays:
        about = json.loads(arrays["about"].item())
    return Report(**about["report"]), about["limit"]


def usable(part: Path, limit: int, skip: bool) -> bool:
    """Return whether the part is finished and would be the same with these options for bad documents."""
    if not part.with_suffix(".npz").is_file():
        return False
    report, limit_of_part = read_report(part)
    if report.skipped:  # a document that was omitted as too long may be accepted with another limit
        return skip and limit == limit_of_part
    return limit >= limit_of_part


@dataclass(frozen=True)
class PreprocessOptions:
    """The flags of tools/preprocess_data.py, whose --help describes them.

    `append_eod` None: for texts, not for conversations; `shard_bytes` None: it depends on the size of the inputs.
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
    encoder: str = "auto"

    @property
    def fields(self) -> Fields:
        """The fields of a document; the chat template is added by `Encoder`."""
        text = self.messages_field or self.text_field
        return Fields(text, self.concat_by, self.max_document_bytes, source=self.source_field)

    def check(self) -> None:
        """Raise UserError if options exclude each other."""
        if self.messages_field is not None:
            for name in ("concat_by", "source_field", "split_sentences"):
                if getattr(self, name):
                    raise UserError(
                        f"{name}: is for texts, not for the conversations of messages_field; use one of them"
                    )
            if self.encoder == PACKAGE:
                raise UserError(f"encoder: {PACKAGE} is for texts, not for conversations; pass --encoder auto")
        if self.bos_token is not None and not self.prepend_bos:
            raise UserError(f"bos_token: got {self.bos_token!r} without prepend_bos, which uses it; add --prepend-bos")
        if self.split_sentences:
            _sentence_splitter(self.language)


class Encoder:
    """Converts documents to token ids, according to the options."""

    def __init__(self, options: PreprocessOptions) -> None:
        self.options = options
        self.fields = options.fields
        encoder = options.encoder
        append_eod = options.append_eod
        if options.messages_field is None:
            append_eod = append_eod is not False
        else:
            encoder = "tokenizers"  # which gives the offsets
            chat = ChatTemplate.of(options.tokenizer, eod_token=options.eod_token, bos_token=options.bos_token)
            self.fields = replace(self.fields, chat=chat)
        self.tokenizer = Tokenizer(options.tokenizer, options.eod_token, options.bos_token, encoder)
        self.eod_id = self.tokenizer.eod_id if append_eod else None
        self.bos_id = self.tokenizer.bos_id if options.prepend_bos else None
        self.dtype = dtype_of(self.tokenizer.vocab_size)

    def turn_end(self) -> int | None:
        """Return the special token that ends the assistant's turns, if these are chats; warn if there is none."""
        if self.fields.chat is None:
            return None
        with suppress(ChatError):  # the template needs more than a question and an answer
            end = self.fields.chat.turn_end
            if end:
                return self.tokenizer.encode_spelled(end)[0][-1]
        logger.warning(
            "messages_field: the chat template of %s trains no special token at the end of the assistant's turns, so a "
            "model does not learn to end them; add one, inside {%% generation %%} if used", self.options.tokenizer,
        )  # fmt: skip
        return None

    def settings(self) -> JsonObject:
        """Return all that determines the content of a data set, apart from its inputs and the limit of a document."""
        options = self.options
        chat = self.fields.chat
        return {
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "eod_id": self.eod_id,
            "text_field": self.fields.text,
            "concat_by": options.concat_by,
            "sentences": options.language if options.split_sentences else None,
            "min_tokens": options.min_tokens,
            "max_tokens": options.max_tokens,
            "chat_template": None if chat is None else chat.fingerprint,
            "bos_id": self.bos_id,
            "source_field": options.source_field,
        }

    def write_tokens(
        self, documents: Iterator[Document], file: BinaryIO, report: Report, refuse: Refuse = stop
    ) -> dict[str, np.ndarray]:
        """Write the token ids of documents, count what is written and omitted, and return the part's other arrays.

        `refuse` is called with a line of text for each document that the tokenizer refuses.
        """
        # 4 bytes per number; a list needs 36
        lengths = array("i")
        counts = array("i")
        sources = array("i")
        source_names: dict[str, int] = {}  # numbered in order of appearance
        masks = [np.zeros(0, np.uint8)]
        for number, document in enumerate(documents, start=1):
            if self.tokenizer.fast is not None and number in COMPARED_DOCUMENTS:
                self._compare(document, number)
            report.json_in_json += document.json_in_json
            try:
                sequences, mask = self._encode(document)
            except RefusedTextError as error:
                refuse(f"{document.source}: {error}")
                continue
            if not self._accept(sequences, mask, report):
                continue
            ids = np.concatenate(sequences)
            assert ids.max() < self.tokenizer.vocab_size
            file.write(ids.astype(self.dtype).data)
            report.tokens += len(ids)
            lengths.extend(map(len, sequences))
            counts.append(len(sequences))
            if document.source_name is not None:
                sources.append(source_names.setdefault(document.source_name, len(source_names)))
            if mask is not None:
                report.trained += int(mask.sum())
                masks.append(mask)
        report.documents = len(counts)
        report.sequences = len(lengths)
        return {
            "lengths": np.array(lengths, np.int32),
            "counts": np.array(counts, np.int32),
            "sources": np.array(sources, np.int32),
            "mask": np.concatenate(masks),
            "source_names": np.array(list(source_names), np.str_),
        }

    def _accept(self, sequences: list[Ids], mask: np.ndarray | None, report: Report) -> bool:
        """Return whether a document is written; if not, count why."""
        length = sum(map(len, sequences))
        most = self.options.max_tokens
        if not length:
            report.empty += 1
        elif mask is not None and not mask.any():
            report.unanswered += 1
        elif length < self.options.min_tokens:
            report.too_short += 1
        elif most is not None and length > most:
            report.too_long += 1
        else:
            return True
        return False

    def _compare(self, document: Document, number: int) -> None:
        """Raise UserError if gigatoken and tokenizers give other ids for a part of a document."""
        start = number * 7919 % max(len(document.text) - COMPARED, 1)
        difference = self.tokenizer.compare(document.text[start : start + COMPARED])
        if difference is not None:
            raise UserError(f"encoder: {difference}, in {document.source}; pass --encoder tokenizers")

    def _encode(self, document: Document) -> tuple[list[Ids], np.ndarray | None]:
        """Encode a document, and add BOS and EOD to it, unless it is empty.

        Returns the ids of each sequence and, for a conversation, uint8 [tokens], 1 for the assistant's tokens.
        """
        mask = None
        if self.fields.chat is not None:
            ids, offsets = self.tokenizer.encode_spelled(document.text)
            mask = assistant_mask(np.array(offsets, np.int64).reshape(-1, 2), document.spans)
            sequences = [np.array(ids, np.uint32)]
        elif self.options.split_sentences:
            sequences = [*map(self.tokenizer.encode_array, split_sentences(document.text, self.options.language))]
        else:
            sequences = [self.tokenizer.encode_array(document.text)]
        sequences = [ids for ids in sequences if len(ids)]
        if not sequences:
            return [], mask
        if self.bos_id not in (None, sequences[0][0]):  # a template may add it
            sequences[0] = np.append(np.uint32(self.bos_id), sequences[0])
            mask = None if mask is None else np.append(np.uint8(0), mask)
        if self.eod_id is not None:
            sequences[-1] = np.append(sequences[-1], np.uint32(self.eod_id))
            mask = None if mask is None else np.append(mask, np.uint8(0))
        return sequences, mask


def _stop_or_skip(problem: str) -> None:
    raise UserError(f"{problem}; correct it, or pass --skip-bad-lines")


encoder = lru_cache(maxsize=1)(Encoder)  # once per process


def make_part(part: Path, options: PreprocessOptions, shard: Shard) -> None:
    """Create the part of a shard: token ids, or with `concat_by` the texts of files, to be grouped.

    `part` is a path without a suffix; `options` are hashable, without the inputs.
    """
    report = Report()
    refuse = report.skip if options.skip_bad_lines else _stop_or_skip
    with atomic_write(part.with_suffix(".bin")) as partial, partial.open("wb", BLOCK) as file:
        if options.concat_by is not None and isinstance(shard, FileShard):
            arrays, report.empty = write_texts(shard.read(options.fields, refuse), file)
        else:
            worker_encoder = encoder(options)
            arrays = worker_encoder.write_tokens(shard.read(worker_encoder.fields, refuse), file, report, refuse)
    finish_part(part, arrays, report, options.max_document_bytes)


def assistant_mask(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Return a mask, uint8 [n], that is 1 from the first to the last token that overlaps each span.

    `offsets` are the characters [start, end) of each token, int64 [n, 2]; so are the spans.
    """
    mask = np.zeros(len(offsets), np.uint8)
    starts, ends = offsets.T
    for start, end in spans:
        touched = np.flatnonzero((starts < end) & (ends > start))
        if touched.size:
            mask[touched[0] : touched[-1] + 1] = 1
    return mask


def split_sentences(text: str, language: str) -> list[str]:
    """Split a text into sentences whose concatenation is the text; a space between two belongs to the second."""
    ends = [end for _, end in _sentence_splitter(language).span_tokenize(text)][:-1]
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@lru_cache(maxsize=1)
def _sentence_splitter(language: str) -> Any:
    punkt = optional_module("split_sentences", "nltk.tokenize.punkt")
    try:
        return punkt.PunktTokenizer(language)
    except (LookupError, ValueError):
        raise UserError(
            f"split_sentences: nltk's punkt_tab data for {language!r} is not on this machine; "
            "run: python -m nltk.downloader punkt_tab (NLTK_DATA may name the folder that holds it)"
        ) from None
