"""Megatron's indexed data set (PREFIX.bin, PREFIX.idx), read by document and written all or nothing."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

from megatron_ext.data.preprocess import Card, WriteCounts
from megatron_ext.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
TOKEN_DTYPES = (np.uint8, np.uint16, np.int32, np.int64)
REMEDY = "run tools/preprocess_data.py again"


class IndexedSource:
    """The documents of a Megatron data set, memory-mapped: a `TokenSource`.

    A Megatron document may hold several sequences; they lie side by side in the .bin, and are read as one.

    Args:
        prefix: PREFIX of PREFIX.bin and PREFIX.idx.
        vocab_size: token ids read must be below it (None: not checked).
        weighted: also read PREFIX.weights.npy, float32 [tokens of the .bin]: the weight of each token's loss.

    Raises:
        UserError: a file is missing, damaged, or too short for what the index promises.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], vocab_size: int | None = None, *, weighted: bool = False
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.vocab_size = vocab_size
        _check_files(self.prefix)
        self._indexed = IndexedDataset(self.prefix)
        index = self._indexed.index
        borders = np.concatenate([[0], np.cumsum(index.sequence_lengths, dtype=np.int64)])  # tokens before each
        _check_index(self.prefix, borders, index.sequence_pointers, index.dtype_size)
        self._starts = borders[index.document_indices[:-1]]
        self.document_lengths: np.ndarray = borders[index.document_indices[1:]] - self._starts
        self._weights = _open_weights(self.prefix, int(borders[-1])) if weighted else None

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        """Token ids int64 [length] of `document` from its token `offset` on.

        Raises:
            UserError: a token id that is negative or not below `vocab_size`.
        """
        assert 0 <= offset <= offset + length <= self.document_lengths[document], (document, offset, length)
        index = self._indexed.index
        start = (int(self._starts[document]) + offset) * index.dtype_size
        tokens = self._indexed.bin_reader.read(index.dtype, length, start).astype(np.int64)
        if self.vocab_size is not None:
            _check_ids(tokens, self.vocab_size, f"{get_bin_path(self.prefix)}: document {document}", offset)
        return tokens

    def read_weights(self, document: int, offset: int, length: int) -> np.ndarray | None:
        """float32 [length]: the weights of these tokens; None where the data set is read without.

        Raises:
            UserError: one that is negative or not finite.
        """
        if self._weights is None:
            return None
        start = int(self._starts[document]) + offset
        weights = np.asarray(self._weights[start : start + length])
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            raise UserError(
                f"{self.prefix}.weights.npy: document {document} has weight {weights[bad[0]]} at token "
                f"{offset + bad[0]}, needs finite numbers >= 0; write the file again"
            )
        return weights


def _open_weights(prefix: str, tokens: int) -> np.ndarray:
    path = f"{prefix}.weights.npy"
    try:
        weights: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); token_weighting dataset needs a float32 .npy array"
        ) from None
    if weights.shape != (tokens,) or weights.dtype != np.float32:
        raise UserError(
            f"{path} holds {weights.dtype} {weights.shape}, needs float32 ({tokens},): one weight for each token "
            f"of {prefix}.bin"
        )
    return weights


def _check_files(prefix: str) -> None:
    """Header and sizes of both files, before Megatron asserts on them."""
    idx, bin_ = get_idx_path(prefix), get_bin_path(prefix)
    for path in (idx, bin_):
        if not os.path.isfile(path):
            raise UserError(f"{path} does not exist; check the data path, or run tools/preprocess_data.py to make it")
    with open(idx, "rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise UserError(f"{idx} is not a Megatron index (it starts with {head[:9]!r}, needs {MAGIC!r}); {REMEDY}")
    if len(head) < HEADER.size:
        raise UserError(f"{idx} is truncated ({len(head)} bytes, its header alone has {HEADER.size}); {REMEDY}")
    _, version, code, sequences, borders = HEADER.unpack(head)
    if version != 1 or code not in [DType.code_from_dtype(dtype) for dtype in TOKEN_DTYPES]:
        raise UserError(f"{idx} has format version {version} and dtype code {code}; needs 1 and integers; {REMEDY}")
    needed = HEADER.size + sequences * (4 + 8) + borders * 8
    if os.path.getsize(idx) < needed:
        raise UserError(f"{idx} is truncated ({os.path.getsize(idx)} bytes, needs {needed}); {REMEDY}")
    if sequences == 0 or borders < 2 or os.path.getsize(bin_) == 0:
        raise UserError(f"{prefix} is an empty data set ({sequences} sequences, {borders - 1} documents); {REMEDY}")
    last_border = np.fromfile(idx, np.int64, 1, offset=needed - 8)[0]
    if last_border != sequences:
        raise UserError(f"{idx} is damaged: {sequences} sequences, but its documents end at {last_border}; {REMEDY}")


def _check_index(prefix: str, borders: np.ndarray, pointers: np.ndarray, dtype_size: int) -> None:
    """Sequences lie side by side, all in the .bin; `borders`: tokens before each sequence, and in all."""
    if (borders[1:] < borders[:-1]).any() or not np.array_equal(pointers, borders[:-1] * dtype_size):
        raise UserError(f"{get_idx_path(prefix)} is damaged: its sequences do not lie side by side; {REMEDY}")
    size, needed = os.path.getsize(get_bin_path(prefix)), int(borders[-1]) * dtype_size
    if size < needed:
        raise UserError(f"{get_bin_path(prefix)} is truncated ({size} bytes, its index says {needed}); {REMEDY}")


def _check_ids(tokens: np.ndarray, vocab_size: int, where: str, offset: int = 0) -> None:
    bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if bad.size:
        raise UserError(
            f"{where} holds token id {tokens[bad[0]]} at position {offset + bad[0]}, "
            f"but vocab_size is {vocab_size}; use the tokenizer that the data was made with"
        )


def write_indexed(
    prefix: str | os.PathLike[str],
    documents: Iterable[np.ndarray],
    vocab_size: int,
    *,
    card: Callable[[WriteCounts], Card] | None = None,
) -> WriteCounts:
    """Write `documents` as PREFIX.bin and PREFIX.idx, and what `card` says of them as PREFIX.json.

    Everything is written under names that no prefix leads to, and renamed at the end: .idx, without which
    nothing is readable, goes first if an old one is there, and comes last. So PREFIX is the old data set,
    none, or the new one.

    Args:
        prefix: its folder is made if need be.
        documents: token ids, integers [tokens] each.
        vocab_size: ids must be below it; it also chooses the width on disk (below 65,500: 2 bytes, else 4).
        card: facts to keep beside the data.

    Raises:
        UserError: a token id out of range, or no token at all.
    """
    target = os.fspath(prefix)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    mark = f".{socket.gethostname()}-{os.getpid()}.partial"
    final = {suffix: Path(target + suffix) for suffix in (".bin", ".json", ".idx")}
    aside = {suffix: Path(target + suffix + mark) for suffix in final}
    try:
        counts = _write_aside(aside[".bin"], aside[".idx"], documents, vocab_size)
        if card is not None:
            aside[".json"].write_text(json.dumps(card(counts), indent=2) + "\n", encoding="utf-8")
        written = [suffix for suffix in final if aside[suffix].exists()]
        for suffix in written:
            with aside[suffix].open("rb") as file:
                os.fsync(file.fileno())
        for suffix in (".idx", ".json"):  # also a card that is not replaced: it speaks of the old data
            final[suffix].unlink(missing_ok=True)
        for suffix in written:
            aside[suffix].replace(final[suffix])
    finally:
        for path in aside.values():
            path.unlink(missing_ok=True)
    return counts


def _write_aside(bin_: Path, idx: Path, documents: Iterable[np.ndarray], vocab_size: int) -> WriteCounts:
    builder = IndexedDatasetBuilder(str(bin_), dtype=DType.optimal_dtype(vocab_size))
    data_file: BinaryIO = builder.data_file
    count = tokens = 0
    with data_file:
        for document in documents:
            if document.size:
                _check_ids(document, vocab_size, f"document {count}")
            if document.size > np.iinfo(np.int32).max:
                raise UserError(f"document {count} has {document.size} tokens; Megatron's format holds below 2^31 each")
            builder.add_document(document, [document.size])
            count += 1
            tokens += document.size
        if not tokens:
            raise UserError(f"got {count} documents without a single token; nothing was written; check the input")
        builder.finalize(str(idx))
    return WriteCounts(count, tokens)
