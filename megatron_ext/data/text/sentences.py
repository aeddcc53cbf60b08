"""Split texts into sentences with nltk's Punkt, preserving every character."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from megatron_ext.errors import UserError, missing_package


def check_splitter(language: str) -> None:
    """Raise UserError if nltk or its data for `language` is missing."""
    _splitter(language)


def split(text: str, language: str) -> list[str]:
    """Split a text into sentences whose concatenation is the text; a space between two belongs to the second."""
    ends = [end for _, end in _splitter(language).span_tokenize(text)][:-1]
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@lru_cache(maxsize=1)
def _splitter(language: str) -> Any:
    try:
        from nltk.tokenize.punkt import PunktTokenizer
    except ImportError:
        raise missing_package("split_sentences", "nltk") from None
    try:
        return PunktTokenizer(language)
    except (LookupError, ValueError):
        raise UserError(
            f"split_sentences: nltk's punkt_tab data for {language!r} is not on this machine; "
            "run: python -m nltk.downloader punkt_tab (NLTK_DATA may name the folder that holds it)"
        ) from None
