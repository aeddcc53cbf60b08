"""Determine the vocabulary size, which a configuration may leave to its tokenizer."""

from __future__ import annotations

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError


def vocabulary_size(given: int | None, tokenizer: Tokenizer | str | None) -> int:
    """Return V, the number of token ids of a model: `vocab_size` if given, else that of the tokenizer.

    A given size may exceed the tokenizer's; the tokenizer is not loaded then, as that of a finished run may be missing.
    Pass a loaded `Tokenizer` to avoid loading it again.

    Raises:
        UserError: neither is given, or the tokenizer cannot be read.
    """
    if given is not None:
        return given
    if tokenizer is None:
        raise UserError("vocab_size: got nothing, needs a number or a tokenizer_model to take it from")
    return (Tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer).vocab_size
