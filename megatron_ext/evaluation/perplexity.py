"""Compute perplexity with a sliding window: documents, windows and results.

Windows of L tokens start S tokens apart along a stream. The first window scores all of its labels, a later one its last
S, each with at least L - S tokens before it (short_context.py draws them).

With the document mask each document is a stream. Without it the documents of a source form one stream, an end token
after each, and a token sees all tokens before it in its window.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_ext.arrays import Float64, Int64
from megatron_ext.evaluation.by_position import PositionLosses
from megatron_ext.evaluation.statistics import difference


@dataclass(frozen=True, eq=False)
class Document:
    """A text to score: its file or domain, and its tokens, int64 [n], n >= 2, end token included."""

    source: str
    tokens: Int64


@dataclass(frozen=True)
class Limits:
    """Selects documents.

    Attributes:
        per_source: the first documents of each source, at most; None for all.
        shortest: shorter documents are skipped; at least 2 tokens, because the first one has no label.
        longest: longer documents are cut to this many tokens; None for no limit.
    """

    per_source: int | None = None
    shortest: int = 2
    longest: int | None = None


def file_documents(
    texts: Iterable[tuple[str, str]], encode: Callable[[str], list[int]], end: int | None, limits: Limits
) -> Iterator[Document]:
    """Tokenize texts, pairs (source, text), and append the end-of-document token `end`, if any, to each."""
    taken: Counter[str] = Counter()
    for source, text in texts:
        if taken[source] == limits.per_source:
            continue
        tokens = encode(text) + ([] if end is None else [end])
        if len(tokens) >= limits.shortest:
            taken[source] += 1
            yield Document(source, np.array(tokens[: limits.longest], dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Stream:
    """Tokens along which windows slide: n inputs and n labels.

    Attributes:
        tokens: int64 [n+1].
        document: int64 [n], the number of each label's document.
    """

    tokens: Int64
    document: Int64

    def __len__(self) -> int:
        return len(self.document)


def streams(documents: Sequence[Document], *, document_mask: bool) -> list[Stream]:
    """Make one stream per document, or one per source from all of its documents."""
    numbers: dict[Any, list[int]] = {}
    for number, document in enumerate(documents):
        numbers.setdefault(number if document_mask else document.source, []).append(number)
    found = []
    for joined in numbers.values():
        tokens = np.concatenate([documents[number].tokens for number in joined])
        owner = np.repeat(joined, [len(documents[number].tokens) for number in joined])
        found.append(Stream(tokens, owner[1:]))
    return found


def stream_chunks(all_streams: Sequence[Stream], tokens: int) -> Iterator[list[Stream]]:
    """Group consecutive streams into chunks of about `tokens` tokens, to limit memory."""
    chunk: list[Stream] = []
    for stream in all_streams:
        if chunk and sum(map(len, chunk)) + len(stream) > tokens:
            yield chunk
            chunk = []
        chunk.append(stream)
    if chunk:
        yield chunk


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of a model at one window length. Scores of chunks and ranks can be added.

    Attributes:
        loss, count: float64 [documents], summed -log p(label) and number of labels.
        by_position: float64 [sources, 2, BINS], from `sums_by_position`; positions count from the window's start.
    """

    loss: Float64
    count: Float64
    by_position: Float64

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.loss + other.loss, self.count + other.count, self.by_position + other.by_position)


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Scores of a model on all documents.

    Attributes:
        sources: names, in the order of `Scores.by_position`.
        source_of: int64 [documents], each one's source.
        at: scores by window length.
    """

    sources: tuple[str, ...]
    source_of: Int64
    at: dict[int, Scores]

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield the loss of all documents and of each source, overall and by position, at each window length."""
        for length, scores in self.at.items():
            groups = [("all", self.source_of >= 0, scores.by_position.sum(axis=0))]
            for number, name in enumerate(self.sources):
                groups.append((name, self.source_of == number, scores.by_position[number]))
            for task, own, by_position in groups:
                count = scores.count[own].sum()
                loss = float(scores.loss[own].sum() / count)
                perplexity = math.exp(min(loss, 700.0))  # avoid float overflow
                at = {"task": task, "length": length, "count": int(count), "documents": int(own.sum())}
                yield at | {"metric": "loss", "value": loss}
                yield at | {"metric": "perplexity", "value": perplexity}
                for position, mean in PositionLosses(torch.from_numpy(by_position)).by_position.items():
                    yield {"task": task, "length": length, "metric": "loss", "position": position, "value": mean}


def loss_differences(models: Mapping[str, Evaluated]) -> Iterator[dict[str, Any]]:
    """Compare each model's loss with the first one's, on the same documents."""
    (first, base), *others = models.items()
    for second, other in others:
        for length, scores in base.at.items():
            found = difference(scores.loss, other.at[length].loss, scores.count)
            yield {"first": first, "second": second, "task": "all", "metric": "loss", "length": length, **found}
