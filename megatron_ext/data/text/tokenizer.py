"""Convert text to token ids and back, and train a byte-level BPE tokenizer.

A tokenizer is a folder with Hugging Face's tokenizer.json, or "bytes": ids 0 to 255 are the bytes of UTF-8, 256 ends a
document. tools/convert_tokenizer.py converts a SentencePiece or tiktoken file to tokenizer.json.

transformers' AutoTokenizer is not used: each worker would need 2.6 s and 260 MB to load it instead of 0.1 s and 33 MB;
and by default it encodes "<|endoftext|>" in a text as the end token (benchmarks/results/2026-11-22-libraries-cpu.txt).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from megatron_ext.cli import program
from megatron_ext.data.text.cutting import ChunkEncoder, can_cut
from megatron_ext.errors import UserError, first_line
from megatron_ext.files.atomic import atomic_write
from megatron_ext.files.reading import read_object

HF_FILE = "tokenizer.json"
HF_CONFIG = "tokenizer_config.json"
BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
KNOWN_EOD_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>")
KNOWN_BOS_TOKENS = ("<|begin_of_text|>", "<s>")
BYTES_AND_EOD = 257


class Tokenizer:
    """A deterministic tokenizer: whole texts, no padding, no truncation, no BPE dropout.

    Special tokens spelled in a text ("</s>") are encoded as ordinary characters, so an end-of-document token (EOD)
    occurs only at the end of a document. `path` is a folder with tokenizer.json (and optionally tokenizer_config.json),
    that file, or "bytes"; `eod_token` and `bos_token` (with which documents may begin, BOS) replace those that the
    tokenizer names. Raises UserError if there is no tokenizer, or a token is not in its vocabulary.

    Attributes:
        file: the file of the tokenizer.
        fingerprint: hexadecimal SHA-256; tokenizers with the same fingerprint give the same token ids.
        vocab_size: the largest token id plus one.
    """

    def __init__(
        self, path: str | os.PathLike[str], eod_token: str | None = None, bos_token: str | None = None
    ) -> None:
        name = os.fspath(path)
        self._library: tokenizers.Tokenizer | None = None  # None for "bytes"
        self._chunks: ChunkEncoder | None = None
        self.file, content, self.vocab_size = Path(name), BYTES.encode(), BYTES_AND_EOD
        if name != BYTES:
            if self.file.is_dir():
                self.file /= HF_FILE
            if not self.file.is_file() or self.file.suffix in (".model", ".tiktoken"):
                raise UserError(
                    f"tokenizer: {name} has no {HF_FILE}; {program('convert-tokenizer')} makes one from a "
                    f"SentencePiece or tiktoken file, {program('train-tokenizer')} from texts; or pass {BYTES}"
                )
            content = self.file.read_bytes()
            try:
                self._library = tokenizers.Tokenizer.from_buffer(content)
            except Exception as error:  # the library raises bare Exceptions and ValueErrors
                raise UserError(
                    f"tokenizer: {self.file} is not a {HF_FILE} ({first_line(error)}); export it again"
                ) from None
            self._library.no_truncation()
            self._library.no_padding()
            self._library.encode_special_tokens = True
            if isinstance(self._library.model, BPE):
                self._library.model.dropout = None
            self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            about = json.loads(self._library.to_str())
            self._chunks = ChunkEncoder(self._encode, about["added_tokens"]) if can_cut(about) else None
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._eod_token, self._bos_token = eod_token, bos_token
        # a wrong token is refused at once
        _ = eod_token and self.eod_id
        _ = bos_token and self.bos_id

    def encode(self, text: str) -> list[int]:
        """Encode a text as token ids; no special token is added."""
        if self._library is None:
            return list(text.encode())
        return self._encode([text])[0] if self._chunks is None else self._chunks(text)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        assert self._library is not None
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_spelled(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text whose special tokens a chat template wrote; return also the characters [start, end) of each."""
        encoding = self._spelled.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def _spelled(self) -> tokenizers.Tokenizer:
        assert self._library is not None
        spelled = tokenizers.Tokenizer.from_str(self._library.to_str())
        spelled.encode_special_tokens = False
        return spelled

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text, including special tokens."""
        if self._library is not None:
            return self._library.decode([int(token) for token in ids], skip_special_tokens=False)
        parts = (END_OF_TEXT.encode() if token == BYTES_AND_EOD - 1 else bytes([token]) for token in ids)
        return b"".join(parts).decode(errors="replace")

    @cached_property
    def eod_id(self) -> int:
        """The id of the end-of-document token; raises UserError if the tokenizer names none and none was given."""
        return self._special("eod_token", self._eod_token, "eos_token", KNOWN_EOD_TOKENS)

    @cached_property
    def bos_id(self) -> int:
        """The id of the token that documents may begin with; raises as `eod_id`."""
        return self._special("bos_token", self._bos_token, "bos_token", KNOWN_BOS_TOKENS)

    def _special(self, option: str, given: str | None, configured: str, known: Sequence[str]) -> int:
        """Return the id of the given token, of the one that the configuration names, or of the first known one."""
        name = given or (self._library and spelling(read_beside(self.file, HF_CONFIG).get(configured)))
        for token in (name,) if name else known:
            if (number := self._token_id(token)) is not None:
                return number
        flag = f"--{option.replace('_', '-')}"
        if name:
            raise UserError(f"{option}: {name!r} is not in the vocabulary of {self.file}; pass another {flag}")
        raise UserError(f"{option}: {self.file} names none and has none of {', '.join(known)}; pass {flag}")

    def _token_id(self, token: str) -> int | None:
        if self._library is not None:
            return self._library.token_to_id(token)
        raw = token.encode()
        return BYTES_AND_EOD - 1 if token == END_OF_TEXT else raw[0] if len(raw) == 1 else None


def read_beside(file: Path, name: str) -> dict[str, Any]:
    """Return the JSON object `name` in the folder of `file`; empty if there is no such file."""
    return read_object(file.with_name(name), "is not a JSON object; correct it or remove it") or {}


def spelling(token: Any) -> str | None:
    """Return the text of a token in a Hugging Face configuration, which is a string or a description."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def train_bpe(
    texts: Iterable[str], vocab_size: int, folder: str | os.PathLike[str], *, overwrite: bool = False
) -> Tokenizer:
    """Train a byte-level BPE with the end token `<|endoftext|>` (id 0) and write it to `folder`.

    The same texts give the same file. With little text the vocabulary is smaller than requested.
    """
    target = Path(folder)
    if vocab_size < BYTES_AND_EOD:
        raise UserError(f"vocab_size: got {vocab_size}, needs at least {BYTES_AND_EOD} (256 bytes and {END_OF_TEXT})")
    check_new_tokenizer(target, overwrite)
    trained = tokenizers.Tokenizer(BPE())
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trained.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = iter(texts)
    if (first := next(texts, None)) is None:  # the library would silently write a tokenizer of 256 bytes
        raise UserError("input: no document to train a tokenizer on; check --input")
    trained.train_from_iterator(chain([first], texts), trainer)
    return write_tokenizer(trained, target, eos_token=END_OF_TEXT)


def check_new_tokenizer(folder: Path, overwrite: bool) -> None:
    """Raise UserError if `folder` has a tokenizer that must not be overwritten."""
    if not overwrite and (folder / HF_FILE).exists():
        raise UserError(f"output: {folder / HF_FILE} exists; pass --overwrite or another folder")


def write_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, **special: str) -> Tokenizer:
    """Write FOLDER/tokenizer.json and tokenizer_config.json, which names the special tokens, and load them."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((HF_CONFIG, json.dumps(config, indent=2)), (HF_FILE, tokenizer.to_str(pretty=True))):
        with atomic_write(folder / name) as partial:
            partial.write_text(text + "\n", encoding="utf-8")
    return Tokenizer(folder)


HALF_CHARACTER = "\ufffd"  # written by decoders for an incomplete character
CONTEXT = 8  # preceding tokens, because a tokenizer may decode a token differently at the beginning of a text


class TextStream:
    """Decodes a growing list of tokens, token by token.

        tokens    " caf"   0xC3   0xA9   "s"
        put       " caf"   ""     "é"    "s"        the two bytes of é are two tokens

    tokenizers' DecodeStream refuses bytes that are no UTF-8, which young models write ("Invalid prefix encountered").
    The text of the tokens `before` is not returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._shown, self._waiting = list(before[-CONTEXT:]), list[int]()

    def put(self, token: int) -> str:
        """Add the next token; return the text that is final and has not been returned yet."""
        self._waiting.append(token)
        text = self.end()
        if text.endswith(HALF_CHARACTER):
            return ""
        self._shown, self._waiting = [*self._shown, *self._waiting][-CONTEXT:], []
        return text

    def end(self) -> str:
        """Return the remaining text, an incomplete character."""
        return self._decode([*self._shown, *self._waiting])[len(self._decode(self._shown)) :]


def vocabulary_size(given: int | None, tokenizer: str | None) -> int:
    """Return V, the number of token ids of a model: as given, else of the tokenizer, which is only then loaded."""
    if given is not None:
        return given
    if tokenizer is None:
        raise UserError("vocab_size: got nothing, needs a number or a tokenizer_model to take it from")
    return Tokenizer(tokenizer).vocab_size
