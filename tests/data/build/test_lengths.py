"""The lengths of documents, against numpy's definitions."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.data.build.lengths import length_statistics


def test_by_hand() -> None:
    """Lengths 1, 1, 1, 5: mean 2, m2 = (3 + 9) / 4 = 3, m3 = (-3 + 27) / 4 = 6, m4 = (3 + 81) / 4 = 21."""
    found = length_statistics(np.array([1, 1, 1, 5]))
    assert found is not None
    assert (found["mean"], found["median"], found["p75"], found["max"]) == (2, 1, 2, 5)
    assert (found["skewness"], found["kurtosis"]) == pytest.approx((6 / 3**1.5, 21 / 9 - 3))
    assert length_statistics(np.array([3, 3]))["kurtosis"] is None  # type: ignore[index]
    assert length_statistics(np.zeros(0, np.int64)) is None
