"""The order of an epoch: its documents, where its rows begin, and the order in which the rows are read."""

from dataclasses import dataclass

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.row import Purpose, permutation


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The D documents of an epoch and the R rows that start in it.

    The r-th of these rows begins in the epoch's document number `row_starts[r, 0]`, after `row_starts[r, 1]` of its
    tokens. The epoch's sample s is its row `row_order[s]`.
    """

    documents: np.ndarray  # uint32 or int64 [D], indices into the data set
    row_starts: Int64  # [R, 2]
    row_order: Int64  # [R]


def rows_before(epoch: int, tokens: int, row_length: int) -> int:
    """Return the number of rows that start before an epoch, if every epoch has `tokens` tokens."""
    return -(-epoch * tokens // row_length)


def draw_order(source: IndexedSource, documents: range, row_length: int, seed: int, epoch: int) -> EpochOrder:
    """Draw the order of an epoch of some documents of a data set; empty documents are left out."""
    lengths = source.lengths_in(documents)
    tokens = int(lengths.sum())
    first_row = rows_before(epoch, tokens, row_length)
    next_row = rows_before(epoch + 1, tokens, row_length)
    nonempty = np.flatnonzero(lengths)
    order = permutation(len(nonempty), seed, epoch, Purpose.DOCUMENTS)
    if len(nonempty) < len(lengths):
        order = nonempty[order]
    ends = np.cumsum(lengths[order])
    # row r begins at token r L of the stream of all epochs
    places = np.arange(first_row, next_row, dtype=np.int64) * row_length - epoch * tokens
    numbers = np.searchsorted(ends, places, side="right")
    offsets = places - ends[numbers] + lengths[order[numbers]]
    order += documents.start
    if documents.stop <= 2**32:
        order = order.astype(np.uint32)
    return EpochOrder(
        documents=order,
        row_starts=np.stack([numbers, offsets], axis=1),
        row_order=permutation(next_row - first_row, seed, epoch, Purpose.ROWS),
    )
