"""Read and write Megatron's indexed data sets: PREFIX.bin, PREFIX.idx, and the metadata PREFIX.json.

.bin: the token ids of all sequences, concatenated. .idx: a header; int32 tokens of each sequence; int64 byte offset of
each sequence; int64 [documents + 1] first sequence of each document, and their number. PREFIX.json: the inputs, the
tokenizer and the counts; missing for data sets not created by tools/preprocess_data.py.

Optional files:

    PREFIX.mask.npy      uint8 [tokens], 1 for the tokens that are trained, such as the assistant's of conversations
    PREFIX.sources.npy   int32 [documents], the index of each one's source in `document_sources` of the metadata
    PREFIX.weights.npy   float32 [tokens], the weight of each token's loss
"""

import json
import os
import shutil
import struct
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.cli import program
from megatron_ext.errors import UserError
from megatron_ext.files.arrays import save_array
from megatron_ext.files.atomic import sync
from megatron_ext.files.fingerprint import file_edges, fingerprint
from megatron_ext.files.reading import JsonObject, read_object

HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}
MASK = ".mask.npy"
SOURCES = ".sources.npy"
WEIGHTS = ".weights.npy"  # of others' making
CHECKED_AT_ONCE = 2**20  # sequences of an index that is checked whole when it is opened
Documents = Sequence[int] | np.ndarray  # indices into an `IndexedSource`


def dtype_of(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of the ids on disk, by Megatron's rule."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def suffixes(settings: JsonObject) -> tuple[str, ...]:
    """Return the suffixes of the files of a data set; .idx is written last."""
    optional = []
    if settings["chat_template"] is not None:
        optional.append(MASK)
    if settings["source_field"] is not None:
        optional.append(SOURCES)
    return (".bin", *optional, ".json", ".idx")


def read_metadata(prefix: str | os.PathLike[str]) -> JsonObject:
    """Read PREFIX.json; empty if it is missing."""
    remedy = "is not the metadata of a dataset; make the dataset again, or remove this file"
    return read_object(Path(f"{os.fspath(prefix)}.json"), remedy) or {}


class IndexedSource:
    """Reads the documents of a data set, memory-mapped.

    A document may consist of several sequences; they are contiguous in the .bin file and read as one. Opening a data
    set takes the same time and memory for any number of documents: a large index is checked when `lengths_in` reads
    it, and each document when it is read. Token ids are checked when they are read: they must be below `vocab_size`,
    unless it is None. With `weighted`, PREFIX.weights.npy is read too. Raises UserError if a file is missing or
    damaged, or does not belong to the others.

    Attributes:
        document_count, token_count: the numbers of documents and of tokens.
        document_sources: int32 [documents], the index of each one's source; None if the data set has no sources.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], vocab_size: int | None = None, *, weighted: bool = False
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.vocab_size = vocab_size
        self._remedy = f"run {program('preprocess')} again"
        self._open()
        self.token_count = len(self._tokens)
        metadata = read_metadata(self.prefix)
        counts = {"documents": self.document_count, "tokens": self.token_count}
        if any(metadata.get(name, count) != count for name, count in counts.items()):
            raise UserError(f"{self.prefix}.json describes another data set than {self.prefix}.idx; {self._remedy}")
        self._mask = self._open_array(MASK, self.token_count, np.uint8, bool(metadata.get("chat_template")))
        self.document_sources = self._open_array(
            SOURCES, self.document_count, np.int32, bool(metadata.get("source_field"))
        )
        self._weights = None
        if weighted:
            self._weights = self._open_array(WEIGHTS, self.token_count, np.float32, needed=True)

    def _open(self) -> None:
        """Map the index and the tokens; check the header, both ends and the sizes, and a small index completely."""
        index_path = f"{self.prefix}.idx"
        tokens_path = f"{self.prefix}.bin"
        for path in (index_path, tokens_path):
            if not os.path.isfile(path):
                raise UserError(f"{path} does not exist; check the data path, or make it with {program('preprocess')}")
        token_bytes = os.path.getsize(tokens_path)
        with open(index_path, "rb") as file:
            header = file.read(HEADER.size)
        magic, version, code, sequences, borders = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        if magic != MAGIC or version != VERSION or code not in DTYPES:
            raise self._damaged()
        index_bytes = HEADER.size + sequences * (4 + 8) + borders * 8
        if not sequences or borders < 2 or os.path.getsize(index_path) < index_bytes or not token_bytes:
            raise self._damaged()
        index = np.memmap(index_path, mode="r")
        self._sequence_lengths = np.frombuffer(index, "<i4", sequences, HEADER.size)
        self._pointers = np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences)  # in bytes
        self._first_sequences = np.frombuffer(index, "<i8", borders, HEADER.size + 12 * sequences)
        self._itemsize = DTYPES[code].itemsize
        self.document_count = borders - 1
        if self._first_sequences[0] != 0 or self._first_sequences[-1] != sequences:
            raise self._damaged()
        if max(sequences, borders) <= CHECKED_AT_ONCE:
            self._check_index()
        described = int(self._pointers[-1]) + int(self._sequence_lengths[-1]) * self._itemsize
        if token_bytes != described:
            raise UserError(
                f"{tokens_path} has {token_bytes} bytes, but {index_path} describes {described}: one is truncated or "
                f"belongs to another dataset; {self._remedy}"
            )
        self._tokens = np.asarray(np.memmap(tokens_path, DTYPES[code], mode="r"))

    def _damaged(self) -> UserError:
        return UserError(
            f"{self.prefix}.idx is not a Megatron index of integer tokens, or is damaged or empty; {self._remedy}"
        )

    def _check_index(self) -> None:
        """Check that the sequences are contiguous and the documents in order."""
        sizes = self._sequence_lengths * np.int64(self._itemsize)
        contiguous = (sizes >= 0).all() and np.array_equal(self._pointers, np.cumsum(sizes) - sizes)
        if not contiguous or (np.diff(self._first_sequences) < 0).any():
            raise self._damaged()

    @cached_property
    def index_fingerprint(self) -> str:
        """A checksum of the sizes, the ends and the times of the .idx file and the sources: it needs no whole file."""
        files = [f"{self.prefix}.idx"]
        if self.document_sources is not None:
            files.append(f"{self.prefix}{SOURCES}")
        times = [str(os.stat(file).st_mtime_ns) for file in files]
        return fingerprint(*chain.from_iterable(map(file_edges, files)), *times)

    @cached_property
    def document_lengths(self) -> Int64:
        """The tokens of each document, including its end-of-document token (EOD): int64 [documents], in memory."""
        return self.lengths_in(range(self.document_count))

    def lengths_in(self, documents: range) -> Int64:
        """Return the tokens of consecutive documents, int64 [documents]; check a large index."""
        if max(len(self._pointers), self.document_count) > CHECKED_AT_ONCE:
            self._check_index()
        sequences = self._first_sequences[documents.start : documents.stop + 1]
        first_tokens = self._pointers[np.minimum(sequences, len(self._pointers) - 1)] // self._itemsize
        first_tokens[sequences == len(self._pointers)] = len(self._tokens)  # documents without a sequence, at the end
        return np.diff(first_tokens)

    def document_length(self, document: int) -> int:
        """Return the tokens of a document, including its EOD."""
        return self._first_token(document + 1) - self._first_token(document)

    def tokens_in(self, documents: range) -> int:
        """Return the tokens of consecutive documents together."""
        return self._first_token(documents.stop) - self._first_token(documents.start)

    def _first_token(self, document: int) -> int:
        """Return the place of a document's first token in the data set; it may be the document after the last."""
        sequence = int(self._first_sequences[document])
        if sequence == len(self._pointers):
            return len(self._tokens)
        return int(self._pointers[sequence]) // self._itemsize

    def _places(self, document: int, offset: int, length: int) -> slice:
        """Return the places in the data set of `length` tokens of a document from its token `offset` on."""
        first = self._first_token(document)
        following = self._first_token(document + 1)
        if not 0 <= first <= following <= len(self._tokens):
            raise self._damaged()
        assert 0 <= offset <= offset + length <= following - first, (document, offset, length)
        return slice(first + offset, first + offset + length)

    def _open_array(self, suffix: str, count: int, dtype: type[np.generic], needed: bool) -> np.ndarray | None:
        """Open a .npy file with `count` numbers, memory-mapped; None if it is missing and not needed."""
        path = f"{self.prefix}{suffix}"
        if not (needed or os.path.exists(path)):
            return None
        try:
            array = np.load(path, mmap_mode="r")
        except FileNotFoundError:
            raise UserError(f"{path} does not exist, but the dataset needs it; make it again") from None
        except Exception as error:  # numpy parses the header as Python literals
            raise UserError(f"{path} cannot be read ({error}); make it again") from None
        if array.shape != (count,) or array.dtype != dtype:
            raise UserError(
                f"{path} holds {array.dtype} {array.shape}, needs {np.dtype(dtype).name} ({count},); make it again"
            )
        return np.asarray(array)

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        """Read token ids, int64 [length], of `document` from its token `offset` on; check them."""
        tokens = self._tokens[self._places(document, offset, length)].astype(np.int64)
        if self.vocab_size is not None:  # checking in advance would read terabytes before the first step
            bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
            if bad.size:
                raise UserError(
                    f"{self.prefix}.bin: document {document} holds token id {tokens[bad[0]]} at position "
                    f"{offset + bad[0]}, but vocab_size is {self.vocab_size}; use the tokenizer that the data was made "
                    "with, or a model that has this id"
                )
        return tokens

    def read_weights(self, document: int, offset: int, length: int) -> np.ndarray | None:
        """Read the weights of these tokens, float32 [length], and check them; None if not `weighted`."""
        if self._weights is None:
            return None
        weights = self._weights[self._places(document, offset, length)]
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
        return self._mask[self._places(document, offset, length)].astype(np.bool_)


def join_arrays(parts: Sequence[Path]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return each array of all parts, concatenated, and the names of the documents' sources, in order of appearance."""
    by_part = []
    numbers: dict[str, int] = {}
    for part in parts:
        with np.load(part.with_suffix(".npz")) as file:
            arrays = {name: file[name] for name in file.files if name != "about"}
        number_of_source = [numbers.setdefault(name, len(numbers)) for name in arrays.pop("source_names").tolist()]
        arrays["sources"] = np.array(number_of_source, "<i4")[arrays["sources"]]
        by_part.append(arrays)
    joined = {name: np.concatenate([arrays[name] for arrays in by_part]) for name in by_part[0]}
    return joined, list(numbers)


def document_lengths(lengths: np.ndarray, counts: np.ndarray) -> Int64:
    """Return the tokens of each document, from the tokens of each sequence and the sequences of each document."""
    first_tokens = np.append(0, np.cumsum(lengths, dtype=np.int64))
    first_sequences = np.append(0, np.cumsum(counts, dtype=np.int64))
    return np.diff(first_tokens[first_sequences])


def write_dataset(
    prefix: str, folder: Path, parts: Sequence[Path], arrays: dict[str, np.ndarray], metadata: JsonObject
) -> None:
    """Join the parts, in order, into one data set, first in `folder`, then renamed.

    The .idx file, without which the data set cannot be read, is removed first if an old one exists, and is created
    last. So PREFIX is always the old data set, none, or the new one. `metadata` is the content of PREFIX.json.
    """
    partial = {suffix: folder / f"dataset{suffix}" for suffix in suffixes(metadata)}
    lengths = arrays["lengths"]
    counts = arrays["counts"]
    dtype = dtype_of(metadata["vocab_size"])
    code = next(number for number, known_dtype in DTYPES.items() if known_dtype == dtype)
    with partial[".bin"].open("wb") as target:
        for part in parts:
            with part.with_suffix(".bin").open("rb") as source:
                shutil.copyfileobj(source, target)
    sizes = lengths * np.int64(dtype.itemsize)
    pointers = np.cumsum(sizes) - sizes
    first_sequences = np.append(0, np.cumsum(counts, dtype=np.int64))
    with partial[".idx"].open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(first_sequences)))
        for numbers in (lengths, pointers, first_sequences):
            file.write(numbers.tobytes())
    for suffix, name in ((MASK, "mask"), (SOURCES, "sources")):
        if suffix in partial:
            save_array(partial[suffix], arrays[name])
    partial[".json"].write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    sync(partial.values())
    for suffix in (".idx", ".json", MASK, SOURCES):  # all of them describe the old data
        Path(prefix + suffix).unlink(missing_ok=True)
    for suffix, path in partial.items():
        path.replace(prefix + suffix)


def nonempty(source: IndexedSource, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents with tokens, and their lengths, both int64 [n]; raise UserError if there is no token."""
    chosen = np.asarray(documents, dtype=np.int64)
    lengths = source.document_lengths[chosen]
    has_tokens = lengths > 0
    if not has_tokens.any():
        raise no_tokens(len(chosen))
    return chosen[has_tokens], lengths[has_tokens]


def no_tokens(documents: int) -> UserError:
    """Return the error of a split whose documents have no tokens."""
    return UserError(
        f"documents: this split has no tokens ({documents} documents); "
        "give it a share in --split, or use a larger data set"
    )
