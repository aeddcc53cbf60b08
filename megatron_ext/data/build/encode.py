"""Encode one shard's documents as token ids, in a worker process.

Shard --keep_good--> texts --Tokenizer--> [BOS +] ids [+ EOD] --> a part
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_ext.data.build.parts import Part, Record, Settings
from megatron_ext.data.build.shards import Shard
from megatron_ext.data.text.chat import Spans
from megatron_ext.data.text.documents import Document, Fields, ReadProgress, keep_good
from megatron_ext.data.text.sentences import split
from megatron_ext.data.text.sources import BLOCK
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write

# Limits of a batch, the texts and ids that a worker holds in memory.
BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 19
MOST_TOKENS = np.iinfo(np.int32).max  # maximum length of a sequence in the .idx


@dataclass(frozen=True)
class Task:
    """The settings shared by all jobs of a run.

    Attributes:
        folder: folder of the parts.
        tokenizer: its path or name.
        skip: omit bad documents instead of stopping.
    """

    folder: Path
    settings: Settings
    tokenizer: str
    fields: Fields
    skip: bool


@dataclass(frozen=True)
class EncodeJob:
    """Encodes a shard and writes a part when called."""

    task: Task
    shard: Shard

    @property
    def part(self) -> Part:
        return Part.named(self.task.folder, self.task.settings, "tokens", self.shard.identity)

    def __call__(self) -> None:
        task = self.task
        progress, record = ReadProgress(), Record(limit=task.fields.limit)
        with atomic_write(self.part.content) as aside, aside.open("wb", BLOCK) as file:
            tokens = _Tokens(file, record, task.settings)
            for documents in _batches(keep_good(self.shard.read(task.fields), task.skip, progress)):
                record.size += sum(len(document.text) for document in documents)
                for document, (sequences, mask) in zip(documents, _encode(documents, task), strict=True):
                    tokens.add(sequences, mask, document.source_name)
        record.read(progress, self.shard.sources)
        self.part.finish(record, **tokens.arrays())


class _Tokens:
    """Writes the documents of a part, and counts those that are omitted."""

    def __init__(self, file: BinaryIO, record: Record, settings: Settings) -> None:
        self._file = file
        self._record = record
        self._settings = settings
        self._lengths, self._counts = array("i"), array("i")  # 4 bytes per number; a list needs 36
        self._masks: list[np.ndarray] = []
        self._names: dict[str, int] = {}  # source names, numbered in order of appearance
        self._sources = array("i")

    def add(self, sequences: list[list[int]], mask: np.ndarray | None = None, source: str | None = None) -> None:
        """Append a document, or count it as unanswered, too short or too long.

        Args:
            sequences: token ids of each sequence.
            mask: for a conversation, uint8 [tokens], 1 for the assistant's tokens.
            source: the value of `Settings.source_field`.
        """
        settings, record = self._settings, self._record
        sequences = [ids for ids in sequences if ids]  # the ids of a sentence may be empty
        if mask is not None and not mask.any():
            record.unanswered += 1
            return
        if sequences and settings.bos_id is not None and sequences[0][0] != settings.bos_id:  # a template may add it
            sequences[0].insert(0, settings.bos_id)
            mask = None if mask is None else np.insert(mask, 0, np.uint8(0))
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
        self._file.write(ids.astype(settings.dtype).tobytes())
        self._lengths.extend(map(len, sequences))
        self._counts.append(len(sequences))
        if settings.source_field is not None:
            assert source is not None
            self._sources.append(self._names.setdefault(source, len(self._names)))
        record.tokens += total
        if mask is not None:
            self._masks.append(mask)
            record.trained += int(mask.sum())

    def arrays(self) -> dict[str, np.ndarray]:
        """Complete the record and return the part's arrays."""
        self._record.documents, self._record.sequences = len(self._counts), len(self._lengths)
        arrays = {"lengths": np.array(self._lengths, np.int32), "counts": np.array(self._counts, np.int32)}
        if self._settings.chat_template is not None:
            arrays["mask"] = np.concatenate([np.zeros(0, np.uint8), *self._masks])
        if self._settings.source_field is not None:
            arrays["sources"] = np.array(self._sources, np.int32)
            arrays["source_names"] = np.array(list(self._names), np.str_)
        return arrays


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches, large enough for few tokenizer calls and small enough for memory."""
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


def _encode(documents: list[Document], task: Task) -> Iterator[tuple[list[list[int]], np.ndarray | None]]:
    """Encode documents; yield for each its sequences and, for a conversation, its mask.

    The mask is uint8 [tokens], 1 for the assistant's tokens.
    """
    tokenizer = _loaded(task.tokenizer, task.settings.tokenizer_fingerprint)
    texts = [document.text for document in documents]
    if task.fields.chat is not None:
        for document, (ids, offsets) in zip(documents, tokenizer.encode_spelled(texts), strict=True):
            yield [ids], spoken(np.array(offsets, np.int64).reshape(-1, 2), document.spans or ())
        return
    language = task.settings.sentences
    sentences = [[text] if language is None else split(text, language) for text in texts]
    encoded = iter(tokenizer.encode_batch(list(chain.from_iterable(sentences))))
    for of_document in sentences:
        yield [next(encoded) for _ in of_document], None


def spoken(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Return a mask, uint8 [n], that is 1 from the first to the last token that overlaps each span.

    Args:
        offsets: int64 [n, 2], the characters [start, end) of each token.
        spans: pairs of characters [start, end).
    """
    mask = np.zeros(len(offsets), np.uint8)
    for start, end in spans:
        touched = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
        if touched.size:
            mask[touched[0] : touched[-1] + 1] = 1
    return mask


@lru_cache(maxsize=1)
def _loaded(path: str, fingerprint: str) -> Tokenizer:
    """Load the tokenizer once per process, and check by its fingerprint that the file has not changed."""
    tokenizer = Tokenizer(path)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"tokenizer: {path} has changed since the work began; start again")
    return tokenizer
