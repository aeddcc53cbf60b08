"""Draw rows of tokens from documents; every row is a pure function of (seed, sample index).

    documents, shuffled in each epoch     |d2 d2|d0|d1 d1 d1|d1 d1 d1|d2 d2|d0| ...   one endless stream
    cut every L tokens                    |-- row 0 --|-- row 1 --|-- row 2 --| ...   each + 1 label token
    rows of an epoch, shuffled            sample 0 -> row 1, sample 1 -> row 0, ...

Workers have no counters, and only the order of an epoch is computed in advance (`order.py`), so a resumed run, another
micro-batch size or another number of ranks reads exactly the same rows.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_ext.data.indexed import IndexedSource, no_tokens
from megatron_ext.data.kept import LARGE, Arrays, Key, compute_ahead, kept_arrays
from megatron_ext.data.row import EPOCHS_KEPT, RowOutline, TokenRow
from megatron_ext.data.rows.order import EpochOrder, draw_order, rows_before
from megatron_ext.errors import UserError

Piece = tuple[int, int, int]  # document, its first token used, number of tokens
_LEAD = 0.1  # share of an epoch's samples before which the order of the next one is drawn, until it is needed


class RowDataset:
    """Random packing: documents are concatenated and cut every L tokens, without end.

    With T tokens in the split, epoch e consists of its documents in an order drawn from (seed, e) and fills the
    stream's tokens [eT, (e+1)T). Row r is stream[rL .. rL+L], both included; the last token is only a label. The rows
    that start in epoch e are permuted among themselves, also by (seed, e). No token is lost or repeated, even if a row
    spans the border of two or (if T < L) more epochs.

    `documents` are the split's indices into `source`; empty documents are dropped. With `mask_eod` the label after a
    document's last token is not trained (Megatron-LM's --eod-mask-loss). Orders of many documents or rows are kept in
    `cache`, unless it is None; the process that `prepares` draws the order of the next epoch before it is needed.
    """

    def __init__(
        self,
        source: IndexedSource,
        documents: range,
        row_length: int,
        seed: int,
        *,
        mask_eod: bool = False,
        cache: Path | None = None,
        prepares: bool = False,
    ) -> None:
        self.source = source
        self.documents = documents
        self.seed = seed
        self.mask_eod = mask_eod
        self.row_length = row_length
        self.row_tokens = float(row_length)
        self.prepares = prepares
        self.tokens_per_epoch = source.tokens_in(documents)
        if not self.tokens_per_epoch:
            raise no_tokens(len(documents))
        self.cache = cache if max(len(documents), self.tokens_per_epoch // row_length) >= LARGE else None
        self._order = lru_cache(EPOCHS_KEPT)(self._open_order)
        self._last_row_at = lru_cache(EPOCHS_KEPT)(self._find_last_row)
        self._preparation: threading.Thread | None = None

    def row(self, sample: int) -> TokenRow:
        """Return the row of sample 0, 1, 2, ...: a pure function of (seed, sample)."""
        pieces = self._pieces(sample)
        tokens = np.concatenate([self.source.read(*piece) for piece in pieces])
        by_piece = [self.source.read_weights(*piece) for piece in pieces]
        arrays = [array for array in by_piece if array is not None]
        weights = np.concatenate(arrays)[1:] if arrays else None
        outline = self._outline(pieces)
        return TokenRow(tokens, outline.document_ends, outline.trained, weights)

    def outline(self, sample: int) -> RowOutline:
        """Return the outline of the row of a sample, without reading its tokens."""
        return self._outline(self._pieces(sample))

    def _outline(self, pieces: Sequence[Piece]) -> RowOutline:
        mask = np.empty(self.row_length + 1, dtype=np.bool_)
        ends: list[int] = []
        filled = 0
        for document, offset, count in pieces:
            mask[filled : filled + count] = self.source.read_mask(document, offset, count)
            filled += count
            # If the label token is a document's last, its border belongs to the next row.
            if filled <= self.row_length and offset + count == self.source.document_length(document):
                ends.append(filled)
        document_ends = np.array(ends, dtype=np.int64)
        trained = mask[1:]
        if self.mask_eod:
            trained[document_ends - 1] = False
        return RowOutline(document_ends, trained)

    def row_index(self, sample: int) -> int:
        """Return the row for `sample`: a permutation of the rows that start in the same epoch."""
        assert sample >= 0, sample
        # Row r starts at token rL, so the rows of an epoch are consecutive, and so are the samples.
        epoch = self._epoch_of(sample)
        first_row = self._first_row(epoch)
        order = self._order(epoch).row_order
        number = sample - first_row
        if self.prepares and number >= self._last_row_at(epoch) - _LEAD * len(order):
            self._prepare(epoch + 1)
        return first_row + int(order[number])

    def _find_last_row(self, epoch: int) -> int:
        """Return the place among an epoch's samples of its last row, which ends in the next epoch."""
        order = self._order(epoch).row_order
        return int(np.flatnonzero(order == len(order) - 1)[0])

    def _epoch_of(self, row: int) -> int:
        """Return the epoch in which a row, or a sample, starts."""
        return row * self.row_length // self.tokens_per_epoch

    def _first_row(self, epoch: int) -> int:
        """Return the first row that starts in an epoch."""
        return rows_before(epoch, self.tokens_per_epoch, self.row_length)

    def _pieces(self, sample: int) -> list[Piece]:
        """Return the pieces of documents of the L + 1 tokens of a sample's row, label included."""
        row = self.row_index(sample)
        epoch = self._epoch_of(row)
        order = self._order(epoch)
        number, offset = order.row_starts[row - self._first_row(epoch)].tolist()
        missing = self.row_length + 1
        pieces = []
        while missing:
            if number == len(order.documents):
                epoch += 1
                order = self._order(epoch)
                number = 0
            document = int(order.documents[number])
            length = 0
            if document in self.documents:
                length = self.source.document_length(document)
            if not 0 <= offset < length:
                raise UserError(f"{self.cache}: an order in this folder is damaged; remove the folder and start again")
            count = min(length - offset, missing)
            pieces.append((document, offset, count))
            missing -= count
            number += 1
            offset = 0
        return pieces

    def _open_order(self, epoch: int) -> EpochOrder:
        if self.cache is None:
            return EpochOrder(**self._draw_order(epoch))
        if self._preparation is not None:
            self._preparation.join()
        return EpochOrder(**kept_arrays(self.cache, self._key(epoch), lambda: self._draw_order(epoch)))

    def _draw_order(self, epoch: int) -> Arrays:
        return vars(draw_order(self.source, self.documents, self.row_length, self.seed, epoch))

    def _key(self, epoch: int) -> Key:
        return {
            "index": self.source.index_fingerprint,
            "first_document": self.documents.start,
            "documents": len(self.documents),
            "row_length": self.row_length,
            "seed": self.seed,
            "epoch": epoch,
        }

    def _prepare(self, epoch: int) -> None:
        """Draw the order of an epoch in a thread, once; without a cache, when it is needed."""
        if self.cache is None or (self._preparation is not None and self._preparation.name == str(epoch)):
            return
        draw = (self.cache, epoch)
        # a daemon, because a run that stops must not wait for it
        self._preparation = threading.Thread(target=self._draw_ahead, args=draw, name=str(epoch), daemon=True)
        self._preparation.start()

    def _draw_ahead(self, cache: Path, epoch: int) -> None:
        with suppress(OSError):  # the folder cannot be written: `_open_order` says so
            compute_ahead(cache, self._key(epoch), lambda: self._draw_order(epoch))
