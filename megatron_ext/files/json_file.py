"""Reads the small JSON files beside data sets and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError


def read_object(path: Path, remedy: str) -> dict[str, Any] | None:
    """Read the JSON object in a file; None where there is no file.

    Args:
        path: the file.
        remedy: what the error says of a file that holds something else, after its name.

    Raises:
        UserError: it holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} {remedy}")
    return content
