"""Read JSON files beside datasets, tokenizers and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON in UTF-8.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it has too many levels") from None


def read_object(path: Path, remedy: str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file.

    Args:
        path: the file.
        remedy: text of the error for other content, after the file's name.

    Raises:
        UserError: the file does not contain a JSON object.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} {remedy}")
    return content
