"""One shard's documents to token ids: the work of a worker process.

Shard --keep_good--> texts --Tokenizer--> ids [+ EOD] --PartWriter--> a part
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np

from megatron_ext.data.build.parts import Part, PartWriter, Record, Settings
from megatron_ext.data.build.shards import Shard
from megatron_ext.data.text.chat import Spans
from megatron_ext.data.text.documents import Document, Fields, ReadProgress, keep_good
from megatron_ext.data.text.sentences import split
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 19
MOST_TOKENS = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Task:
    """What all jobs of a run share.

    Attributes:
        folder: of the parts.
        tokenizer: its path or name.
        skip: leave bad documents out instead of stopping.
    """

    folder: Path
    settings: Settings
    tokenizer: str
    fields: Fields
    skip: bool


@dataclass(frozen=True)
class EncodeJob:
    """A shard to token ids. Calling it does the work and leaves a part."""

    task: Task
    shard: Shard

    @property
    def part(self) -> Part:
        return Part.named(self.task.folder, self.task.settings, "tokens", self.shard.identity)

    def __call__(self) -> None:
        task = self.task
        progress, record = ReadProgress(), Record(limit=task.fields.limit)
        with PartWriter(self.part) as writer:
            tokens = _Tokens(writer, record, task.settings)
            for documents in _batches(keep_good(self.shard.read(task.fields), task.skip, progress)):
                record.size += sum(len(document.text) for document in documents)
                if task.fields.chat is not None:
                    for ids, mask in _encode_chat(documents, task):
                        tokens.add([ids], mask)
                    continue
                for sequences in _encode([document.text for document in documents], task):
                    tokens.add(sequences)
            record.skipped, record.problems = progress.skipped, progress.problems
            record.checksums = {source.name: source.checksum() for source in self.shard.sources}
            tokens.finish()


class _Tokens:
    """The documents of a part, as they are written."""

    def __init__(self, writer: PartWriter, record: Record, settings: Settings) -> None:
        self._writer = writer
        self._record = record
        self._settings = settings
        self._lengths, self._counts = array("i"), array("i")
        self._masks: list[np.ndarray] = []

    def add(self, sequences: list[list[int]], mask: np.ndarray | None = None) -> None:
        """Append a document, or count it as unanswered, too short or too long.

        mask: uint8 [tokens], of a conversation, 1 where a token is the assistant's.
        """
        settings, record = self._settings, self._record
        sequences = [ids for ids in sequences if ids]
        if mask is not None and not mask.any():
            record.unanswered += 1
            return
        if sequences and settings.eod_id is not None:
            sequences[-1].append(settings.eod_id)
            mask = None if mask is None else np.append(mask, np.uint8(0))
        total = sum(map(len, sequences))
        if total < max(settings.min_tokens, 1):
            record.too_short += 1
            return
        if settings.max_tokens is not None and total > settings.max_tokens:
            record.too_long += 1
            return
        if total > MOST_TOKENS:
            raise UserError(f"a document has {total} tokens; Megatron's format holds below 2^31; pass --max-tokens")
        ids = np.array(sequences[0] if len(sequences) == 1 else list(chain.from_iterable(sequences)), np.int32)
        assert 0 <= ids.min() <= ids.max() < settings.vocab_size
        self._writer.write(ids.astype(settings.dtype).tobytes())
        self._lengths.extend(map(len, sequences))
        self._counts.append(len(sequences))
        record.tokens += total
        if mask is not None:
            self._masks.append(mask)
            record.trained += int(mask.sum())

    def finish(self) -> None:
        self._record.documents, self._record.sequences = len(self._counts), len(self._lengths)
        arrays = {"lengths": np.array(self._lengths, np.int32), "counts": np.array(self._counts, np.int32)}
        if self._settings.chat_template is not None:
            arrays["mask"] = np.concatenate([np.zeros(0, np.uint8), *self._masks])
        self._writer.finish(self._record, **arrays)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists: large enough for the tokenizer to be called rarely, small enough for memory."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(texts: list[str], task: Task) -> Iterator[list[list[int]]]:
    """Token ids of each text: of its sentences, or of all of it."""
    language = task.settings.sentences
    cut = [[text] if language is None else split(text, language) for text in texts]
    tokenizer = _loaded(task.tokenizer, task.settings.tokenizer_fingerprint)
    ids = iter(tokenizer.encode_batch(list(chain.from_iterable(cut))))
    for sentences in cut:
        yield [next(ids) for _ in sentences]


def _encode_chat(documents: list[Document], task: Task) -> Iterator[tuple[list[int], np.ndarray]]:
    """Token ids of each conversation, and uint8 [tokens]: 1 where a token is the assistant's."""
    tokenizer = _loaded(task.tokenizer, task.settings.tokenizer_fingerprint)
    encoded = tokenizer.encode_spelled([document.text for document in documents])
    for document, (ids, offsets) in zip(documents, encoded, strict=True):
        yield ids, spoken(np.array(offsets, np.int64).reshape(-1, 2), document.spans or ())


def spoken(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """uint8 [n]: 1 for the tokens from the first that touches a span to the last that does.

    Args:
        offsets: int64 [n, 2], the characters [start, end) of each token.
        spans: [start, end) each.
    """
    mask = np.zeros(len(offsets), np.uint8)
    for start, end in spans:
        touched = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
        if touched.size:
            mask[touched[0] : touched[-1] + 1] = 1
    return mask


@lru_cache(maxsize=1)
def _loaded(path: str, fingerprint: str) -> Tokenizer:
    """The tokenizer, once per process; the fingerprint tells a file from another that took its place."""
    tokenizer = Tokenizer(path)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"tokenizer: {path} has changed since the work began; start again")
    return tokenizer
