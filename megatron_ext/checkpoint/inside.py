"""Names that files give of other files: they stay in the folder of the file that names them."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from megatron_ext.errors import UserError


def check_inside(name: Any, source: Path, field: str) -> str:
    """Return the relative path `name` that `source` gives of a file beside it, or in a folder beside it.

    The name alone is looked at: whether the file is a link is its owner's business, who made the folder.

    Args:
        name: as it was read.
        source: the file that it was read from.
        field: what the error begins with.

    Raises:
        UserError: it is absolute, goes up, or is no name of a file.
    """
    path = PurePosixPath(name) if isinstance(name, str) else None
    if path is None or not path.parts or path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise UserError(
            f"{field}: {source} names {str(name)[:200]!r}, which is outside its folder, needs files in "
            f"{source.parent}; take another folder, or mend the names"
        )
    return str(name)
