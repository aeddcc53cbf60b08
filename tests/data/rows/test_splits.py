"""Documents divided by --split, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.rows.mixture import split_documents
from megatron_ext.errors import UserError


@given(
    documents=st.integers(3, 500),
    shares=st.lists(st.sampled_from([0, 0.001, 0.5, 1, 2, 98, 969]), min_size=1, max_size=3).filter(any),
)
def test_splits_are_contiguous_and_proportional(documents: int, shares: list[float]) -> None:
    parts = split_documents(documents, ",".join(map(str, shares)))
    assert [i for part in parts for i in part] == list(range(documents))
    for part, share in itertools.zip_longest(parts, shares, fillvalue=0):
        assert isinstance(part, range)
        assert bool(part) == (share > 0)
        assert abs(len(part) - documents * share / sum(shares)) <= 2


@pytest.mark.parametrize(
    ("documents", "split", "borders"),
    [
        (100, "98,2,0", (0, 98, 100, 100)),
        (1000, "969, 30, 1", (0, 969, 999, 1000)),
        (5, "99,1", (0, 4, 5, 5)),
        (2, "0,0.5,0.5", (0, 0, 1, 2)),
        (3, "1,1000,1", (0, 1, 2, 3)),
        (1, "1", (0, 1, 1, 1)),
    ],
)
def test_split_examples(documents: int, split: str, borders: tuple[int, ...]) -> None:
    assert split_documents(documents, split) == tuple(map(range, borders, borders[1:]))


@pytest.mark.parametrize(
    "split", ["", "a,b", "0,0,0", "1,-1", "nan", "inf,1", "1,1,1,1", "98/2/0", "98,,2", "1e999999999,1"]
)
def test_bad_splits_are_refused(split: str) -> None:
    with pytest.raises(UserError, match="one to three shares"):
        split_documents(10, split)


def test_a_split_of_too_few_documents_is_refused() -> None:
    with pytest.raises(UserError, match=r"asks for 2 parts, but the data set has 1 documents"):
        split_documents(1, "98,2,0")
    assert split_documents(2, "98,2,0") == (range(1), range(1, 2), range(2, 2))
