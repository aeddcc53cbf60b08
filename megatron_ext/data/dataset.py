"""Rows of tokens drawn from documents: every row is a pure function of (seed, sample index).

    documents, shuffled anew each epoch   |d2 d2|d0|d1 d1 d1|d1 d1 d1|d2 d2|d0| ...   one endless stream
    cut every L tokens                    |-- row 0 --|-- row 1 --|-- row 2 --| ...   each + 1 label token
    rows of an epoch, shuffled            sample 0 -> row 1, sample 1 -> row 0, ...

Nothing is counted in a worker and nothing is precomputed but the order of the epoch at hand, so a resumed
run, another micro-batch size or another number of ranks reads the very same rows.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from megatron_ext.errors import UserError

EPOCHS_KEPT = 2  # a row may span two epochs, so at least two orders stay at hand
MOST_SAMPLES = 10**15  # up to here the rounding of floats leaves a blend exact
Value = TypeVar("Value")


class TokenSource(Protocol):
    """Random access to the tokens of documents.

    `document_lengths`: int64 [documents], tokens of each document, its end-of-document token (EOD) included.
    """

    document_lengths: np.ndarray

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        """Token ids int64 [length] of `document` from its token `offset` on."""
        ...

    def read_weights(self, document: int, offset: int, length: int) -> np.ndarray | None:
        """float32 [length], the weights of these tokens' losses; None where the source has none."""
        ...

    def read_mask(self, document: int, offset: int, length: int) -> np.ndarray | None:
        """bool [length], whether each of these tokens is trained as a label; None where all are."""
        ...


@dataclass(frozen=True)
class TokenRow:
    """One training row of L inputs and L labels.

        tokens          a a EOD b b b EOD | c        L = 7, and one more token: the last label
        document_ends         3         7            a document ends *after* its EOD
        trained         1 1  1  1 1 1  1             with mask_eod: 1 1 0 1 1 1 0
        of a chat       0 1  0  1 1 1  0             the assistant says the second a and all b

    tokens: int64 [L+1]; tokens[:-1] are inputs, tokens[1:] labels.
    document_ends: int64 [n], strictly increasing, in 1..L: tokens[e-1] is a document's last token.
    trained: bool [L]: the label at this position counts in the loss.
    weights: float32 [L], factors of the losses, where the data set brings its own.
    """

    tokens: np.ndarray
    document_ends: np.ndarray
    trained: np.ndarray
    weights: np.ndarray | None = None


class RowSource(Protocol):
    """An endless sequence of rows of one length, each a pure function of its sample index.

    row_length: L, in tokens.
    row_tokens: how many of them hold a token, on average; the others are padding.
    """

    row_length: int
    row_tokens: float

    def row(self, sample: int) -> TokenRow:
        """The row of sample 0, 1, 2, ..."""
        ...


class Purpose(IntEnum):
    """What a permutation is for: those of one seed and epoch must differ."""

    DOCUMENTS = 0
    ROWS = 1


@dataclass(frozen=True)
class _DocumentOrder:
    documents: np.ndarray  # int64 [n]: the epoch's documents, in their order
    ends: np.ndarray  # int64 [n]: tokens of the epoch up to and including each


def permutation(count: int, seed: int, epoch: int, purpose: Purpose) -> np.ndarray:
    """A permutation int64 [count] drawn from (seed, epoch, purpose), the same with every numpy version.

    Philox's raw words are fixed by its definition; what `Generator` makes of them is not.
    """
    return np.argsort(random_words(count, seed, epoch, purpose), kind="stable")


def random_words(count: int, seed: int, epoch: int, purpose: Purpose) -> np.ndarray:
    """uint64 [count] drawn from (seed, epoch, purpose)."""
    key = np.array([seed, epoch * len(Purpose) + purpose], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def recall(cache: OrderedDict[int, Value], key: int, compute: Callable[[int], Value]) -> Value:
    """`compute(key)`, the last EPOCHS_KEPT answers being remembered."""
    if key in cache:
        cache.move_to_end(key)
        return cache[key]
    value = compute(key)
    cache[key] = value
    while len(cache) > EPOCHS_KEPT:
        cache.popitem(last=False)
    return value


class RowDataset:
    """`random` packing: documents are concatenated and cut every L tokens, without end.

    With T tokens in the split, epoch e is its documents in an order drawn from (seed, e) and fills the
    stream's tokens [eT, (e+1)T). Row r is stream[rL .. rL+L], both included; the last token is only a label.
    The rows that start in epoch e are permuted among themselves, by (seed, e) too. No token is lost or
    doubled, also where a row spans the border of two epochs, or (T < L) many.

    Args:
        source: the tokens.
        documents: int [n], the documents of this split (indices into `source`); empty ones are dropped.
        row_length: L, in tokens.
        seed: 0 .. 2^64-1.
        mask_eod: do not train on the label after a document's last token (Megatron-LM's --eod-mask-loss).

    Raises:
        UserError: no tokens in the split, a row length below 1, a seed or document out of range.
    """

    def __init__(
        self,
        source: TokenSource,
        documents: Sequence[int] | np.ndarray,
        row_length: int,
        seed: int,
        *,
        mask_eod: bool = False,
    ) -> None:
        check_row_length(row_length)
        check_seed(seed)
        self.source = source
        self.row_length = int(row_length)
        self.row_tokens = float(row_length)
        self.seed = int(seed)
        self.mask_eod = mask_eod
        self._documents, self._lengths = nonempty(source, documents)
        self.tokens_per_epoch = int(self._lengths.sum())
        self._document_orders: OrderedDict[int, _DocumentOrder] = OrderedDict()
        self._row_orders: OrderedDict[int, np.ndarray] = OrderedDict()

    def row(self, sample: int) -> TokenRow:
        """The row of sample 0, 1, 2, ...: a pure function of (seed, sample)."""
        return self._cut(self.row_index(sample))

    def row_index(self, sample: int) -> int:
        """The row that `sample` shows: a permutation of the rows that start in the same epoch."""
        assert sample >= 0, sample
        # Row r starts at token rL, so the rows of an epoch are consecutive, and the samples with them.
        epoch = sample * self.row_length // self.tokens_per_epoch
        order = recall(self._row_orders, epoch, self._order_rows)
        first = self._first_row(epoch)
        return first + int(order[sample - first])

    def _first_row(self, epoch: int) -> int:
        return -(-epoch * self.tokens_per_epoch // self.row_length)

    def _order_rows(self, epoch: int) -> np.ndarray:
        return permutation(self._first_row(epoch + 1) - self._first_row(epoch), self.seed, epoch, Purpose.ROWS)

    def _order_documents(self, epoch: int) -> _DocumentOrder:
        order = permutation(len(self._documents), self.seed, epoch, Purpose.DOCUMENTS)
        return _DocumentOrder(self._documents[order], np.cumsum(self._lengths[order]))

    def _cut(self, row: int) -> TokenRow:
        length = self.row_length
        drawn = _Drawn(np.empty(length + 1, dtype=np.int64), np.ones(length + 1, dtype=np.bool_))
        while drawn.filled <= length:
            self._read_epoch(*divmod(row * length + drawn.filled, self.tokens_per_epoch), drawn)
        ends = drawn.ends
        if ends and ends[-1] > length:  # the label token is a document's last: that border is the next row's
            ends.pop()
        document_ends, trained = np.array(ends, dtype=np.int64), drawn.mask[1:]
        if self.mask_eod:
            trained[document_ends - 1] = False
        weights = np.concatenate(drawn.weights)[1:] if drawn.weights else None
        return TokenRow(drawn.tokens, document_ends, trained, weights)

    def _read_epoch(self, epoch: int, start: int, drawn: _Drawn) -> None:
        """Fill up with the tokens of `epoch` from its token `start` on."""
        order = recall(self._document_orders, epoch, self._order_documents)
        place = int(np.searchsorted(order.ends, start, side="right"))
        while drawn.filled < len(drawn.tokens) and place < len(order.documents):
            rest = int(order.ends[place]) - start
            count = min(rest, len(drawn.tokens) - drawn.filled)
            document = int(order.documents[place])
            drawn.read(self.source, document, int(self.source.document_lengths[document]) - rest, count)
            start, place = start + count, place + 1
            if count == rest:
                drawn.ends.append(drawn.filled)


@dataclass
class _Drawn:
    """A row on its way: tokens int64 [L+1], mask bool [L+1]; the first `filled` of both are read."""

    tokens: np.ndarray
    mask: np.ndarray
    ends: list[int] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    filled: int = 0

    def read(self, source: TokenSource, document: int, offset: int, count: int) -> None:
        place = slice(self.filled, self.filled + count)
        self.tokens[place] = source.read(document, offset, count)
        mask, weights = source.read_mask(document, offset, count), source.read_weights(document, offset, count)
        if mask is not None:
            self.mask[place] = mask
        if weights is not None:
            self.weights.append(weights)
        self.filled += count


def check_row_length(row_length: int) -> None:
    """Raises: UserError where it is below 1."""
    if row_length < 1:
        raise UserError(f"row_length: got {row_length}, needs at least 1 token")


def check_seed(seed: int) -> None:
    """Raises: UserError where it is no unsigned 64-bit number."""
    if not 0 <= seed < 2**64:
        raise UserError(f"seed: got {seed}, needs 0 <= seed < 2^64")


def check_samples(samples: int) -> None:
    """Raises: UserError where a run takes samples that no blend of data sets counts exactly."""
    if samples > MOST_SAMPLES:
        raise UserError(
            f"first_sample: got a run up to sample {samples:,} (first_sample + train_iters x global_batch_size), "
            f"needs at most {MOST_SAMPLES:,}; lower it"
        )


def part_seed(seed: int, place: int) -> int:
    """The seed of a mixture's part, counted from 0: one after the other, and 0 after 2^64-1."""
    return (seed + place) % 2**64


def nonempty(source: TokenSource, documents: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documents that hold tokens and their lengths, both int64 [n].

    Raises:
        UserError: an index out of range, or not a single token.
    """
    chosen = np.asarray(documents, dtype=np.int64)
    total = len(source.document_lengths)
    if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < total:
        raise UserError(
            f"documents: got indices {chosen.min()}..{chosen.max()}, but the data set has {total} documents"
        )
    lengths = np.asarray(source.document_lengths, dtype=np.int64)[chosen]
    if not lengths.any():
        raise UserError(
            f"documents: this split has no tokens ({chosen.size} documents); "
            "give it a share in --split, or use a larger data set"
        )
    return chosen[lengths > 0], lengths[lengths > 0]


class Draw(NamedTuple):
    """Where a blended sample comes from: sample number `sample` of data set number `dataset`."""

    dataset: int
    sample: int


class BlendedRows:
    """Several data sets mixed by weight: a pure function of the sample index.

    The k-th sample of data set d happens at the virtual time (k + 1/2) / w_d, with weights w that sum to 1;
    ties go to the lower d. Sample i is the i-th of all these events in order, so each data set is read in
    order 0, 1, 2, ... and after i samples it was drawn i*w_d times, give or take (1 + w_d (D - 2)) / 2: half
    a sample for two data sets.

        w = 2/3, 1/3:   d0 at 0.75, 2.25, 3.75, ...   d1 at 1.5, 4.5, ...   ->   d0 d1 d0 d0 d1 d0 ...

    Args:
        datasets: D data sets of the same row length.
        weights: D positive numbers, shares of the tokens (padding is none); only their ratios matter.

    Raises:
        UserError: no data set, too many or too few weights, row lengths that differ, a weight that is not a
            positive finite number or vanishes beside the others.
    """

    def __init__(self, datasets: Sequence[RowSource], weights: Sequence[float]) -> None:
        if not datasets or len(datasets) != len(weights):
            raise UserError(f"blend: got {len(datasets)} data sets and {len(weights)} weights; give each one weight")
        lengths = sorted({dataset.row_length for dataset in datasets})
        if len(lengths) > 1:
            raise UserError(f"blend: the data sets' row lengths differ ({lengths}); give all of them the same")
        self.datasets = tuple(datasets)
        self.row_length = lengths[0]
        filled = [dataset.row_tokens / self.row_length for dataset in datasets]
        self.weights = _normalise([weight / share for weight, share in zip(weights, filled, strict=True)])
        self.row_tokens = math.fsum(w * dataset.row_tokens for w, dataset in zip(self.weights, datasets, strict=True))

    def row(self, sample: int) -> TokenRow:
        """The row of sample 0, 1, 2, ... of the blend."""
        draw = self.locate(sample)
        return self.datasets[draw.dataset].row(draw.sample)

    def locate(self, sample: int) -> Draw:
        """The data set, and its own sample, behind a sample of the blend; O(D log D)."""
        assert sample >= 0, sample
        # Before time t, data set d has ceil(t w_d - 1/2) events: the D of them at most t + D/2 together, at
        # least t - D/2. So fewer than `sample` events lie before this time, with room for the rounding of
        # samples up to MOST_SAMPLES, and no more than D + 1 are left to be counted one by one, by their exact keys.
        time = max(0.0, sample - len(self.weights) / 2 - 1)
        counts = [max(0, math.ceil(time * weight - 0.5)) for weight in self.weights]
        queue = [((count + 0.5) / self.weights[d], d, count) for d, count in enumerate(counts)]
        heapq.heapify(queue)
        for _ in range(sample - sum(counts)):
            _, d, count = queue[0]
            heapq.heapreplace(queue, ((count + 1.5) / self.weights[d], d, count + 1))
        return Draw(dataset=queue[0][1], sample=queue[0][2])


def _normalise(weights: Sequence[float]) -> tuple[float, ...]:
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"blend: weight {number} is {weight}; needs a positive finite number")
    largest = max(weights)  # dividing by it first keeps the sum finite
    total = math.fsum(weight / largest for weight in weights)
    shares = tuple(weight / largest / total for weight in weights)
    for number, share in enumerate(shares):
        if share < 1e-300:  # its virtual times would overflow
            raise UserError(f"blend: weight {number} is {weights[number]}, nothing beside {largest}; leave it out")
    return shares


def parse_blend(data_path: Sequence[str]) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Weights and prefixes of Megatron-LM's `--data-path PREFIX` or `--data-path 0.3 A 0.7 B`.

        parse_blend(["0.3", "A", "0.7", "B"]) == ((0.3, 0.7), ("A", "B"))

    Raises:
        UserError: no prefix, a weight missing or not a positive number.
    """
    if len(data_path) == 1:
        return (1.0,), (data_path[0],)
    usage = "use --data-path PREFIX, or a weight before each prefix: --data-path 0.3 A 0.7 B"
    if not data_path or len(data_path) % 2:
        raise UserError(f"data_path: got {len(data_path)} values ({' '.join(data_path)}); {usage}")
    weights = []
    for text in data_path[::2]:
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"data_path: got {text!r} where a positive weight belongs; {usage}")
        weights.append(weight)
    return tuple(weights), tuple(data_path[1::2])
