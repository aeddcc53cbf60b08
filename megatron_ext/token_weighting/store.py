"""The score store: short-context losses of a frozen scorer, computed once and read in every training step.

    scores/                a zarr v3 array, float32 [rows, L], attributes = StoreIdentity
      zarr.json
      c.0.0                row 0: one chunk in one file, zstd, then a crc32c checksum
      c.1.0
      c.3.0                row 2 is missing: it reads as NaN, the fill value

Row r holds -log p_short of the L labels of training sample r, in nats. Processes may write different rows at the same
time. zarr writes files atomically, so a killed writer leaves a row complete or missing.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import zarr
from pydantic import ConfigDict, Field, TypeAdapter
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import LocalStore

from megatron_ext.arrays import Float32
from megatron_ext.errors import UserError, first_line, library_errors
from megatron_ext.files.atomic import atomic_folder

KIND = "megatron_ext short-context losses 1"
RESUME = "run the scoring command again with the options that made the store: it writes only the missing rows"

_Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class StoreIdentity:
    """Identifies the inputs of a store: the rows, the scorer and its short context.

    `short_context` and `short_stride` are n and s of the scorer's chunks, and `row_length` L, in tokens; `seed` is that
    of the packing, `vocab_size` has no padding. `data`, `packing`, `tokenizer` and `model` are made by `fingerprint`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    rows: _Size
    row_length: _Size
    short_context: _Size
    short_stride: _Size
    seed: int
    vocab_size: _Size
    data: str
    packing: str
    tokenizer: str
    model: str


class ScoreStore:
    """Losses by row; `create_or_resume` opens a store to write, `open` one to read."""

    def __init__(self, path: Path, mode: Any) -> None:
        """Open an existing store; raise UserError if there is none, or its description is damaged."""
        if not (path / "zarr.json").is_file():
            raise UserError(f"score store {path}: there is no store here; score the rows first, or give another path")
        self.path = path
        try:
            self._array = zarr.open_array(path, mode=mode, zarr_format=3)  # format 2 can contain pickles
            attributes = dict(self._array.attrs)
            kind = attributes.pop("kind", None)
            self.identity = TypeAdapter(StoreIdentity).validate_json(json.dumps(attributes))  # strict
            if kind != KIND or self._array.shape != (self.identity.rows, self.identity.row_length):
                raise ValueError("it is not what scoring writes")
        except Exception as error:  # zarr and its codecs raise many kinds
            raise UserError(
                f"score store {path}: zarr.json cannot be read ({first_line(error)}); score again"
            ) from None

    @classmethod
    def create_or_resume(cls, path: str | Path, identity: StoreIdentity) -> "ScoreStore":
        """Open the store of `identity` at `path`, or create it; several processes may call this at once.

        Raises UserError if the folder holds something else, or a store with another identity.
        """
        path = Path(path)
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            with atomic_folder(path, replace=False) as aside:  # if several processes create it, the first one wins
                zarr.create_array(
                    LocalStore(aside),
                    shape=(identity.rows, identity.row_length),
                    chunks=(1, identity.row_length),
                    dtype="float32",
                    fill_value=float("nan"),
                    compressors=(ZstdCodec(), Crc32cCodec()),
                    chunk_key_encoding={"name": "default", "separator": "."},
                    dimension_names=("row", "token"),
                    attributes={"kind": KIND, **asdict(identity)},
                )
        store = cls(path, "r+")
        store._compare("these rows have", "give another folder", asdict(identity))
        return store

    @classmethod
    def open(cls, path: str | Path, *, first: int = 0, **expected: int | str) -> "ScoreStore":
        """Open the store at `path` to read the rows from `first` on.

        `expected` are the fields of `StoreIdentity` that training needs; a store may have more `rows`, and without
        `rows` all rows from `first` on are needed. Raises UserError if there is no store, another one, or if rows are
        missing.
        """
        store = cls(Path(path), "r")
        rows = int(expected.pop("rows", store.identity.rows))
        if rows > store.identity.rows:
            expected["rows"] = rows
        store._compare("this run needs", "name the store of this run's rows, or score them into a new one", expected)
        missing = store.missing(range(first, rows))
        if missing:
            raise UserError(
                f"score store {store.path}: {len(missing)} of the {rows - first} rows that this run needs are missing, "
                f"row {missing[0]} the first; {RESUME}"
            )
        return store

    def missing(self, rows: Iterable[int]) -> list[int]:
        files = set(os.listdir(self.path))  # decoding every row would take a millisecond each
        return [row for row in rows if f"c.{row}.0" not in files]

    def write(self, row: int, losses: Float32) -> None:
        """Write the losses of a row, finite float32 [L] in nats, atomically; one process writes a row at a time."""
        if not np.isfinite(losses).all():
            raise UserError(
                f"score store {self.path}: row {row} has a loss that is not finite, at token "
                f"{np.isfinite(losses).argmin()}; check the scorer's weights and its precision"
            )
        self._array[row] = losses

    def read(self, row: int) -> Float32:
        """Return the losses of a row, float32 [L], in nats; raise UserError if it is missing or damaged."""
        damaged = f"score store {self.path}: row {row} is missing or damaged"
        remedy = f"delete c.{row}.0 there, then {RESUME}"
        with library_errors(lambda reason: UserError(f"{damaged} ({reason}); {remedy}")):  # crc32c, zstd
            losses = np.asarray(self._array[row], dtype=np.float32)
        if not np.isfinite(losses).all():
            raise UserError(f"{damaged} (not finite); {remedy}")
        return losses

    def _compare(self, whose: str, remedy: str, expected: dict[str, int | str]) -> None:
        for name, value in expected.items():
            stored = getattr(self.identity, name)
            if stored != value:
                raise UserError(
                    f"score store {self.path}: its {name} is {stored!s:.200}, but {whose} {value!s:.200}; {remedy}"
                )
