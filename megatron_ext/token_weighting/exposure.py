"""Weight targets by the context that they have: EXACT (arXiv 2605.10544), which needs no losses and no second pass.

The effective left context of a target is the number of tokens before it in its document, or without a document mask in
its row. Buckets are 0 .. 7, 8 .. 15, 16 .. 31, 32 .. 63 and so on; the tail has those that begin at tau or more:

    token        a a a b b b b b b b b b b | b        L = 13, tau 8
    target       a a b b b b b b b b b b b            document b continues in another row
    context      1 2 0 1 2 3 4 5 6 7 8 9 10           the last three are in the tail, in the bucket 8 .. 15

With c_b the trained targets of bucket b in the global batch, q_b = c_b / (sum of c over the tail), a target weighs

    1 + alpha * r_b / (sum of q r over the tail), r_b = q_b^-gamma        in the tail
    1                                                                     elsewhere

so the tail's targets weigh 1 + alpha on average, and more in rare buckets. The global batch is the largest set that
every layout reads alike, and integer counts make the weights of a step the same in all of them, bit for bit.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.config import Config
from megatron_ext.data.row import RowOutline, TokenRow

LOWEST_TAIL = 8  # the first bucket, 0 .. 7, is never in the tail


def exposure_buckets(row: RowOutline | TokenRow, *, document_mask: bool) -> Int64:
    """Return the bucket of each target of a row, int64 [L]: the number of binary digits of its context."""
    targets = np.arange(1, len(row.trained) + 1)
    starts = np.zeros(1, dtype=np.int64)
    if document_mask:
        starts = np.append(starts, row.document_ends)
    documents = np.searchsorted(starts, targets, side="right") - 1
    _, digits = np.frexp(targets - starts[documents])
    return digits.astype(np.int64)


def exposure_rows(
    row_at: Callable[[int], TokenRow], outlines: Iterable[RowOutline | TokenRow], config: Config
) -> Callable[[int], TokenRow]:
    """Return a function like `row_at`, with weights, for the rows of a global batch with these outlines."""
    options = config.weighting
    document_mask = config.window.document_mask
    tau = options.exposure_tau
    if tau is None:
        tau = config.data.seq_length // 4
    counts = np.zeros(64, dtype=np.int64)
    for row in outlines:
        buckets = exposure_buckets(row, document_mask=document_mask)
        counts += np.bincount(buckets[row.trained], minlength=len(counts))
    first_contexts = 2.0 ** (np.arange(len(counts)) - 1)
    tail = np.flatnonzero((first_contexts >= max(tau, LOWEST_TAIL)) & (counts > 0))
    shares = counts[tail] / counts[tail].sum()
    rarities = (shares / shares.min(initial=1.0)) ** -options.exposure_gamma  # at most 1: no power overflows
    weights = np.ones(len(counts), dtype=np.float32)
    weights[tail] += options.exposure_alpha * rarities / (shares * rarities).sum()

    def weighed(sample: int) -> TokenRow:
        row = row_at(sample)
        return replace(row, weights=weights[exposure_buckets(row, document_mask=document_mask)])

    return weighed
