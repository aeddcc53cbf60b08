"""Draw rows of tokens from documents; every row is a pure function of (seed, sample index).

    documents, shuffled in each epoch     |d2 d2|d0|d1 d1 d1|d1 d1 d1|d2 d2|d0| ...   one endless stream
    cut every L tokens                    |-- row 0 --|-- row 1 --|-- row 2 --| ...   each + 1 label token
    rows of an epoch, shuffled            sample 0 -> row 1, sample 1 -> row 0, ...

Workers have no counters, and only the order of the current epoch is precomputed, so a resumed run, another micro-batch
size or another number of ranks reads exactly the same rows.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from megatron_ext.data.indexed import Documents, IndexedSource, nonempty
from megatron_ext.data.row import EPOCHS_KEPT, Purpose, TokenRow, permutation


class RowDataset:
    """Random packing: documents are concatenated and cut every L tokens, without end.

    With T tokens in the split, epoch e consists of its documents in an order drawn from (seed, e) and fills the
    stream's tokens [eT, (e+1)T). Row r is stream[rL .. rL+L], both included; the last token is only a label. The rows
    that start in epoch e are permuted among themselves, also by (seed, e). No token is lost or repeated, even if a row
    spans the border of two or (if T < L) more epochs.

    `documents` are those of the split, indices into `source`; empty ones are dropped. With `mask_eod` the label after a
    document's last token is not trained (Megatron-LM's --eod-mask-loss).
    """

    def __init__(
        self, source: IndexedSource, documents: Documents, row_length: int, seed: int, *, mask_eod: bool = False
    ) -> None:
        self.source, self.seed, self.mask_eod = source, seed, mask_eod
        self.row_length, self.row_tokens = row_length, float(row_length)
        self._documents, self._lengths = nonempty(source, documents)
        self.tokens_per_epoch = int(self._lengths.sum())
        self._document_order = lru_cache(EPOCHS_KEPT)(self._draw_document_order)
        self._row_order = lru_cache(EPOCHS_KEPT)(self._draw_row_order)

    def row(self, sample: int) -> TokenRow:
        """Return the row of sample 0, 1, 2, ...: a pure function of (seed, sample)."""
        length, source = self.row_length, self.source
        tokens, mask = np.empty(length + 1, dtype=np.int64), np.empty(length + 1, dtype=np.bool_)
        ends: list[int] = []
        weights: list[np.ndarray] = []
        filled = 0
        for document, offset, count in self._pieces(self.row_index(sample) * length, length + 1):
            tokens[filled : filled + count] = source.read(document, offset, count)
            mask[filled : filled + count] = source.read_mask(document, offset, count)
            if (of_tokens := source.read_weights(document, offset, count)) is not None:
                weights.append(of_tokens)
            filled += count
            # If the label token is a document's last, its border belongs to the next row.
            if filled <= length and offset + count == source.document_lengths[document]:
                ends.append(filled)
        document_ends, trained = np.array(ends, dtype=np.int64), mask[1:]
        if self.mask_eod:
            trained[document_ends - 1] = False
        return TokenRow(tokens, document_ends, trained, np.concatenate(weights)[1:] if weights else None)

    def row_index(self, sample: int) -> int:
        """Return the row for `sample`: a permutation of the rows that start in the same epoch."""
        assert sample >= 0, sample
        # Row r starts at token rL, so the rows of an epoch are consecutive, and so are the samples.
        epoch = sample * self.row_length // self.tokens_per_epoch
        first, order = self._row_order(epoch)
        return first + int(order[sample - first])

    def _draw_row_order(self, epoch: int) -> tuple[int, np.ndarray]:
        """Return the first row that starts in an epoch, and the order of these rows."""
        first, following = (-(-at * self.tokens_per_epoch // self.row_length) for at in (epoch, epoch + 1))
        return first, permutation(following - first, self.seed, epoch, Purpose.ROWS)

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, first token, tokens) for the stream's tokens [start, start + count)."""
        while count:
            epoch, at = divmod(start, self.tokens_per_epoch)
            documents, ends = self._document_order(epoch)
            # from the document of token `at` of the epoch to the last one needed, or the epoch's last
            for number in range(int(np.searchsorted(ends, at, side="right")), len(documents)):
                document, rest = int(documents[number]), int(ends[number]) - at
                taken = min(rest, count)
                yield document, int(self.source.document_lengths[document]) - rest, taken
                at, start, count = at + taken, start + taken, count - taken
                if not count:
                    return

    def _draw_document_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents of an epoch, in order, and its tokens up to the end of each."""
        order = permutation(len(self._documents), self.seed, epoch, Purpose.DOCUMENTS)
        return self._documents[order], np.cumsum(self._lengths[order])
