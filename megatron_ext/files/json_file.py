"""Reads the JSON files beside data sets, tokenizers and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

MOST_BYTES = 2**27


def read_json(path: Path) -> Any:
    """Read what a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON in UTF-8, has too many levels, or more than `MOST_BYTES`.
    """
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    try:
        return json.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("it has too many levels") from None


def read_object(path: Path, remedy: str) -> dict[str, Any] | None:
    """Read the JSON object in a file; None where there is no file.

    Args:
        path: the file.
        remedy: what the error says of a file that holds something else, after its name.

    Raises:
        UserError: it holds no JSON object.
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
