"""Tokenize text in chunks, with the same token ids in less time and memory.

    for i in range(10): ...    |for| i| in| range|(10):| ...|        | a boundary

Most byte-level BPE tokenizers first split a text by a pattern and never merge across its parts. In the patterns below a
letter is followed only by letters, a space begins a part or follows white space, and there is no lookbehind. So
wherever an ASCII letter is followed by another ASCII character, or a printable ASCII character by a space, a part ends,
regardless of context; and Unicode composition (NFC) does not cross these places. The text between two such boundaries
always has the same token ids, so those of frequent chunks are cached. Other kinds of tokenizers get the whole text.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

BOUNDARY = re.compile(r"(?<=[A-Za-z])(?=[\x00-@\[-`{-\x7f])|(?<=[!-~])(?= )")
# Matches the text between two boundaries a third faster: runs that no boundary follows, and the run that ends the
# chunk. No possessive quantifiers, because Python 3.11.0 to 3.11.4 handle nested ones incorrectly.
_SIGNS = r"!-@\[-`{-~"
CHUNK = re.compile(rf"(?:[^!-~]+|[{_SIGNS}]+(?![ {_SIGNS}])|[A-Za-z]+(?=[^\x00-\x7f]))*(?:[{_SIGNS}]+|[A-Za-z]+)?")
PIECE = 1 << 16  # characters that are split at a time
MEMORY = 16 << 20  # characters of cached chunks, each counted with ENTRY more
ENTRY = 64
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PATTERNS = frozenset(
    (
        _WORDS + r"\p{N}{1,3}" + _TAIL,  # GPT-4, Llama 3
        _WORDS + r"\p{N}" + _TAIL,  # Qwen 2, 2.5, 3
    )
)


def can_cut(about: dict[str, Any]) -> bool:
    """Return whether a text's ids are those of its chunks, unless it has an added token; `about` is tokenizer.json."""
    if about["normalizer"] not in (None, {"type": "NFC"}) or about["model"]["type"] != "BPE":
        return False
    # NFC can create such a token, which `ChunkEncoder` would not find in the original text.
    looked_for_after_nfc = any(token["normalized"] and not token["special"] for token in about["added_tokens"])
    return not (about["normalizer"] and looked_for_after_nfc) and _splits(about["pre_tokenizer"])


def _splits(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether texts are split by GPT-2's pattern, which is built in, or by one of PATTERNS."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "ByteLevel":
        return pre_tokenizer["use_regex"] and not pre_tokenizer["add_prefix_space"]
    if pre_tokenizer["type"] != "Sequence" or len(pre_tokenizer["pretokenizers"]) != 2:
        return False
    split, byte_level = pre_tokenizer["pretokenizers"]
    return (
        split["type"] == "Split"
        and split["pattern"].get("Regex") in PATTERNS
        and (split["behavior"], split["invert"]) == ("Isolated", False)
        and byte_level["type"] == "ByteLevel"
        and not (byte_level["use_regex"] or byte_level["add_prefix_space"])
    )


class ChunkEncoder:
    """Encodes texts chunk by chunk.

    `encode` returns the token ids of each text of a list; its tokenizer satisfies `can_cut`. Those of the
    `added_tokens` of tokenizer.json that are not special are searched for in a text before it is split, so a text that
    contains one is encoded as a whole.
    """

    def __init__(
        self, encode: Callable[[list[str]], list[list[int]]], added_tokens: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._encode = encode
        self._added = [token["content"] for token in added_tokens if not token["special"]]
        self._known: dict[str, list[int]] = {}
        self._memory = 0

    def __call__(self, text: str) -> list[int]:
        if any(token in text for token in self._added):
            return self._encode([text])[0]
        return list(chain.from_iterable(map(self._ids, pieces(text))))

    def _ids(self, piece: str) -> list[int]:
        """Encode a piece of a text; if the cache is full, it is cleared except for the piece's own chunks."""
        chunks = CHUNK.findall(piece)
        new = set(chunks).difference(self._known)  # most chunks are words that occurred before
        self._memory += sum(map(len, new)) + ENTRY * len(new)
        if self._memory > MEMORY:
            self._known, new = {}, set(chunks)
            self._memory = sum(map(len, new)) + ENTRY * len(new)
        if new:
            self._known.update(zip(new, self._encode(list(new)), strict=True))
        return list(chain.from_iterable(map(self._known.__getitem__, chunks)))


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a text at boundaries into pieces of slightly more than `size` characters."""
    assert size > 0
    start = 0
    while len(text) - start > size and (boundary := BOUNDARY.search(text, start + size)):
        yield text[start : boundary.start()]
        start = boundary.start()
    yield text[start:]
