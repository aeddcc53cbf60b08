"""The words that RULER's tasks are made of: those of the package wonderwords."""

from __future__ import annotations

import random
from functools import cache

from megatron_ext.errors import missing_package


@cache
def words_of(kind: str) -> tuple[str, ...]:
    """List the words of a kind: noun, adjective or verb.

    Raises:
        UserError: wonderwords is not installed.
    """
    try:
        from wonderwords import RandomWord
    except ImportError:
        raise missing_package("recall", "wonderwords") from None
    return tuple(sorted(set(RandomWord().filter(include_categories=[kind]))))


@cache
def all_words() -> tuple[str, ...]:
    """List all nouns, adjectives and verbs, each once, sorted."""
    return tuple(sorted({*words_of("noun"), *words_of("adjective"), *words_of("verb")}))


def random_word(draw: random.Random) -> str:
    """Draw an adjective and a noun, such as "wet-umbrella"."""
    return f"{draw.choice(words_of('adjective'))}-{draw.choice(words_of('noun'))}"
