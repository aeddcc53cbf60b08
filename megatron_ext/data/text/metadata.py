"""Read PREFIX.json, the metadata of a data set: its inputs, its tokenizer, and its counts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError
from megatron_ext.files.reading import read_object


def read_metadata(prefix: str | os.PathLike[str]) -> dict[str, Any]:
    """Read PREFIX.json; empty if it is missing, as for data sets not created by tools/preprocess_data.py.

    Raises:
        UserError: the file is not a JSON object.
    """
    remedy = "is not the metadata of a dataset; make the dataset again, or remove this file"
    return read_object(Path(f"{os.fspath(prefix)}.json"), remedy) or {}


def bos_of(prefixes: Iterable[str]) -> int | None:
    """Return the token (BOS) that documents begin with, according to the metadata; None if no data set has one.

    Raises:
        UserError: documents of different data sets begin with different tokens, or a file is not metadata.
    """
    found = {bos: prefix for prefix in prefixes if (bos := read_metadata(prefix).get("bos_id")) is not None}
    if len(found) > 1:
        listed = ", ".join(f"{prefix} with {bos}" for bos, prefix in found.items())
        raise UserError(
            f"data: documents begin with different tokens ({listed}); make the data sets with one --bos-token"
        )
    return next(iter(found), None)


def check_tokenizer(prefix: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """Check that a data set was created with this tokenizer, according to its metadata.

    Raises:
        UserError: it was created with another one, or the metadata is damaged.
    """
    metadata = read_metadata(prefix)
    made_with = metadata.get("tokenizer_fingerprint")
    if made_with not in (None, tokenizer.fingerprint):
        raise UserError(
            f"{os.fspath(prefix)} was made with another tokenizer ({metadata.get('tokenizer')}, fingerprint "
            f"{made_with[:12]}) than {tokenizer.file} (fingerprint {tokenizer.fingerprint[:12]}); "
            "use the one it was made with, or make the dataset again"
        )
