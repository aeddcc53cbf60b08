"""Documents shared out to training, validation and test."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.rows.splits import split_documents
from megatron_ext.errors import UserError


@pytest.mark.parametrize(
    ("documents", "split", "borders"),
    [
        (100, "98,2,0", (98, 100)),
        (100, "1", (100, 100)),
        (3, "999998,1,1", (1, 2)),  # each positive share gets one, however small
        (10, " 0.5 , 0.25, .25", (5, 8)),
        (7, "0,0,3", (0, 0)),
    ],
)
def test_borders(documents: int, split: str, borders: tuple[int, int]) -> None:
    first, second = borders
    wanted = (range(first), range(first, second), range(second, documents))
    assert split_documents(documents, split) == wanted


@given(st.integers(3, 10**6), st.tuples(*[st.integers(0, 1000)] * 3).filter(any))
def test_every_document_has_one_part_of_about_its_share(documents: int, shares: tuple[int, int, int]) -> None:
    parts = split_documents(documents, ",".join(map(str, shares)))
    assert parts[0].start == 0
    assert parts[2].stop == documents
    assert all(before.stop == after.start for before, after in itertools.pairwise(parts))
    for part, share in zip(parts, shares, strict=True):
        assert bool(part) == bool(share)
        assert abs(len(part) - documents * share / sum(shares)) < 3


@pytest.mark.parametrize("split", ["", "a", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1"])
def test_what_are_no_shares(split: str) -> None:
    with pytest.raises(UserError, match=r"^split: got .* needs one to three shares >= 0"):
        split_documents(100, split)


def test_too_few_documents() -> None:
    with pytest.raises(UserError, match="asks for 3 parts, but the data set has 2 documents"):
        split_documents(2, "1,1,1")
    assert split_documents(2, "1,1,0") == (range(1), range(1, 2), range(2, 2))
