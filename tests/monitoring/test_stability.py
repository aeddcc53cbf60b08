from __future__ import annotations

import pytest

from megatron_ext.monitoring.stability import stability


def test_the_four_figures() -> None:
    ratio = (5 * 3.0 + 4 * 1.0) / 9
    assert list(stability([1.0, 3.0] * 5, [0.5, 2.0]).values()) == [1.0, 2.0, ratio, 0.75]
    # t = 10: nine 0 and a 1 -> sqrt(0.1 * 0.9) = 0.3; t = 11: eight 0 and two 1 -> sqrt(0.2 * 0.8) = 0.4.
    assert stability([1.0] * 9 + [2.0, 2.0], [1.0])["volatility"] == pytest.approx((0.3 + 0.4) / 2)
