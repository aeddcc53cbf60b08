"""The rows of a rehearsal: the run's own if its data is present, otherwise documents of random lengths."""

import contextlib

import numpy as np

from megatron_ext.config import Config
from megatron_ext.data.row import TokenRow
from megatron_ext.errors import UserError
from megatron_ext.run.inputs import RowAt, open_rows

MEDIAN = 849
SIGMA = 0.974  # lognormal with a mean of 1,364 tokens, as FineWeb-Pro (arXiv 2503.15450, Table 26)
SHORTEST = 16


def rows_of(config: Config, vocab_size: int, documents: str | None) -> tuple[RowAt, str]:
    """Return the rows, and their description.

    `documents` is "drawn" or "whole"; None uses the run's data if present, otherwise "drawn". Drawn documents differ
    for each sample; the tokens are constant, as no cost depends on them.
    """
    if documents is None:
        with contextlib.suppress(UserError, OSError):
            return open_rows(config, vocab_size).row, "the run's own"
    length = config.data.seq_length
    seed = config.training.seed
    tokens = np.arange(length + 1, dtype=np.int64) % vocab_size
    trained = np.ones(length, dtype=np.bool_)
    weights = None
    if config.weighting.token_weighting == "dataset":
        weights = np.ones(length, dtype=np.float32)

    def drawn(sample: int) -> TokenRow:
        lengths = np.random.default_rng((seed, sample)).lognormal(np.log(MEDIAN), SIGMA, size=length // SHORTEST + 1)
        borders = np.cumsum(np.maximum(lengths.astype(np.int64), SHORTEST))
        return TokenRow(tokens, borders[borders < length], trained, weights)

    if documents == "whole":
        return lambda sample: TokenRow(tokens, np.array([length]), trained, weights), "one document each"
    return drawn, f"documents of lognormal lengths, median {MEDIAN:,} tokens, sigma {SIGMA}, seed {seed}"
