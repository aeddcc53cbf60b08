"""The greedy walk against BM25 written out (Lucene's variant, k1 1.5, b 0.75)."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.packing.policies import Bm25, Corpus
from tests.data.packing.sources import WrittenSource

EOD = 0
some_documents = st.lists(st.lists(st.integers(1, 12), max_size=9).map(lambda ids: [*ids, EOD]), min_size=1, max_size=9)


def score(query: set[int], text: list[int], block: list[list[int]]) -> float:
    average = sum(map(len, block)) / len(block)
    counts = Counter(text)
    total = 0.0
    for term in query:
        spread = sum(term in candidate for candidate in block)
        weight = math.log(1 + (len(block) - spread + 0.5) / (spread + 0.5))
        total += weight * counts[term] / (counts[term] + 1.5 * (1 - 0.75 + 0.75 * len(text) / average))
    return total


def query_of(text: list[int], block: list[list[int]]) -> set[int]:
    """The rarest terms that together name no more documents than there are; of equally rare ones the smaller id."""
    spread = {term: sum(term in candidate for candidate in block) for term in text}
    query = set()
    named = 0
    for term in sorted((t for t in spread if 1 < spread[t] < len(block)), key=lambda t: (spread[t], t)):
        named += spread[term]
        if named <= len(block):
            query.add(term)
    return query


def check_walk(documents: list[list[int]], order: list[int], shuffled: list[int], first: int) -> None:
    """Each step goes to a nearest unused document, or, with nothing in common, to the first unused."""
    block = [documents[place][:first] for place in shuffled]
    text = dict(zip(shuffled, block, strict=True))
    assert order[0] == shuffled[0]
    unused = list(shuffled)
    for current, nearest in itertools.pairwise(order):
        unused.remove(current)
        query = query_of(text[current], block)
        scores = {place: score(query, text[place], block) for place in unused}
        best = max(scores.values())
        if best > 0:
            assert scores[nearest] == pytest.approx(best, rel=1e-5)
        else:
            assert nearest == unused[0]


@given(documents=some_documents, block=st.integers(1, 10), first=st.sampled_from([1, 4, 512]), data=st.data())
def test_the_next_is_the_nearest(documents: list[list[int]], block: int, first: int, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(range(len(documents))))
    source = WrittenSource(documents)
    corpus = Corpus(source, np.arange(len(documents)), source.document_lengths, 1, 0)
    order = Bm25(first, block).order(corpus, np.array(shuffled)).tolist()
    begin = 0
    blocks = math.ceil(len(documents) / block)
    for number in range(blocks):
        part = slice(begin, begin + len(documents) // blocks + (number < len(documents) % blocks))
        begin = part.stop
        assert sorted(order[part]) == sorted(shuffled[part])
        check_walk(documents, order[part], shuffled[part], first)
    assert begin == len(documents)
