"""The size of a vocabulary, which a configuration may leave to its tokenizer."""

from __future__ import annotations

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError


def vocabulary_size(given: int | None, tokenizer: Tokenizer | str | None) -> int:
    """Return V, the token ids of a model: `vocab_size` where it is given, else those of `tokenizer_model`.

    A given size may be above the tokenizer's, and the tokenizer of a finished run may be gone: it is not opened then.
    Whoever has opened the tokenizer hands it over instead of its name.

    Raises:
        UserError: neither of the two, or a tokenizer that cannot be read.
    """
    if given is not None:
        return given
    if tokenizer is None:
        raise UserError("vocab_size: got nothing, needs a number or a tokenizer_model to take it from")
    return (Tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer).vocab_size
