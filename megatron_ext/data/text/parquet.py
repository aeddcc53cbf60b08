"""Read columns of .parquet files, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_ext.data.text.sources import FileRange, import_pyarrow
from megatron_ext.errors import UserError, first_line

ROWS_AT_ONCE = 64
READ_BUFFER = 1 << 20


def row_group_sizes(file: FileRange, columns: Sequence[str]) -> list[int]:
    """Return the uncompressed bytes of each row group.

    Raises:
        UserError: one of the columns is missing; there is no row; a damaged file.
    """
    with _open(file, columns) as table:
        return [table.metadata.row_group(group).total_byte_size for group in range(table.metadata.num_row_groups)]


def read_rows(file: FileRange, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (1-based row of the file, its values by column) of the range's row groups.

    Raises:
        UserError: as `row_group_sizes`, or a text is not UTF-8.
    """
    with _open(file, columns) as table:
        groups = range(file.start, min(file.end, table.metadata.num_row_groups))
        row = sum(table.metadata.row_group(group).num_rows for group in range(file.start))
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=list(groups), columns=columns, use_threads=False):
            for values in batch.to_pylist():
                row += 1
                yield row, values


@contextmanager
def _open(file: FileRange, columns: Sequence[str]) -> Iterator[Any]:
    pyarrow = import_pyarrow(str(file.path))
    try:
        with pyarrow.parquet.ParquetFile(file.path, buffer_size=READ_BUFFER, pre_buffer=False) as table:
            names = table.schema_arrow.names
            for name in columns:
                if name not in names:
                    have = ", ".join(map(repr, names[:8])) or "none"
                    raise UserError(f"{file.path}: has no column {name!r} (it has {have}; see --json-key)")
            if not table.metadata.num_rows:
                raise UserError(f"{file.path}: the file is empty; leave it out")
            yield table
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:  # a disk error; pyarrow's own have no errno
            raise
        raise UserError(f"{file.path}: damaged, or no .parquet file ({first_line(error)}); make it again") from None
