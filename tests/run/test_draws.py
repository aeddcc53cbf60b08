"""Random numbers of rows: a function of seed and sample alone."""

from __future__ import annotations

import numpy as np

from megatron_ext.run.batches import draw, row_seed


def test_they_are_those_of_every_earlier_run() -> None:
    """A score store and a resumed run count on them: another value here is another run."""
    assert row_seed(1234, 5) == 4021649082500149864
    assert draw(1234, 5) == 0.006293032984483915


def test_each_row_has_its_own() -> None:
    assert len({row_seed(seed, sample) for seed in range(30) for sample in range(30)}) == 900
    drawn = np.array([draw(7, sample) for sample in range(4000)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.05
