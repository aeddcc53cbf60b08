"""Read PREFIX.json, the metadata of a data set: its inputs, its tokenizer, and its counts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError, echo
from megatron_ext.files.json_file import read_object


def read_card(prefix: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read PREFIX.json; None if it is missing, as for data sets not created by tools/preprocess_data.py.

    Raises:
        UserError: the file is not the metadata of a data set.
    """
    remedy = "is not the card of a dataset; make the dataset again, or remove this file"
    path = Path(f"{os.fspath(prefix)}.json")
    card = read_object(path, remedy)
    for name in ("bos_id", "documents", "tokens"):
        value = (card or {}).get(name)
        if value is not None and type(value) is not int:
            raise UserError(f"{path} has {name} {echo(value)}, needs a whole number; it {remedy}")
    return card


def beginning(prefixes: Iterable[str]) -> int | None:
    """Return the token (BOS) that documents begin with, according to the metadata; None if no data set has one.

    Raises:
        UserError: documents of different data sets begin with different tokens, or a file is not metadata.
    """
    found = {bos: prefix for prefix in prefixes if (bos := (read_card(prefix) or {}).get("bos_id")) is not None}
    if len(found) > 1:
        said = ", ".join(f"{prefix} with {bos}" for bos, prefix in found.items())
        raise UserError(
            f"data: documents begin with different tokens ({said}); make the data sets with one --bos-token"
        )
    return next(iter(found), None)


def check_tokenizer(prefix: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """Check that a data set was created with this tokenizer, according to its metadata.

    Raises:
        UserError: it was created with another one, or the metadata is damaged.
    """
    card = read_card(prefix)
    made_with = card and card.get("tokenizer_fingerprint")
    if card and made_with and made_with != tokenizer.fingerprint:
        raise UserError(
            f"{os.fspath(prefix)} was made with another tokenizer ({card.get('tokenizer')}, fingerprint "
            f"{made_with[:12]}) than {tokenizer.file} (fingerprint {tokenizer.fingerprint[:12]}); "
            "use the one it was made with, or make the dataset again"
        )
