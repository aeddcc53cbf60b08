"""Read text columns of .parquet files, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.data.text.sources import import_pyarrow
from megatron_ext.errors import UserError, first_line

ROWS_AT_ONCE = 64
READ_BUFFER = 1 << 20


def row_group_sizes(path: Path, text: str, keys: Sequence[str]) -> list[int]:
    """Return the uncompressed bytes of each row group.

    Raises:
        UserError: the column `text` or one of `keys` is missing or has another type; there is no row; a damaged file.
    """
    with _open(path) as file:
        for name in (text, *keys):
            if name not in file.schema_arrow.names:
                have = ", ".join(map(repr, file.schema_arrow.names[:8])) or "none"
                raise UserError(f"{path}: has no column {name!r} (it has {have}; see --json-key)")
            column = file.schema_arrow.field(name).type
            if not _is_text(column, or_number=name != text):
                raise UserError(f"{path}: column {name!r} holds {column}, needs strings; convert it")
        if not file.metadata.num_rows:
            raise UserError(f"{path}: the file is empty; leave it out")
        return [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]


def read_rows(
    path: Path, first_group: int, last_group: int, columns: Sequence[str]
) -> Iterator[tuple[int, tuple[bytes | None, ...]]]:
    """Yield (1-based row of the file, its values in `columns`) of row groups [first_group, last_group)."""
    pyarrow = import_pyarrow(str(path))
    with _open(path) as file:
        groups = range(first_group, min(last_group, file.metadata.num_row_groups))
        row = sum(file.metadata.row_group(group).num_rows for group in range(first_group))
        distinct = list(dict.fromkeys(columns))  # a column may be used twice
        for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=list(groups), columns=distinct, use_threads=False):
            # Casting to large_string converts dictionaries and numbers to text; as binary, so that the caller checks
            # UTF-8.
            cells = [
                batch.column(name).cast(pyarrow.large_string(), safe=False).cast(pyarrow.large_binary()).to_pylist()
                for name in columns
            ]
            for values in zip(*cells, strict=True):
                row += 1
                yield row, values


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    pyarrow = import_pyarrow(str(path))
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=READ_BUFFER, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # a disk error; pyarrow's own have no errno
            raise
        raise UserError(f"{path}: damaged, or no .parquet file ({first_line(error)}); make it again") from None


def _is_text(column: Any, or_number: bool) -> bool:
    from pyarrow import types

    if types.is_dictionary(column):
        return _is_text(column.value_type, or_number)
    return types.is_string(column) or types.is_large_string(column) or (or_number and types.is_integer(column))
