"""The rows of a rehearsal: the run's own if its data is present, otherwise documents of random lengths."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_ext.config import Config
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.errors import UserError
from megatron_ext.run.inputs import RowAt, open_rows

MEDIAN, SIGMA = 849, 0.974  # lognormal with a mean of 1,364 tokens, as FineWeb-Pro (arXiv 2503.15450, Table 26)
SHORTEST = 16


def rows_of(config: Config, vocab_size: int, documents: str | None) -> tuple[RowAt, str]:
    """Return the rows, and their description.

    `documents` is "drawn" or "whole"; None uses the run's data if present, otherwise "drawn".
    """
    if documents is None:
        try:
            return open_rows(config, vocab_size).train, "the run's own"
        except (UserError, OSError):
            documents = "drawn"
    if documents == "whole":
        return invented(config, vocab_size, whole=True), "one document each"
    what = f"documents of lognormal lengths, median {MEDIAN:,} tokens, sigma {SIGMA}, seed {config.training.seed}"
    return invented(config, vocab_size, whole=False), what


def invented(config: Config, vocab_size: int, *, whole: bool) -> RowAt:
    """Return rows with different documents for each sample; the tokens are constant, as no cost depends on them."""
    length, seed = config.data.seq_length, config.training.seed
    tokens = np.arange(length + 1, dtype=np.int64) % vocab_size
    weights = np.ones(length, dtype=np.float32) if config.weighting.token_weighting == "dataset" else None

    def ends(sample: int) -> npt.NDArray[np.int64]:
        if whole:
            return np.array([length], dtype=np.int64)
        drawn = np.random.default_rng((seed, sample)).lognormal(np.log(MEDIAN), SIGMA, size=length // SHORTEST + 1)
        borders = np.cumsum(np.maximum(drawn.astype(np.int64), SHORTEST))
        return borders[borders < length]

    def row(sample: int) -> TokenRow:
        return TokenRow(tokens, ends(sample), np.ones(length, dtype=np.bool_), weights)

    return row
