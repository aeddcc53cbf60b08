"""Choose documents by what a long context adds to their predictions (LongFilter, arXiv 2510.25804).

The gain of a document is the mean of exp(-long) * (short - long) over its tokens, with their losses in whole rows and
in a short context: the paper's estimate, token by token, of the divergence between both predictions.
"""

import math

import numpy as np

from megatron_ext.arrays import Float64, Int64
from megatron_ext.data.indexed import Documents
from megatron_ext.data.rows.packed import PackedRows
from megatron_ext.token_weighting.store import ScoreStore


def document_gains(rows: PackedRows, short: ScoreStore, long: ScoreStore, first: int) -> Float64:
    """Return the gain of each document of the data set, float64 [documents]; NaN if no token of it has scores.

    The stores have the rows of the samples from `first` on; at most an epoch of them is read. A document's first token
    in a row is not counted, as it is predicted from another document. A document that fits the short context gains 0.
    """
    lengths = np.asarray(rows.source.document_lengths)
    totals = np.zeros(len(lengths))
    counts = np.zeros(len(lengths), dtype=np.int64)
    end = min(short.identity.rows, first + rows.plan.rows)
    for sample in range(first, end):
        losses = long.read(sample).astype(np.float64)
        gains_of_tokens = np.exp(-losses) * (short.read(sample) - losses)
        sums = np.append(0.0, np.cumsum(gains_of_tokens))
        documents, _, tokens = rows.plan.row_pieces(rows.row_index(sample)).T
        ends = np.cumsum(tokens)
        # without the last token of a piece, whose label is another piece's
        np.add.at(totals, documents, sums[ends - 1] - sums[ends - tokens])
        np.add.at(counts, documents, tokens - 1)
    gains = totals / np.maximum(counts, 1)
    gains[lengths <= short.identity.short_context] = 0.0
    gains[counts == 0] = np.nan
    return gains


def keep_by_gain(share: float, gains: Float64, documents: Documents) -> Int64:
    """Return the documents of highest gain, a share (rounded up) of all with scores; of equal gains the first."""
    scored = np.asarray(documents, dtype=np.int64)[np.isfinite(gains[documents])]
    order = np.argsort(-gains[scored], kind="stable")
    count = math.ceil(share * len(scored) * (1 - 1e-12))
    return np.sort(scored[order[:count]])
