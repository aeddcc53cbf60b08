"""The card PREFIX.json of a dataset: what it was made from, by which tokenizer, and what came out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError, echo
from megatron_ext.files.json_file import read_object


def read_card(prefix: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read PREFIX.json; None where there is none: the dataset was not made by tools/preprocess_data.py.

    Raises:
        UserError: a file that is no card.
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
    """Return the token (BOS) that documents begin with, by their cards; None where no data set says so.

    Raises:
        UserError: data sets whose documents begin with different tokens; a file that is no card.
    """
    found = {bos: prefix for prefix in prefixes if (bos := (read_card(prefix) or {}).get("bos_id")) is not None}
    if len(found) > 1:
        said = ", ".join(f"{prefix} with {bos}" for bos, prefix in found.items())
        raise UserError(
            f"data: documents begin with different tokens ({said}); make the data sets with one --bos-token"
        )
    return next(iter(found), None)


def check_tokenizer(prefix: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """Refuse a dataset whose card says that it was made with another tokenizer.

    Raises:
        UserError: the card says so, or is damaged.
    """
    card = read_card(prefix)
    made_with = card and card.get("tokenizer_fingerprint")
    if card and made_with and made_with != tokenizer.fingerprint:
        raise UserError(
            f"{os.fspath(prefix)} was made with another tokenizer ({card.get('tokenizer')}, fingerprint "
            f"{made_with[:12]}) than {tokenizer.file} (fingerprint {tokenizer.fingerprint[:12]}); "
            "use the one it was made with, or make the dataset again"
        )
