"""The score store: short-context losses of a frozen scorer, computed once, read by every training step.

    scores/                a zarr v3 array, float32 [rows, L], attributes = StoreIdentity
      zarr.json
      c.0.0                row 0: one chunk, one file; zstd, then crc32c of the compressed bytes
      c.1.0
      c.3.0                row 2 is missing: its scorer has not come to it, or was killed

A row is the sample index of a run: row r holds -log p_short of the L labels of sample r, in nats.

Several processes may write different rows at once, since no two rows share a file. A file is written aside and
renamed, so a kill at any moment leaves a row whole or missing. What a power cut or a bad disk tears, the checksum
finds: such a row counts as missing and can be written again.
"""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import LocalStore

from megatron_ext.arrays import Float32, Int64
from megatron_ext.errors import UserError, first_line
from megatron_ext.files.atomic import atomic_folder
from megatron_ext.files.fingerprint import fingerprint, short_hash

KIND = "megatron_ext short-context losses 1"
RESUME = "run the scoring command again with the options that made the store: it writes the missing rows alone"
RESTORE = "restore that file from another copy, or delete the folder and score again"
STALE_S = 3600  # no live write takes this long


@dataclass(frozen=True)
class StoreIdentity:
    """Says what a store belongs to: which rows, scored by which model in which short context.

    Attributes:
        rows, row_length: shape of the store, row_length in tokens.
        short_context, short_stride: n and s of the scorer's chunks, in tokens.
        seed: of the packing.
        vocab_size: without padding.
        data, packing, tokenizer, model: `fingerprint`s.

    Raises:
        UserError: a size is below 1.
    """

    rows: int
    row_length: int
    short_context: int
    short_stride: int
    seed: int
    vocab_size: int
    data: str
    packing: str
    tokenizer: str
    model: str

    def __post_init__(self) -> None:
        for name in ("rows", "row_length", "short_context", "short_stride", "vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"score store: {name} is {getattr(self, name)}, but must be at least 1; correct it")

    def attributes(self) -> dict[str, int | str]:
        """Give the fields as JSON holds them."""
        return {name: v if isinstance(v, str) else operator.index(v) for name, v in asdict(self).items()}


class ScoreStore:
    """Losses by row; `create_or_resume` makes one to score into, `open` one to train from.

    Attributes:
        path: the folder.
        identity: what the store belongs to.
    """

    def __init__(self, path: Path, array: zarr.Array[Any], identity: StoreIdentity) -> None:
        self.path = path
        self.identity = identity
        self._array = array

    @staticmethod
    def create_or_resume(path: str | os.PathLike[str], identity: StoreIdentity) -> ScoreStore:
        """Open the store of `identity` at `path`, or make it. Any number of processes may call this at once.

        Args:
            path: the folder.
            identity: what is scored.

        Raises:
            UserError: something else stands there, or a store of another identity.
        """
        folder = Path(path)
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            _create(folder, identity)
        if not (folder / "zarr.json").is_file():
            raise UserError(f"score store {folder}: something else stands there; give another folder")
        store = _load(folder, read_only=False)
        for name, wanted in asdict(identity).items():
            stored = getattr(store.identity, name)
            if stored != wanted:
                raise UserError(
                    f"score store {folder}: its {name} is {short_hash(stored)}, but these rows have "
                    f"{short_hash(wanted)}; "
                    f"give another folder, or the {name} that the store was made with"
                )
        for leftover in folder.glob("*.partial"):  # of killed writers; a live one's is young
            with suppress(FileNotFoundError):  # renamed by its writer, or removed by another process
                if time.time() - leftover.stat().st_mtime > STALE_S:
                    leftover.unlink()
        return store

    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        first: int = 0,
        verify: bool = False,
        **expected: int | str,
    ) -> ScoreStore:
        """Open the store at `path` to read from it.

        Args:
            path: the folder.
            first: the first row that training needs; those before it may be missing.
            verify: decode every row that is needed (about a millisecond each) instead of looking for its file.
            expected: fields of `StoreIdentity` and the values that training needs. `rows` is a least number:
                only rows first .. rows-1 must be there; without it, all of the store's from `first` on.

        Raises:
            UserError: no store, one that does not match `expected`, or one in which a needed row is missing.
        """
        if unknown := expected.keys() - {field.name for field in fields(StoreIdentity)}:
            raise TypeError(f"open() got {sorted(unknown)}, which are no fields of StoreIdentity")
        store = _load(Path(path), read_only=True)
        for name, wanted in expected.items():
            _compare(store, name, wanted)
        needed = np.arange(first, int(expected.get("rows", store.identity.rows)))
        missing = store.missing(needed, verify=verify)
        if len(missing):
            raise UserError(
                f"score store {store.path}: {len(missing)} of the {len(needed)} rows that this run needs are missing, "
                f"row {missing[0]} the first; {RESUME}"
            )
        return store

    def missing(self, rows: Iterable[int] | Int64 | None = None, *, verify: bool = True) -> Int64:
        """Find which of `rows` (all of the store if None) `read` would refuse.

        Args:
            rows: distinct row numbers; a data-parallel rank gives its own share.
            verify: decode the rows that are there; False takes a file's name for its content.

        Returns:
            int64 [m], in the order of `rows`.
        """
        wanted = range(self.identity.rows) if rows is None else [self._checked(row) for row in rows]
        files = set(os.listdir(self.path))
        missing = []
        for row in wanted:
            try:
                if f"c.{row}.0" not in files:
                    missing.append(row)
                elif verify:
                    self.read(row)
            except UserError:
                missing.append(row)
        return np.array(missing, dtype=np.int64)

    def write(self, row: int, losses: Float32) -> None:
        """Store a row, whole or, if the process dies meanwhile, not at all. What was there is replaced.

        Args:
            row: 0 .. rows-1; no other process may write the same one.
            losses: float32 [L], finite, in nats.

        Raises:
            UserError: another shape or dtype, a loss that is not finite, no such row.
        """
        row, where = self._checked(row), f"score store {self.path}: row {row}"
        shape = (self.identity.row_length,)
        if not isinstance(losses, np.ndarray) or losses.dtype != np.float32 or losses.shape != shape:
            dtype, got = (getattr(losses, name, "") for name in ("dtype", "shape"))
            raise UserError(
                f"{where} needs an ndarray of float32 {shape}, but got {type(losses).__name__} of {dtype} {got}; "
                f"give one loss for each token of the row"
            )
        bad = np.flatnonzero(~np.isfinite(losses))
        if len(bad):
            raise UserError(
                f"{where} has {len(bad)} losses that are not finite, {losses[bad[0]]} at token {bad[0]} the first; "
                f"check the scorer's weights and its precision"
            )
        self._array[row] = losses

    def read(self, row: int) -> Float32:
        """Read the losses of a row, in nats; float32 [L].

        Raises:
            UserError: the row is missing or damaged, or the store has no such row.
        """
        row = self._checked(row)
        try:
            losses = np.asarray(self._array[row], dtype=np.float32)
        except (ValueError, RuntimeError) as error:  # crc32c, zstd
            raise UserError(f"score store {self.path}: row {row} is damaged ({error}); {RESUME}") from None
        if not np.isfinite(losses).all():  # the fill value of a row without a file is NaN
            raise UserError(f"score store {self.path}: row {row} is missing; {RESUME}")
        return losses

    def fingerprint(self) -> str:
        """Digest the identity, not the losses: two stores have the same if they answer the same question."""
        return fingerprint(KIND, json.dumps(self.identity.attributes(), sort_keys=True))

    def _checked(self, row: int) -> int:
        row = operator.index(row)
        if not 0 <= row < self.identity.rows:
            raise UserError(
                f"score store {self.path}: row {row} is asked for, but it has rows 0 to {self.identity.rows - 1}; "
                f"score as many rows as the run reads"
            )
        return row


def _create(folder: Path, identity: StoreIdentity) -> None:
    """Make an empty store aside and rename it to `folder`; whoever renames first wins, and all are content."""
    rows, row_length = int(identity.rows), int(identity.row_length)  # zarr before 3.1.6 takes no integers of numpy
    with atomic_folder(folder, replace=False) as aside:
        zarr.create_array(
            LocalStore(aside),
            shape=(rows, row_length),
            chunks=(1, row_length),
            dtype="float32",
            fill_value=float("nan"),
            compressors=(ZstdCodec(), Crc32cCodec()),
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=("row", "token"),
            attributes={"kind": KIND, **identity.attributes()},
        )


def _load(folder: Path, *, read_only: bool) -> ScoreStore:
    """Open a store and check that it is one.

    Raises:
        UserError: no store there, or one whose zarr.json is damaged.
    """
    if not (folder / "zarr.json").is_file():
        raise UserError(f"score store {folder}: there is no store; score the rows first, or check the path")
    try:
        files = LocalStore(folder, read_only=read_only)
        array = zarr.open_array(files, mode="r" if read_only else "r+", zarr_format=3)  # format 2 may name pickles
        attributes = dict(array.attrs)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        text = first_line(error)
        raise UserError(f"score store {folder}: zarr.json cannot be read ({text}); {RESTORE}") from None
    if attributes.pop("kind", None) != KIND:
        raise UserError(f"score store {folder}: this zarr array holds something else; check the path")
    types = {field.name: int if field.type == "int" else str for field in fields(StoreIdentity)}
    named = {name: type(value) for name, value in attributes.items()} == types
    identity = StoreIdentity(**attributes) if named else None  # type: ignore[arg-type]
    if identity is None or not _is_sound(array, identity):
        raise UserError(f"score store {folder}: the attributes in zarr.json do not fit its array; {RESTORE}")
    return ScoreStore(folder, array, identity)


def _is_sound(array: zarr.Array[Any], identity: StoreIdentity) -> bool:
    """Tell whether the array is what `_create` makes, so that rows do not share files and their damage is seen."""
    return (
        array.shape == (identity.rows, identity.row_length)
        and array.chunks == (1, identity.row_length)
        and array.dtype == np.float32
        and bool(np.isnan(array.fill_value))
        and any(isinstance(codec, Crc32cCodec) for codec in array.compressors)
        and array.metadata.encode_chunk_key((0, 0)) == "c.0.0"
    )


def _compare(store: ScoreStore, name: str, wanted: int | str) -> None:
    """Refuse a store that does not have what training needs.

    Raises:
        UserError: another value, or for `rows` fewer.
    """
    stored = getattr(store.identity, name)
    if stored != wanted and not (name == "rows" and stored > wanted):
        least = "at least " if name == "rows" else ""
        raise UserError(
            f"score store {store.path}: its {name} is {short_hash(stored)}, but this run needs "
            f"{least}{short_hash(wanted)}; "
            f"name the store of this run's rows, or score them into a new one"
        )
