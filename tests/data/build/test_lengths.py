"""The lengths of documents, against numpy and scipy's definitions, of any split into parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.build.lengths import EDGES, LengthTable


def table(*parts: list[int]) -> LengthTable:
    made = LengthTable()
    for part in parts:
        made.add(np.array(part, dtype=np.int64))
    return made


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40), cut=st.integers(0, 40))
def test_statistics_are_those_of_all_lengths(lengths: list[int], cut: int) -> None:
    found = table(lengths[:cut], lengths[cut:]).statistics_card()
    assert found is not None
    values = np.array(lengths, dtype=np.float64)
    wanted = [values.mean(), values.std(), values.min(), *np.percentile(values, (25, 50, 75)), values.max()]
    names = ("mean", "std", "min", "p25", "median", "p75", "max")
    assert [found[name] for name in names] == pytest.approx(wanted)
    if values.std():
        normal = (values - values.mean()) / values.std()
        assert found["skewness"] == pytest.approx((normal**3).mean(), abs=1e-6)
        assert found["kurtosis"] == pytest.approx((normal**4).mean() - 3, abs=1e-6)
    else:
        assert found["skewness"] is found["kurtosis"] is None


def test_a_card_brings_them_back() -> None:
    made = table([3, 2000, 70_000])
    again = LengthTable.of_card(made.card(), made.statistics_card())
    assert str(again) == str(made)
    assert LengthTable().statistics_card() is None


@given(
    lengths=st.lists(st.one_of(st.integers(0, 2**21), st.sampled_from([2**k + d for k in range(20) for d in (-1, 0)])))
)
def test_lengths_fall_into_their_bins(lengths: list[int]) -> None:
    made = table(lengths[:3], lengths[3:])
    for number, (low, high) in enumerate(zip(EDGES, [*EDGES[1:], np.inf], strict=True)):
        inside = [length for length in lengths if low <= length < high]
        assert (made.documents[number], made.tokens[number]) == (len(inside), sum(inside))


def test_the_table_names_its_bins() -> None:
    made = table([1023, 1024, 3 * 1024, 600 * 1024])
    rows = {row["length"]: row for row in made.card()}
    assert [rows[name]["documents"] for name in ("below 1K", "1K to 2K", "2K to 4K", "512K and more")] == [1, 1, 1, 1]
    assert rows["512K and more"]["share_of_tokens"] == round(600 * 1024 / (1023 + 604 * 1024), 6)
    assert "mean 154,880" in str(made)
    assert "skewness 1.2" in str(made)
