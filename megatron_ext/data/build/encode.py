"""Create the part of a shard in a worker process.

Shard --keep_good--> texts --Tokenizer--> [BOS +] ids [+ EOD] --> a part
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_ext.data.build.parts import Record, Settings
from megatron_ext.data.build.shards import Shard, write_texts
from megatron_ext.data.text.chat import Spans
from megatron_ext.data.text.documents import Document, Fields, keep_good
from megatron_ext.data.text.sentences import split
from megatron_ext.data.text.sources import BLOCK
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.files.atomic import atomic_write

load_tokenizer = lru_cache(maxsize=1)(Tokenizer)  # once per process


@dataclass(frozen=True)
class Job:
    """Creates the part of a shard when called.

    Attributes:
        folder: folder of the parts.
        tokenizer: its path or name.
        skip: omit bad documents instead of stopping.
        texts: write texts, to be grouped, instead of token ids.
    """

    folder: Path
    settings: Settings
    tokenizer: str
    fields: Fields
    skip: bool
    shard: Shard
    texts: bool = False

    @property
    def part(self) -> Path:
        """The part's path, without a suffix."""
        kind = "texts with sources" if self.texts else "tokens"
        identity = json.dumps([asdict(self.settings), kind, self.shard.identity])
        return self.folder / hashlib.sha256(identity.encode()).hexdigest()[:32]

    def __call__(self) -> None:
        part, record = self.part, Record(limit=self.fields.limit)
        documents = keep_good(self.shard.read(self.fields), record.skip if self.skip else None)
        with atomic_write(part.with_suffix(".bin")) as partial, partial.open("wb", BLOCK) as file:
            if self.texts:
                rows = write_texts(documents, file, record)
            else:
                arrays = write_tokens(documents, file, record, self)
        with atomic_write(part.with_suffix(".npy" if self.texts else ".npz")) as partial, partial.open("wb") as file:
            if self.texts:
                np.save(file, rows)
            else:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        record.write(part)


def write_tokens(documents: Iterator[Document], file: BinaryIO, record: Record, job: Job) -> dict[str, np.ndarray]:
    """Write the token ids of documents, count what is written and omitted, and return the part's other arrays."""
    settings = job.settings
    tokenizer = load_tokenizer(job.tokenizer)
    lengths, counts, sources = array("i"), array("i"), array("i")  # 4 bytes per number; a list needs 36
    masks: list[np.ndarray] = []
    names: dict[str, int] = {}  # of sources, numbered in order of appearance
    for document in documents:
        record.size += len(document.text)
        sequences, mask = _encode(document, tokenizer, job)
        if mask is not None and not mask.any():
            record.unanswered += 1
            continue
        if sequences and settings.bos_id is not None and sequences[0][0] != settings.bos_id:  # a template may add it
            sequences[0].insert(0, settings.bos_id)
            mask = None if mask is None else np.insert(mask, 0, np.uint8(0))
        if sequences and settings.eod_id is not None:
            sequences[-1].append(settings.eod_id)
            mask = None if mask is None else np.append(mask, np.uint8(0))
        total = sum(map(len, sequences))
        if total < max(settings.min_tokens, 1):
            record.too_short += 1
            continue
        if settings.max_tokens is not None and total > settings.max_tokens:
            record.too_long += 1
            continue
        ids = np.array(list(chain.from_iterable(sequences)) if len(sequences) > 1 else sequences[0], np.int32)
        assert 0 <= ids.min() <= ids.max() < settings.vocab_size
        file.write(ids.astype(settings.dtype).tobytes())
        lengths.extend(map(len, sequences))
        counts.append(len(sequences))
        if settings.source_field is not None:
            assert document.source_name is not None
            sources.append(names.setdefault(document.source_name, len(names)))
        record.tokens += total
        if mask is not None:
            masks.append(mask)
            record.trained += int(mask.sum())
    record.documents, record.sequences = len(counts), len(lengths)
    arrays = {"lengths": np.array(lengths, np.int32), "counts": np.array(counts, np.int32)}
    if settings.chat_template is not None:
        arrays["mask"] = np.concatenate([np.zeros(0, np.uint8), *masks])
    if settings.source_field is not None:
        arrays["sources"] = np.array(sources, np.int32)
        arrays["source_names"] = np.array(list(names), np.str_)
    return arrays


def _encode(document: Document, tokenizer: Tokenizer, job: Job) -> tuple[list[list[int]], np.ndarray | None]:
    """Return the token ids of each sequence and, for a conversation, uint8 [tokens], 1 for the assistant's tokens."""
    if job.fields.chat is not None:
        ids, offsets = tokenizer.encode_spelled(document.text)
        return [ids] if ids else [], assistant_mask(np.array(offsets, np.int64).reshape(-1, 2), document.spans)
    language = job.settings.sentences
    sentences = [document.text] if language is None else split(document.text, language)
    return [ids for sentence in sentences if (ids := tokenizer.encode(sentence))], None


def assistant_mask(offsets: np.ndarray, spans: Spans) -> np.ndarray:
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
