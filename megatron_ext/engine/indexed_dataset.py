"""Read Megatron's indexed data sets (PREFIX.bin, PREFIX.idx) by document."""

from __future__ import annotations

import os

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, get_bin_path, get_idx_path

from megatron_ext.cli import program
from megatron_ext.data.build.indexed import HEADER, MAGIC, MASK, SOURCES, VERSION
from megatron_ext.data.text.metadata import read_metadata
from megatron_ext.errors import UserError

TOKEN_DTYPES = (np.uint8, np.uint16, np.int32, np.int64)
REMEDY = f"run {program('preprocess')} again"


class IndexedSource:
    """Reads the documents of a Megatron data set, memory-mapped; a `TokenSource`.

    A Megatron document may consist of several sequences; they are contiguous in the .bin file and read as one.

    Args:
        prefix: PREFIX of PREFIX.bin and PREFIX.idx.
        vocab_size: upper bound (exclusive) of token ids, checked when they are read; None: not checked.
        weighted: also read PREFIX.weights.npy, float32 [tokens of the .bin], the weight of each token's loss.

    Optional files:
        PREFIX.mask.npy: uint8 [tokens of the .bin], 1 for the tokens that are trained.
        PREFIX.sources.npy: int32 [documents], the source of each document; `document_sources` is None without it.

    Raises:
        UserError: a file is missing or damaged, or does not belong to the others.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], vocab_size: int | None = None, *, weighted: bool = False
    ) -> None:
        self.prefix, self.vocab_size = os.fspath(prefix), vocab_size
        idx, bin_ = get_idx_path(self.prefix), get_bin_path(self.prefix)
        for path in (idx, bin_):
            if not os.path.isfile(path):
                raise UserError(
                    f"{path} does not exist; check the data path, or run {program('preprocess')} to make it"
                )
        damaged = UserError(f"{idx} is not a Megatron index of integer tokens, or is damaged or empty; {REMEDY}")
        if not _is_complete(idx) or not os.path.getsize(bin_):
            raise damaged
        try:
            self._indexed = IndexedDataset(self.prefix)
        except AssertionError:
            raise damaged from None
        index, documents = self._indexed.index, self._indexed.index.document_indices
        borders = np.concatenate([[0], np.cumsum(index.sequence_lengths, dtype=np.int64)])  # tokens before each
        contiguous = np.array_equal(index.sequence_pointers, borders[:-1] * index.dtype_size)
        if not contiguous or (np.diff(borders) < 0).any() or documents[0] < 0 or (np.diff(documents) < 0).any():
            raise damaged
        self._starts = borders[documents[:-1]]
        self.document_lengths: np.ndarray = borders[documents[1:]] - self._starts
        tokens, size, metadata = int(borders[-1]), os.path.getsize(bin_), read_metadata(self.prefix)
        if size != tokens * index.dtype_size:
            raise UserError(
                f"{bin_} has {size} bytes, but {idx} describes {tokens * index.dtype_size}: one is truncated or "
                f"belongs to another dataset; {REMEDY}"
            )
        self._weights = self._mask = None
        if weighted:
            remedy = "token_weighting dataset needs a float32 .npy array"
            self._weights = _open_array(f"{self.prefix}.weights.npy", tokens, np.float32, "weight", remedy)
        self.document_sources: np.ndarray | None = None
        if os.path.exists(path := f"{self.prefix}{SOURCES}"):
            documents = len(self.document_lengths)
            self.document_sources = _open_array(path, documents, np.int32, "number", REMEDY, of="document of the .idx")
        elif metadata.get("source_field"):
            raise UserError(f"{path} does not exist, but {self.prefix} was made with --source-field; {REMEDY}")
        if os.path.exists(f"{self.prefix}{MASK}"):
            self._mask = _open_array(f"{self.prefix}{MASK}", tokens, np.uint8, "value", REMEDY)
        elif metadata.get("chat_template"):
            raise UserError(
                f"{self.prefix}{MASK} does not exist, but {self.prefix} was made of conversations; {REMEDY}"
            )

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        """Read token ids, int64 [length], of `document` from its token `offset` on.

        Raises:
            UserError: a token id is negative or not below `vocab_size`.
        """
        assert 0 <= offset <= offset + length <= self.document_lengths[document], (document, offset, length)
        index = self._indexed.index
        start = (int(self._starts[document]) + offset) * index.dtype_size
        tokens = self._indexed.bin_reader.read(index.dtype, length, start).astype(np.int64)
        if self.vocab_size is not None:  # checking in advance would read terabytes before the first step
            bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
            if bad.size:
                raise UserError(
                    f"{get_bin_path(self.prefix)}: document {document} holds token id {tokens[bad[0]]} at position "
                    f"{offset + bad[0]}, but vocab_size is {self.vocab_size}; use the tokenizer that the data was made "
                    "with"
                )
        return tokens

    def read_weights(self, document: int, offset: int, length: int) -> np.ndarray | None:
        """Read the weights of these tokens, float32 [length]; None if the data set was opened without weights.

        Raises:
            UserError: a weight is negative or not finite.
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

    def read_mask(self, document: int, offset: int, length: int) -> np.ndarray | bool:
        """Read whether each of these tokens is trained, bool [length]; True if the data set has no mask."""
        if self._mask is None:
            return True
        start = int(self._starts[document]) + offset
        return np.asarray(self._mask[start : start + length]).astype(np.bool_)


def _open_array(
    path: str, count: int, dtype: type[np.generic], what: str, remedy: str, of: str = "token of the .bin"
) -> np.ndarray:
    """Open a .npy file with one number for each token or document, memory-mapped."""
    name = np.dtype(dtype).name
    try:
        array: np.ndarray = np.load(path, mmap_mode="r")
    except Exception as error:  # numpy parses the header as Python literals
        raise UserError(f"{path} cannot be read ({error}); {remedy}") from None
    if array.shape != (count,) or array.dtype != dtype:
        raise UserError(
            f"{path} holds {array.dtype} {array.shape}, needs {name} ({count},): one {what} for each {of}; {remedy}"
        )
    return array


def _is_complete(idx: str) -> bool:
    """Return whether an index has a valid header and the size that it gives.

    If Megatron's reader fails, its destructor prints a second error.
    """
    with open(idx, "rb") as file:
        head = file.read(HEADER.size)
    magic, version, code, sequences, borders = HEADER.unpack(head.ljust(HEADER.size, b"\0"))
    valid = magic == MAGIC and version == VERSION and code in [DType.code_from_dtype(dtype) for dtype in TOKEN_DTYPES]
    size = HEADER.size + sequences * (4 + 8) + borders * 8
    return valid and sequences > 0 and borders > 1 and os.path.getsize(idx) >= size
