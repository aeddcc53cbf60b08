"""An order of documents in which similar ones follow one another, by BM25 (SkyLadder's semantic packing)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.data.rows.dataset import TokenSource
from megatron_ext.errors import missing_package


@dataclass(frozen=True)
class SimilarOrder:
    """Documents in an order in which similar ones follow one another.

    order: int64 [n], every document once, by its index in what was given.
    queries: how often a next document was asked for.
    hits: how often one shared a term with the query.
    """

    order: Int64
    queries: int
    hits: int


def order_by_similarity(
    source: TokenSource, documents: Int64, shuffled: Int64, first_tokens: int, block_documents: int
) -> SimilarOrder:
    """Walk greedily: the next document is the nearest unused one of its block by BM25, token ids being the terms.

    Shuffled documents are taken in blocks of up to `block_documents` N, each walked from its first document on.
    The query is the rarest terms of the document at hand, as many as together name at most N documents; the answer
    is exactly the nearest unused document of the block, or the first unused one where none shares a term with the
    query. So a step takes work in the order of N: larger blocks find nearer documents, at a higher cost
    for each.

    Args:
        documents: int64 [n], indices into `source`.
        shuffled: int64 [n], a permutation of 0 .. n-1.
        first_tokens: of each document, what is compared.
        block_documents: N.

    Raises:
        UserError: bm25s is not installed.
    """
    orders, queries, hits = [], 0, 0
    for numbers in np.array_split(shuffled, -(-len(shuffled) // block_documents)):
        texts = [
            source.read(document, 0, min(first_tokens, int(source.document_lengths[document])))
            for document in documents[numbers].tolist()
        ]
        walk, block_hits = _Block(texts).walk()
        orders.append(numbers[walk])
        queries += len(walk) - 1
        hits += block_hits
    return SimilarOrder(np.concatenate(orders), queries, hits)


class _Block:
    """Indexes the documents of a block by BM25, and walks through them."""

    def __init__(self, texts: list[np.ndarray]) -> None:
        try:
            from bm25s import BM25
        except ImportError:
            raise missing_package("packing: bm25", "bm25s") from None
        vocabulary, ids = np.unique(np.concatenate(texts), return_inverse=True)
        terms = np.split(ids, np.cumsum([len(text) for text in texts])[:-1])
        self._size = len(texts)
        self._distinct = [np.unique(ids) for ids in terms]
        self._spread = np.bincount(np.concatenate(self._distinct), minlength=len(vocabulary))  # documents of each term
        corpus = ([ids.tolist() for ids in terms], {term: term for term in range(len(vocabulary))})
        self._index = BM25(backend="numpy", csc_backend="numpy")
        self._index.index(corpus, create_empty_token=False, show_progress=False)

    def walk(self) -> tuple[Int64, int]:
        """Visit every document once, from the first on, and count those that BM25 led to."""
        unused = np.ones(self._size, dtype=np.float32)
        order = np.zeros(self._size, dtype=np.int64)
        following, hits = 0, 0
        for step in range(1, self._size):
            current = int(order[step - 1])
            unused[current] = 0  # as a mask of the scores: the index itself is never changed
            scores = self._index.get_scores_from_ids(self._query(current), weight_mask=unused)
            nearest = int(scores.argmax())
            if scores[nearest] > 0:
                hits += 1
            else:
                while not unused[following]:  # never goes back, so that all steps together are linear
                    following += 1
                nearest = following
            order[step] = nearest
        return order, hits

    def _query(self, document: int) -> Int64:
        """Choose the terms to ask for neighbours by; those of this document alone, or of all, tell nothing."""
        terms = self._distinct[document]
        spread = self._spread[terms]
        rarest = np.argsort(spread, kind="stable")
        rarest = rarest[(spread[rarest] > 1) & (spread[rarest] < self._size)]
        # A step's work is the number of documents that the terms name: at most N.
        return terms[rarest][np.cumsum(spread[rarest]) <= self._size]
