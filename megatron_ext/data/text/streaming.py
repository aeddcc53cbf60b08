"""Decode tokens as they come; each character is returned once and whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF_CHARACTER = "\ufffd"  # what decoders write for bytes that do not make a character yet
CONTEXT = 8  # tokens before: a tokenizer may write a token otherwise at a text's beginning


class TextStream:
    """Decodes a growing list of tokens, token by token.

        tokens    " caf"   0xC3   0xA9   "s"
        put       " caf"   ""     "é"    "s"        the two bytes of é are two tokens

    Args:
        decode: turns token ids into text.
        before: token ids that the text continues; their own text is not handed out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before[-CONTEXT:])
        self._first, self._shown = 0, len(self._tokens)

    def put(self, token: int) -> str:
        """Take the next token; return the text that is certain by now and has not been handed out."""
        self._tokens.append(token)
        text = self._new()
        if text.endswith(HALF_CHARACTER):
            return ""
        self._first, self._shown = max(self._shown - CONTEXT, 0), len(self._tokens)
        return text

    def end(self) -> str:
        """Return what has not been handed out, half a character too."""
        text = self._new()
        self._first, self._shown = max(self._shown - CONTEXT, 0), len(self._tokens)
        return text

    def _new(self) -> str:
        shown = self._decode(self._tokens[self._first : self._shown])
        return self._decode(self._tokens[self._first :])[len(shown) :]
