"""Read the rows of a packing plan."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.kept import LARGE, kept_arrays
from megatron_ext.data.packing.plan import PackingPlan
from megatron_ext.data.row import EPOCHS_KEPT, Purpose, RowOutline, TokenRow, permutation


class PackedRows:
    """The rows of a plan, repeated endlessly.

    Each epoch has all rows, in an order drawn from (seed, epoch), or in the plan's own order.

        pieces            a a a EOD | b b b | c c EOD      L = 12; b is cut before and after, c is no whole document
        tokens            a a a EOD   b b b   c c EOD 0 0  0        the last one is only a label
        document_ends             4       7        10
        trained           1 1 1 0     1 1 0   1 1 0   0 0

    - A piece that ends inside the row ends a document there, even if it is cut, because what follows is unrelated. A
      piece that ends with the row has an end only if its document ends there. If the plan joins documents, no document
      ends inside the row.
    - A label is trained if it is the next token of the same document, even if the plan has it in another row or in
      none. The first token of a document is trained after the last one of another, with `mask_eod` only if the plan
      joins documents. If the data set has a mask, it must select the label too.
    - Padding is `pad_id`, never trained, and a separate document, so no other token attends to it. The last label is
      `pad_id`, not trained, if the row's last piece ends its document.

    `plan` is of any policy but `random`, whose rows are read by `RowDataset`. Orders of many rows are kept in `cache`,
    unless it is None.
    """

    def __init__(
        self,
        source: IndexedSource,
        plan: PackingPlan,
        seed: int,
        *,
        mask_eod: bool = False,
        pad_id: int = 0,
        cache: Path | None = None,
    ) -> None:
        self.source = source
        self.plan = plan
        self.seed = int(seed)
        self.mask_eod = mask_eod
        self.pad_id = pad_id
        self.row_length = plan.row_length
        self.row_tokens = plan.tokens / plan.rows
        self.cache = cache if plan.rows >= LARGE else None
        self._order = lru_cache(EPOCHS_KEPT)(self._open_order)

    def row(self, sample: int) -> TokenRow:
        """Return the row of sample 0, 1, 2, ...: a pure function of (plan, seed, sample)."""
        return self.plan_row(self.row_index(sample))

    def row_index(self, sample: int) -> int:
        """Return the plan's row for `sample`; each row occurs once in every `plan.rows` samples."""
        assert sample >= 0, sample
        epoch, number = divmod(sample, self.plan.rows)
        if self.plan.key.policy == "decomposition":  # a curriculum, in its own order
            return number
        return int(self._order(epoch)[number])

    def _open_order(self, epoch: int) -> np.ndarray:
        if self.cache is None:
            return self._draw_order(epoch)
        key = {"rows": self.plan.rows, "seed": self.seed, "epoch": epoch}
        return kept_arrays(self.cache, key, lambda: {"row_order": self._draw_order(epoch)})["row_order"]

    def _draw_order(self, epoch: int) -> np.ndarray:
        return permutation(self.plan.rows, self.seed, epoch, Purpose.ROWS)

    def outline(self, sample: int) -> RowOutline:
        """Return the outline of the row of a sample, without reading its tokens."""
        return self._outline(self._pieces(self.row_index(sample)))

    def plan_row(self, row: int) -> TokenRow:
        """Return a row of the plan by its number."""
        pieces = self._pieces(row)
        tokens = np.full(self.row_length + 1, self.pad_id, dtype=np.int64)
        filled = 0
        for piece in pieces:
            count = piece[2]
            tokens[filled : filled + count] = self.source.read(*piece)
            filled += count
        outline = self._outline(pieces)
        return TokenRow(tokens, outline.document_ends, outline.trained)

    def _pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return the pieces of a row of the plan; the last may have one token more, which is only a label."""
        pieces = [(document, start, count) for document, start, count in self.plan.row_pieces(row).tolist()]
        document, start, count = pieces[-1]
        filled = sum(piece[2] for piece in pieces)
        if filled == self.row_length and start + count < self.source.document_length(document):
            pieces[-1] = (document, start, count + 1)
        return pieces

    def _outline(self, pieces: Sequence[tuple[int, int, int]]) -> RowOutline:
        length = self.row_length
        joined = self.plan.joined
        trained = np.zeros(length + 1, dtype=np.bool_)
        mask = np.ones(length + 1, dtype=np.bool_)
        ends: list[int] = []
        filled = 0
        after_end = False
        for document, start, count in pieces:
            if filled:  # the label after the previous piece
                trained[filled - 1] = after_end and start == 0 and (joined or not self.mask_eod)
            mask[filled : filled + count] = self.source.read_mask(document, start, count)
            trained[filled : filled + count - 1] = True
            filled += count
            after_end = start + count == self.source.document_length(document)
            if filled == length or (filled < length and not joined):
                ends.append(filled)
        return RowOutline(np.array(ends, dtype=np.int64), trained[:length] & mask[1:])
