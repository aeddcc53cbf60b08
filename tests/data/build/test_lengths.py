"""The lengths of documents, against numpy and scipy's definitions, of any split into parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.build.lengths import LengthTable


def table(*parts: list[int]) -> LengthTable:
    made = LengthTable()
    for part in parts:
        made.add(np.array(part, dtype=np.int64))
    return made


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40), cut=st.integers(0, 40))
def test_statistics_are_those_of_all_lengths(lengths: list[int], cut: int) -> None:
    found = table(lengths[:cut], lengths[cut:]).statistics
    assert found is not None
    values = np.array(lengths, dtype=np.float64)
    assert (found.min, found.max) == (min(lengths), max(lengths))
    assert (found.mean, found.std) == pytest.approx((values.mean(), values.std()))
    assert (found.p25, found.median, found.p75) == pytest.approx(tuple(np.percentile(values, (25, 50, 75))))
    if values.std():
        normal = (values - values.mean()) / values.std()
        assert found.skewness == pytest.approx((normal**3).mean(), abs=1e-6)
        assert found.kurtosis == pytest.approx((normal**4).mean() - 3, abs=1e-6)
    else:
        assert found.skewness is found.kurtosis is None


def test_by_hand() -> None:
    """Lengths 1, 1, 1, 5: mean 2, m2 = (3 + 9) / 4 = 3, m3 = (-3 + 27) / 4 = 6, m4 = (3 + 81) / 4 = 21."""
    found = table([1, 1], [1, 5]).statistics
    assert found is not None
    assert (found.mean, found.median, found.p75) == (2, 1, 2)
    assert (found.skewness, found.kurtosis) == pytest.approx((6 / 3**1.5, 21 / 9 - 3))
    assert str(found) == ("mean 2, std 2, skewness 1.2, kurtosis -0.7\nmin 1, P25 1, median 1, P75 2, max 5")


def test_a_card_brings_them_back() -> None:
    made = table([3, 2000, 70_000])
    again = LengthTable.of_card(made.card(), made.statistics_card())
    assert str(again) == str(made)
    assert again.statistics == made.statistics
    old = LengthTable.of_card(made.card())
    assert old.statistics is None
    assert str(made).startswith(str(old))
    assert LengthTable().statistics is None
