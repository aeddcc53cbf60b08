"""Mix rows of several data sets by weight, and fill rows with several shorter sequences."""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from megatron_ext.data.row import RowOutline, RowSource, TokenRow


class BlendedRows:
    """Mixes several data sets by weight; a pure function of the sample index.

    The k-th sample of data set d has the virtual time (k + 1/2) / w_d, with weights w that sum to 1; ties go to the
    lower d. Sample i of the blend is the i-th in order of these times. So each data set is read in order 0, 1, 2, ...,
    and after i samples it has been drawn i*w_d times, with a deviation of at most (1 + w_d (D - 2)) / 2: half a sample
    for two data sets.

        w = 2/3, 1/3:   d0 at 0.75, 2.25, 3.75, ...   d1 at 1.5, 4.5, ...   ->   d0 d1 d0 d0 d1 d0 ...

    The given `weights` are shares of the tokens (without padding); only their ratios matter. `shares` are the same,
    scaled to a sum of 1. Equal `labels` are numbered.
    """

    def __init__(self, datasets: Sequence[RowSource], weights: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.datasets = tuple(datasets)
        self.shares = scaled(weights)
        self.labels = list(labels)
        for number, label in enumerate(labels):
            if labels.count(label) > 1:
                self.labels[number] = f"{label} ({labels[: number + 1].count(label)})"
        (self.row_length,) = {dataset.row_length for dataset in datasets}
        filled = [dataset.row_tokens / self.row_length for dataset in datasets]
        self.weights = scaled([weight / share for weight, share in zip(weights, filled, strict=True)])
        self.row_tokens = math.fsum(w * dataset.row_tokens for w, dataset in zip(self.weights, datasets, strict=True))

    def row(self, sample: int) -> TokenRow:
        dataset, number = self.locate(sample)
        return self.datasets[dataset].row(number)

    def outline(self, sample: int) -> RowOutline:
        dataset, number = self.locate(sample)
        return self.datasets[dataset].outline(number)

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the data set of a sample of the blend, and its sample there; O(D log D)."""
        _, dataset, number = self._queue(sample)[0]
        return dataset, number

    def rows_of(self, samples: range) -> dict[str, int]:
        """Return the number of rows of each data set in a range of samples, by its label; O(D log D)."""
        before = {d: count for _, d, count in self._queue(samples.start)}
        after = {d: count for _, d, count in self._queue(samples.stop)}
        return {label: after[d] - before[d] for d, label in enumerate(self.labels)}

    def _queue(self, sample: int) -> list[tuple[float, int, int]]:
        """Return a heap with each data set's next event after `sample` events: time, data set, its sample."""
        assert sample >= 0, sample
        # Before time t, data set d has ceil(t w_d - 1/2) events; together they have between t - D/2 and t + D/2. So
        # fewer than `sample` events are before this time, with a margin for the rounding of samples up to 10^15,
        # and at most D + 1 remain to be counted one by one, by their exact keys.
        time = max(0.0, sample - len(self.weights) / 2 - 1)
        counts = [max(0, math.ceil(time * weight - 0.5)) for weight in self.weights]
        queue = [((count + 0.5) / self.weights[d], d, count) for d, count in enumerate(counts)]
        heapq.heapify(queue)
        for _ in range(sample - sum(counts)):
            _, d, count = queue[0]
            heapq.heapreplace(queue, ((count + 1.5) / self.weights[d], d, count + 1))
        return queue


class LaidSequences:
    """Concatenates L/n sequences of n tokens into rows of L tokens.

        sequences    a a a a | b EOD c c        n = 4, L = 8
        ends                 4     6            every sequence begins a document
        trained      1 1 1 0   1 1  1 1         the label after a sequence is the first token of another

    Row s has the sequences s * L/n .. (s+1) * L/n - 1; L is a multiple of n.
    """

    def __init__(self, sequences: RowSource, row_length: int) -> None:
        assert row_length % sequences.row_length == 0, (row_length, sequences.row_length)
        self.sequences = sequences
        self.row_length = row_length
        self.count = row_length // sequences.row_length
        self.row_tokens = sequences.row_tokens * self.count

    def row(self, sample: int) -> TokenRow:
        rows = [self.sequences.row(number) for number in self._numbers(sample)]
        tokens = np.concatenate([*(row.tokens[:-1] for row in rows), rows[-1].tokens[-1:]])
        by_sequence = [row.weights for row in rows if row.weights is not None]
        weights = np.concatenate(by_sequence) if by_sequence else None
        outline = self._laid(rows)
        return TokenRow(tokens, outline.document_ends, outline.trained, weights)

    def outline(self, sample: int) -> RowOutline:
        return self._laid([self.sequences.outline(number) for number in self._numbers(sample)])

    def _numbers(self, sample: int) -> range:
        """Return the numbers of a row's sequences."""
        return range(sample * self.count, (sample + 1) * self.count)

    def _laid(self, outlines: Sequence[RowOutline | TokenRow]) -> RowOutline:
        length = self.sequences.row_length
        trained = np.concatenate([outline.trained for outline in outlines])
        trained[length - 1 : -1 : length] = False
        borders = np.arange(length, self.row_length, length)
        ends = np.concatenate([outline.document_ends + number * length for number, outline in enumerate(outlines)])
        return RowOutline(np.union1d(ends, borders), trained)


def scaled(weights: Sequence[float]) -> tuple[float, ...]:
    """Scale positive weights to a sum of 1."""
    largest = max(weights)  # dividing by it first keeps the sum finite
    total = math.fsum(weight / largest for weight in weights)
    return tuple(weight / largest / total for weight in weights)
