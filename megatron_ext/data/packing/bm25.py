"""Order documents so that similar ones are adjacent, by BM25 (SkyLadder's semantic packing)."""

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.data.rows.dataset import TokenSource
from megatron_ext.errors import missing_package


def order_by_similarity(
    source: TokenSource, documents: Int64, shuffled: Int64, first_tokens: int, block_documents: int
) -> Int64:
    """Order documents greedily: next is the nearest unused document of the block by BM25, with token ids as terms.

    `shuffled`, a permutation of the `documents` int64 [n], is divided into blocks of up to `block_documents` N, each
    ordered starting with its first document; of each document `first_tokens` are compared. The query is the rarest
    terms of the current document, as many as occur in at most N documents in total; the result is exactly the nearest
    unused document of the block, or the first unused one if none shares a term with the query. So a step takes O(N)
    time: larger blocks find nearer documents at a higher cost per document.

    Returns int64 [n], a permutation of 0 .. n-1.
    """
    orders = []
    for numbers in np.array_split(shuffled, -(-len(shuffled) // block_documents)):
        texts = [
            source.read(document, 0, min(first_tokens, int(source.document_lengths[document])))
            for document in documents[numbers].tolist()
        ]
        orders.append(numbers[_walk(texts)])
    return np.concatenate(orders)


def _walk(texts: list[np.ndarray]) -> Int64:
    try:
        from bm25s import BM25
    except ImportError:
        raise missing_package("packing: bm25", "bm25s") from None
    size = len(texts)
    vocabulary, ids = np.unique(np.concatenate(texts), return_inverse=True)
    terms = np.split(ids, np.cumsum([len(text) for text in texts])[:-1])
    distinct = [np.unique(ids) for ids in terms]
    spread = np.bincount(np.concatenate(distinct), minlength=len(vocabulary))  # documents of each term
    index = BM25(backend="numpy", csc_backend="numpy")
    corpus = ([ids.tolist() for ids in terms], {term: term for term in range(len(vocabulary))})
    index.index(corpus, create_empty_token=False, show_progress=False)

    unused = np.ones(size, dtype=np.float32)
    order = np.zeros(size, dtype=np.int64)
    following = 0
    for step in range(1, size):
        current = int(order[step - 1])
        unused[current] = 0  # masks its score; the index itself is never changed
        rarest = distinct[current][np.argsort(spread[distinct[current]], kind="stable")]
        # terms of only this document, or of all, carry no information
        rarest = rarest[(spread[rarest] > 1) & (spread[rarest] < size)]
        # the cost of a step is the number of documents with the query's terms: at most N
        query = rarest[np.cumsum(spread[rarest]) <= size]
        scores = index.get_scores_from_ids(query, weight_mask=unused)
        nearest = int(scores.argmax())
        if scores[nearest] <= 0:
            while not unused[following]:  # never goes back, so all steps together are linear
                following += 1
            nearest = following
        order[step] = nearest
    return order
