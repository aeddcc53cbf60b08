"""The card PREFIX.json of a dataset: what it was made from, by which tokenizer, and what came out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError
from megatron_ext.files.json_file import read_object

Card: TypeAlias = "dict[str, object]"


def read_card(prefix: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read PREFIX.json; None where there is none: the dataset was not made by tools/preprocess_data.py.

    Raises:
        UserError: a file that is no card.
    """
    remedy = "is not the card of a dataset; make the dataset again, or remove this file"
    return read_object(Path(f"{os.fspath(prefix)}.json"), remedy)


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
