"""Encode texts with gigatoken, which gives the ids of the library tokenizers in a fiftieth of its CPU time.

It serves what benchmarks/fuzz_ids.py found to be alike in both: byte-level BPE with a pattern that gigatoken knows, and
BPE with byte fallback. Texts with code points that Python's Unicode (14 or later) does not know are left to tokenizers,
because both libraries have later versions (17 and 16) and may differ in what is a letter. gigatoken remembers every
word that it has encoded, so it is loaded anew when the process has grown by MEMORY.
"""

import json
import re
import unicodedata
from functools import cache
from itertools import groupby

import numpy as np
import psutil
from numpy.typing import NDArray
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel

from megatron_ext.errors import installed_version, library_errors
from megatron_ext.files.reading import JsonObject

PACKAGE = "gigatoken"
MEMORY = 128 << 20  # bytes
MEASURED_EVERY = 1 << 20  # characters
LAST_PLANES = 0x40000
ASCII = bytes(range(128))
NO_NORMALIZER = {"type": "Sequence", "normalizers": []}  # DeepSeek's
MISREAD = re.compile(r"\d}\+")  # {1,3}+ is repeated in the Oniguruma of tokenizers, and possessive in gigatoken


class UnservedError(Exception):
    """Why gigatoken cannot encode for a tokenizer."""


class FastEncoder:
    """Encodes the texts that it `serves` as tokenizers does, for a tokenizer.json whose special tokens no text gives.

    Raises UnservedError if gigatoken is not installed, or may give other ids.
    """

    def __init__(self, description: JsonObject) -> None:
        version = installed_version(PACKAGE)
        if version is None:
            raise UnservedError(f"it is not installed; pip install {PACKAGE}")
        description = dict(description)
        if description["normalizer"] == NO_NORMALIZER:
            description["normalizer"] = None
        unserved = _unserved(description)
        if unserved is not None:
            raise UnservedError(f"it does not do {unserved}")
        description["added_tokens"] = [token for token in description["added_tokens"] if not token["special"]]
        self.name = f"{PACKAGE} {version}"
        self._nfc = description["normalizer"] == {"type": "NFC"}
        self._json = json.dumps(description)
        self._load()

    def _load(self) -> None:
        with library_errors(lambda reason: UnservedError(f"it cannot load the tokenizer ({reason})")):
            from gigatoken.gigatoken_rs import load_hf_json

            self._loaded = load_hf_json(self._json)
        self._characters = 0
        self._most = psutil.Process().memory_info().rss + MEMORY

    def serves(self, text: str) -> bool:
        """Return whether both libraries know all code points of a text."""
        if text.isascii():
            return True
        other_characters = text.encode().translate(None, ASCII).decode()
        return _unknown(self._nfc).search(other_characters) is None

    def __call__(self, text: str) -> NDArray[np.uint32]:
        """Return the token ids of a text, uint32 [n]; raise UnservedError if gigatoken fails."""
        self._characters += len(text)
        if self._characters > MEASURED_EVERY:
            self._characters = 0
            if psutil.Process().memory_info().rss > self._most:
                self._load()
        with library_errors(lambda reason: UnservedError(f"it cannot encode a text ({reason})")):
            ids: NDArray[np.uint32] = self._loaded.encode(text)
        return ids


def _unserved(description: JsonObject) -> str | None:
    """Return the part of a tokenizer.json that the libraries may use differently; no text gives special tokens."""
    model = description["model"]
    normalizer = description["normalizer"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return "models other than BPE, or prefixes and suffixes of tokens"
    flags = ["single_word", "lstrip", "rstrip"]
    if normalizer:
        flags.append("normalized")
    if any(token[flag] for token in description["added_tokens"] for flag in flags if not token["special"]):
        return "added tokens that are looked for otherwise than as they are spelled"
    if _found_otherwise(description["added_tokens"]):
        return "added tokens of which one may overlap another"
    if model["byte_fallback"]:
        byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
        is_served = all(step["type"] in ("Prepend", "Replace") for step in _steps(normalizer, "normalizers"))
    else:
        byte_tokens = set(ByteLevel.alphabet())
        is_served = normalizer in (None, {"type": "NFC"}) and _splits_alike(description["pre_tokenizer"])
    if not byte_tokens <= model["vocab"].keys():
        return "vocabularies without some bytes"
    if not is_served:
        return "its normalizer or pre_tokenizer"
    return None


def _steps(part: JsonObject | None, name: str) -> list[JsonObject]:
    """Return the steps of a normalizer or pre_tokenizer; `name` is the key of a sequence of them."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        steps: list[JsonObject] = part[name]
        return steps
    return [part]


def _splits_alike(pre_tokenizer: JsonObject | None) -> bool:
    """Return whether both libraries split a text alike: by patterns, if any, then by ByteLevel."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    if not steps:
        return False
    *patterns, last = steps
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": not patterns}
    return all(map(_is_pattern, patterns)) and byte_level.items() <= last.items()


def _found_otherwise(added_tokens: list[JsonObject]) -> bool:
    """Return whether the libraries may find other added tokens in a text, because some overlap.

    gigatoken looks for all ordinary tokens at once. tokenizers looks for those that are not `normalized` first, and for
    the others in what is left; special ones it finds, too, and leaves in the text as a whole:

        text xabcx, ab is normalized, bc is not     gigatoken x ab c x     tokenizers x a bc x
        text xabcx, ab is special, bc is not        gigatoken x a bc x     tokenizers x a b c x

    So no token may begin before one that it overlaps, or contain it, if only tokenizers tells the two apart.
    """
    for normalized in (False, True):
        tokens: list[str] = []
        rivals: list[str] = []  # the tokens that only tokenizers tells from `tokens`
        for token in added_tokens:
            if token["normalized"] == normalized:
                (rivals if token["special"] else tokens).append(token["content"])
            elif not token["special"] and not normalized:
                rivals.append(token["content"])
        starts = {text[:end] for text in tokens for end in range(1, len(text) + 1)}
        for rival in rivals:
            overlaps = any(rival[cut:] in starts for cut in range(1, len(rival)))
            if overlaps or any(text in rival for text in tokens):
                return True
    return False


def _is_pattern(step: JsonObject) -> bool:
    isolated = (step["type"], step.get("behavior"), step.get("invert")) == ("Split", "Isolated", False)
    return isolated and MISREAD.search(step["pattern"].get("Regex", "{1}+")) is None


@cache
def _unknown(nfc: bool) -> re.Pattern[str]:
    """Return a pattern of the code points that a text for gigatoken may not have.

    These are what Python's Unicode does not know, the sparse last planes and, with NFC, what tokenizers composes or
    orders otherwise than Python, because its table for that is of an early version.
    """
    is_known = [unicodedata.category(chr(number)) != "Cn" for number in range(LAST_PLANES)]
    if nfc:
        for character in map(chr, range(LAST_PLANES)):
            if unicodedata.combining(character) or unicodedata.decomposition(character):
                decomposed = unicodedata.normalize("NFD", character)
                texts = (decomposed, character + "\u0334", "\u0345" + character)
                if any(NFC().normalize_str(text) != unicodedata.normalize("NFC", text) for text in texts):
                    for part in decomposed:
                        is_known[ord(part)] = False
    runs = [list(run) for are_known, run in groupby(range(LAST_PLANES), is_known.__getitem__) if are_known]
    runs.sort(key=len, reverse=True)  # most characters outside plane 0 are found at once
    ranges = [f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs]
    return re.compile(f"[^{''.join(ranges)}]")
