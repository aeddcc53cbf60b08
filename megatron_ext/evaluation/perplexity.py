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
from torch import Tensor

from megatron_ext.arrays import Int64
from megatron_ext.evaluation.by_position import losses_by_position, mean_loss
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
class Evaluated:
    """Losses of a model on all documents.

    Attributes:
        sources: of each document.
        at: by window length, float64 [2, documents, BINS]: for each document what `sums_by_position` returns; positions
            count from the window's start.
    """

    sources: Sequence[str]
    at: Mapping[int, Tensor]

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield the loss of all documents and of each source, overall and by position, at each window length."""
        chosen = {"all": list(range(len(self.sources)))}
        for number, source in enumerate(self.sources):
            chosen.setdefault(source, []).append(number)
        for length, sums in self.at.items():
            for task, documents in chosen.items():
                own = sums[:, documents].sum(dim=1)
                loss = mean_loss(own)
                assert loss is not None  # a document has at least 2 tokens
                at = {"task": task, "length": length, "count": int(own[1].sum()), "documents": len(documents)}
                yield at | {"metric": "loss", "value": loss}
                yield at | {"metric": "perplexity", "value": math.exp(min(loss, 700.0))}  # avoid float overflow
                for position, mean in losses_by_position(own).items():
                    yield {"task": task, "length": length, "metric": "loss", "position": position, "value": mean}


def loss_differences(models: Mapping[str, Evaluated]) -> Iterator[dict[str, Any]]:
    """Compare each model's loss with the first one's, on the same documents."""
    (first, base), *others = models.items()
    for second, other in others:
        for length, sums in base.at.items():
            losses, counts = sums.sum(dim=2).numpy()
            found = difference(losses, other.at[length][0].sum(dim=1).numpy(), counts)
            yield {"first": first, "second": second, "task": "all", "metric": "loss", "length": length, **found}
