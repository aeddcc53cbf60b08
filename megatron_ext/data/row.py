"""A training row, where rows come from, and the random order in which they are read."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

EPOCHS_KEPT = 2  # a row may span two epochs, so at least two orders are kept


@dataclass(frozen=True)
class TokenRow:
    """A training row of L inputs and L labels.

    tokens          a a EOD b b b EOD | c        L = 7, and one more token: the last label
    document_ends         3         7            a document ends *after* its EOD
    trained         1 1  1  1 1 1  1             with mask_eod: 1 1 0 1 1 1 0
    of a chat       0 1  0  1 1 1  0             the second a and all b are the assistant's
    """

    tokens: np.ndarray  # int64 [L+1]; tokens[:-1] are inputs, tokens[1:] labels
    document_ends: np.ndarray  # int64 [n], strictly increasing, in 1..L: tokens[e-1] is a document's last token
    trained: np.ndarray  # bool [L], whether the label at this position counts in the loss
    weights: np.ndarray | None = None  # float32 [L], factors of the losses, if the data set has them


@dataclass(frozen=True)
class RowOutline:
    """A row without its tokens. It follows from the lengths of documents alone, unless the data set has a mask."""

    document_ends: np.ndarray  # as in TokenRow
    trained: np.ndarray


class RowSource(Protocol):
    """An endless sequence of rows of one length, each a pure function of its sample index."""

    row_length: int  # L, in tokens
    row_tokens: float  # mean number of tokens of a row, without padding

    def row(self, sample: int) -> TokenRow:
        """Return the row of sample 0, 1, 2, ..."""
        ...

    def outline(self, sample: int) -> RowOutline:
        """Return the outline of the row of a sample, without reading its tokens."""
        ...


class Purpose(IntEnum):
    """Purposes of random permutations, which must differ for the same seed and epoch."""

    DOCUMENTS = 0
    ROWS = 1


def permutation(count: int, seed: int, epoch: int, purpose: Purpose) -> np.ndarray:
    """Return a random permutation int64 [count] for (seed, epoch, purpose), the same with every numpy version.

    It sorts Philox's raw words, which its definition fixes, unlike the methods of `Generator`; equal words stay in
    order. Sorting keys, whose upper bits are the word's and whose lower bits its index, is faster than
    `np.argsort`, and orders all but the few words with equal upper bits.
    """
    words = random_words(count, seed, epoch, purpose)
    index_bits = np.uint64(count.bit_length())
    index_mask = (np.uint64(1) << index_bits) - np.uint64(1)
    keys = words & ~index_mask
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    order = (keys & index_mask).view(np.int64)
    keys >>= index_bits
    equal = np.flatnonzero(keys[1:] == keys[:-1])
    if equal.size:
        places = np.union1d(equal, equal + 1)
        indices = order[places]
        order[places] = indices[np.lexsort((indices, words[indices]))]
    return order


def random_words(count: int, seed: int, epoch: int, purpose: Purpose) -> np.ndarray:
    """Return random uint64 [count] for (seed, epoch, purpose)."""
    key = np.array([seed, epoch * len(Purpose) + purpose], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)
