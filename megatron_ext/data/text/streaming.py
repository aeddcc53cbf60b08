"""Decode tokens incrementally, returning each character once and complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF_CHARACTER = "\ufffd"  # written by decoders for an incomplete character
CONTEXT = 8  # preceding tokens, because a tokenizer may decode a token differently at the beginning of a text


class TextStream:
    """Decodes a growing list of tokens, token by token.

        tokens    " caf"   0xC3   0xA9   "s"
        put       " caf"   ""     "é"    "s"        the two bytes of é are two tokens

    Args:
        decode: converts token ids to text.
        before: token ids that precede the text; their own text is not returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before[-CONTEXT:])
        self._first, self._shown = 0, len(self._tokens)

    def put(self, token: int) -> str:
        """Add the next token; return the text that is final and has not been returned yet."""
        self._tokens.append(token)
        text = self._new()
        if text.endswith(HALF_CHARACTER):
            return ""
        self._first, self._shown = max(self._shown - CONTEXT, 0), len(self._tokens)
        return text

    def end(self) -> str:
        """Return the remaining text, including an incomplete character."""
        text = self._new()
        self._first, self._shown = max(self._shown - CONTEXT, 0), len(self._tokens)
        return text

    def _new(self) -> str:
        shown = self._decode(self._tokens[self._first : self._shown])
        return self._decode(self._tokens[self._first :])[len(shown) :]
