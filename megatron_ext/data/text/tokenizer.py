"""Convert text to token ids and back, and train a byte-level BPE tokenizer.

A tokenizer is a folder with Hugging Face's tokenizer.json, or "bytes": ids 0 to 255 are the bytes of UTF-8, 256 ends a
document. tools/convert_tokenizer.py converts a SentencePiece, tiktoken or tekken file to it.

transformers' AutoTokenizer is not used: each worker would need 2.6 s and 260 MB to load it instead of 0.1 s and 33 MB;
and by default it encodes "<|endoftext|>" in a text as the end token (benchmarks/results/2026-11-22-libraries-cpu.txt).
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from megatron_ext.cli import program
from megatron_ext.data.text.fast import PACKAGE, FastEncoder, UnservedError
from megatron_ext.errors import UserError, first_line, library_errors
from megatron_ext.files.atomic import atomic_write
from megatron_ext.files.reading import JsonObject, read_object

logger = logging.getLogger(__name__)
HF_FILE = "tokenizer.json"
HF_CONFIG = "tokenizer_config.json"
_OLD_CONFIGS = ("added_tokens.json", "special_tokens_map.json")
BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
KNOWN_EOD_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>")
KNOWN_BOS_TOKENS = ("<|begin_of_text|>", "<s>")
BYTE_TOKENS = (*(bytes([byte]) for byte in range(256)), END_OF_TEXT.encode())
BYTES_AND_EOD = len(BYTE_TOKENS)
ENCODERS = ("auto", PACKAGE, "tokenizers")
SLOW_ENCODER = f"tokenizers {tokenizers.__version__}"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class RefusedTextError(UserError):
    """A text that would hold a special token."""


class Tokenizer:
    """A deterministic tokenizer: whole texts, no padding, no truncation, no BPE dropout.

    Special tokens spelled in a text ("</s>") are encoded as ordinary characters, so an end-of-document token (EOD)
    occurs only at the end of a document. `path` is a folder with tokenizer.json (and optionally the files that name
    more tokens, as in transformers), that file, or "bytes"; `eod_token` and `bos_token` (with which documents may
    begin, BOS) replace those that the tokenizer names; `encoder`, one of ENCODERS, is what `encode_array` uses: auto is
    gigatoken where it is installed and gives the same ids. Raises UserError if there is no tokenizer, a token is not in
    its vocabulary, or gigatoken is asked for and cannot serve.

    Attributes:
        file: the file of the tokenizer.
        fingerprint: hexadecimal SHA-256; tokenizers with the same fingerprint give the same token ids.
        named: the special tokens that its configuration names, such as eos_token.
        special: the special tokens by id.
        byte_ids: the tokens that are single bytes, which are decoded together (byte fallback).
        vocab_size: the largest token id plus one.
        encoder: what `encode_array` uses, with its version or why it is not gigatoken.
        fast: the encoder of gigatoken, if it is used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        eod_token: str | None = None,
        bos_token: str | None = None,
        encoder: str = "tokenizers",
    ) -> None:
        self._eod_token = eod_token
        self._bos_token = bos_token
        self._only_gigatoken = encoder == PACKAGE
        self.encoder = SLOW_ENCODER
        self.fast: FastEncoder | None = None
        self.named: dict[str, str] = {}
        self.special: dict[int, str] = {}
        self.byte_ids: frozenset[int] = frozenset()
        self._library: tokenizers.Tokenizer | None = None  # None for "bytes"
        self._ordinary: tokenizers.Tokenizer | None = None  # encodes texts; None for "bytes"
        self.file = Path(path)
        if os.fspath(path) == BYTES:
            self.vocab_size = BYTES_AND_EOD
            self.fingerprint = hashlib.sha256(BYTES.encode()).hexdigest()
            self._refused = frozenset(self._border_ids())
            if self._only_gigatoken:
                raise UserError(
                    f"encoder: got {PACKAGE} for the tokenizer {BYTES}, which needs none; pass --encoder auto"
                )
        else:
            self._open(encoder)

    def _open(self, encoder: str) -> None:
        """Load tokenizer.json and the files beside it, and make the encoder of texts."""
        content = self._read()
        with self._errors(f"is not a {HF_FILE}", "export it again"):
            library = tokenizers.Tokenizer.from_buffer(content)
        self._library = library
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        if isinstance(library.model, BPE):
            library.model.dropout = None
        tokens_in_file = library.get_added_tokens_decoder()
        self.named, tokens_beside = read_added_tokens(self.file, tokens_in_file)
        with self._errors("cannot normalize its added tokens", "export it again"):
            library.add_tokens(tokens_beside)
        added = library.get_added_tokens_decoder()
        self.special = {number: token.content for number, token in added.items() if token.special}
        border_ids = self._border_ids()
        self.special |= {number: str(library.id_to_token(number)) for number in border_ids}
        if (
            added != tokens_in_file
        ):  # before the tokens at documents' borders are special: they are settings of the data
            content += json.dumps(json.loads(library.to_str())["added_tokens"]).encode()
        library.add_special_tokens([added[number] for number in border_ids & added.keys()])
        description = json.loads(library.to_str())
        self.fingerprint = hashlib.sha256(content).hexdigest()
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if "ByteFallback" in str(description["decoder"]):
            byte_pieces = [piece for piece in vocabulary if re.fullmatch("<0x[0-9a-fA-F]{2}>", piece)]
            self.byte_ids = frozenset(vocabulary[piece] for piece in byte_pieces)
        model = description["model"]
        unknown_id = model["unk_id"] if model["type"] == "Unigram" else vocabulary.get(model["unk_token"])
        self._refused = frozenset(self.special) - {unknown_id} | border_ids
        self._ordinary = library
        if _hide_special(description, set(self.special.values())):
            self._ordinary = tokenizers.Tokenizer.from_str(json.dumps(description))
            self._ordinary.encode_special_tokens = True
        if encoder != "tokenizers":
            self._use_gigatoken(description)

    def _read(self) -> bytes:
        """Find tokenizer.json and return its content."""
        path = self.file
        if path.is_dir():
            self.file = path / HF_FILE
        is_other_format = self.file.suffix in (".model", ".tiktoken") or self.file.name == "tekken.json"
        if is_other_format or not self.file.is_file():
            raise UserError(
                f"tokenizer: {path} has no {HF_FILE}; {program('convert-tokenizer')} makes one from a SentencePiece, "
                f"tiktoken or tekken file, {program('train-tokenizer')} from texts; or pass {BYTES}"
            )
        return self.file.read_bytes()

    def _border_ids(self) -> set[int]:
        """Return the ids of EOD, if there is one, and of a BOS that was asked for; refuse a wrong token at once."""
        ids = set()
        if self._bos_token:
            ids.add(self.bos_id)
        try:
            ids.add(self.eod_id)
        except UserError:
            if self._eod_token:
                raise
        return ids

    def encode(self, text: str) -> list[int]:
        """Encode a text as token ids, none of them special.

        Raises UserError if that is impossible, such as for an end token that is a character of the text.
        """
        if self._ordinary is None:
            ids = list(text.encode())
        else:
            with self._errors("cannot encode a text", "use another"):  # such as without a token for unknown words
                ids = self._ordinary.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._refused.isdisjoint(ids):
            self._refuse(text, next(token for token in ids if token in self._refused))
        return ids

    def _errors(self, what: str, remedy: str) -> AbstractContextManager[None]:
        """Return a context in which errors of the library raise UserError."""
        return library_errors(lambda reason: UserError(f"tokenizer: {self.file} {what} ({reason}); {remedy}"))

    def _use_gigatoken(self, description: JsonObject) -> None:
        try:
            for token in self.special.values():
                if len(token) == 1:
                    raise UnservedError(f"it would not refuse a text with the special token {token!r}")
            self.fast = FastEncoder(description)
            self.encoder = self.fast.name
        except UnservedError as reason:
            self._leave_gigatoken(reason)

    def _leave_gigatoken(self, reason: UnservedError) -> None:
        if self._only_gigatoken:
            raise UserError(f"encoder: {PACKAGE} cannot serve {self.file}: {reason}; pass --encoder auto") from None
        self.fast = None
        self.encoder = f"{SLOW_ENCODER} (not {PACKAGE}: {reason})"

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """Encode a text as `encode` does, with the encoder that was asked for; auto leaves gigatoken if it fails."""
        if self.fast is not None and self.fast.serves(text):
            try:
                return self.fast(text)
            except UnservedError as reason:
                self._leave_gigatoken(reason)
                logger.warning("encoder: %s from here on", self.encoder)
        return np.array(self.encode(text), np.uint32)

    def compare(self, text: str) -> str | None:
        """Return how the ids of gigatoken and of tokenizers differ for a text, or None if they are the same."""
        fast_ids = self.encode_array(text).tolist()
        ids = self.encode(text)
        if fast_ids == ids:
            return None
        return f"{self.encoder} gives {fast_ids} and tokenizers {ids} for {text!r}"

    def _refuse(self, text: str, token: int) -> NoReturn:
        raise RefusedTextError(
            f"text: {text[:80]!r} would hold the special token {self.decode([token])!r} of {self.file}; change the "
            "text, or pass another --eod-token"
        )

    def encode_spelled(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text whose special tokens a chat template wrote; return also the characters [start, end) of each.

        Raises UserError for a special token that a normalizer makes of other characters.
        """
        with self._errors("cannot encode a chat", "use another"):
            encoding = self._spelled.encode(text, add_special_tokens=False)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            spelled = text[start:end]
            if token in self._refused and self.special[token] not in spelled:
                self._refuse(spelled, token)
        return encoding.ids, encoding.offsets

    @cached_property
    def _spelled(self) -> tokenizers.Tokenizer:
        assert self._library is not None
        spelled = tokenizers.Tokenizer.from_str(self._library.to_str())
        spelled.encode_special_tokens = False
        return spelled

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text, including special tokens; ids that the tokenizer does not have are left out."""
        if self._library is not None:
            return self._library.decode([int(token) for token in ids], skip_special_tokens=False)
        return b"".join(BYTE_TOKENS[token] for token in ids if token < BYTES_AND_EOD).decode(errors="replace")

    def continuation(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Decode token ids that continue other tokens, so that both texts joined are the text of all tokens."""
        head = self.decode(before)
        whole = self.decode([*before, *ids])
        if whole.startswith(head):
            return whole[len(head) :]
        # bytes that follow may turn a character of the same run of bytes into invalid ones (byte fallback)
        return self.decode(ids)

    @cached_property
    def eod_id(self) -> int:
        """The id of the end-of-document token; raises UserError if the tokenizer names none and none was given."""
        return self._special("eod_token", self._eod_token, "eos_token", KNOWN_EOD_TOKENS)

    @cached_property
    def bos_id(self) -> int:
        """The id of the token that documents may begin with; raises as `eod_id`."""
        return self._special("bos_token", self._bos_token, "bos_token", KNOWN_BOS_TOKENS)

    def _special(self, option: str, requested: str | None, configured: str, usual: Sequence[str]) -> int:
        """Return the id of the requested token, or else of the configured one, or else of the first usual one."""
        name = requested or self.named.get(configured)
        for token in (name,) if name else usual:
            number = self._token_id(token)
            if number is not None:
                return number
        flag = f"--{option.replace('_', '-')}"
        if name:
            raise UserError(f"{option}: {name!r} is not in the vocabulary of {self.file}; pass another {flag}")
        raise UserError(f"{option}: {self.file} names none and has none of {', '.join(usual)}; pass {flag}")

    def _token_id(self, token: str) -> int | None:
        if self._library is not None:
            return self._library.token_to_id(token)
        if token == END_OF_TEXT:
            return BYTES_AND_EOD - 1
        raw = token.encode()
        if len(raw) == 1:
            return raw[0]
        return None


def read_beside(file: Path, name: str) -> JsonObject:
    """Return the JSON object `name` in the folder of `file`; empty if there is no such file."""
    return read_object(file.with_name(name), "is not a JSON object; correct it or remove it") or {}


def spelling(token: Any) -> str | None:
    """Return the text of a token in a Hugging Face configuration, which is a string or a description."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_added_tokens(file: Path, in_file: Mapping[int, AddedToken]) -> tuple[dict[str, str], list[AddedToken]]:
    """Read the files beside tokenizer.json as transformers 5 does.

    Returns the special tokens that they name, and tokens to add to the tokens `in_file`, tokenizer.json, by id. Raises
    UserError for a description of a token that cannot be read.
    """
    config = read_beside(file, HF_CONFIG)
    numbers = config.get("added_tokens_decoder")
    older = read_beside(file, "special_tokens_map.json") if numbers is None else {}  # otherwise unused
    try:
        roles, extra = _special_tokens(config, older)
        spellings = {name: spelling(token) for name, token in roles.items()}
        named = {name: text for name, text in spellings.items() if text is not None}
        if numbers is not None:
            numbered = {int(number): AddedToken(**flags) for number, flags in numbers.items()}
        else:
            special = {*named.values(), *map(spelling, extra)}
            added = read_beside(file, "added_tokens.json").items()
            numbered = {int(number): AddedToken(text, special=text in special) for text, number in added}
            numbered |= in_file
        tokens = [numbered[number] for number in sorted(numbered)]
        texts = {token.content for token in (*in_file.values(), *tokens)}
        order = [*NAMES, *(name for name in named if name not in NAMES)]
        for token in (*(roles[name] for name in order if name in named), *extra):
            flags: JsonObject = {"content": token} if isinstance(token, str) else dict(token)
            flags.pop("__type", None)
            if flags["content"] not in texts:
                tokens.append(AddedToken(**{"special": True, **flags}))
        for token in tokens:
            token.special = token.special or token.content in named.values()
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(
            f"tokenizer: {file.parent} describes a token that cannot be read ({first_line(error)}); "
            f"correct its {HF_CONFIG}"
        ) from None
    return named, tokens


def _special_tokens(config: JsonObject, older: JsonObject) -> tuple[JsonObject, list[Any]]:
    """Return the special tokens of tokenizer_config.json and of an older file: by their names, and without names."""
    roles = {name: token for name, token in (config | older).items() if name.endswith("_token")}
    configured = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    of_older = older.get("extra_special_tokens")
    if not (of_older or "extra_special_tokens" in config or "additional_special_tokens" in config):
        of_older = older.get("additional_special_tokens")
    extra: list[Any] = []
    for tokens in (configured, of_older):
        if isinstance(tokens, dict):
            roles |= tokens
        elif tokens:
            extra += tokens
    return roles, extra


def _hide_special(description: JsonObject, special: set[str]) -> bool:
    """Change a tokenizer.json whose model makes special tokens of texts, so that it does not; return whether it did.

    As in SentencePiece, where no text gives a control piece, such pieces are renamed to what no text holds; all ids
    stay. A piece of one character keeps its name, because without it texts would lose that character.
    """
    model = description["model"]
    pieces = model["vocab"] if isinstance(model["vocab"], dict) else {piece for piece, _ in model["vocab"]}
    hidden = {token for token in special if token in pieces and len(token) > 1}
    if hidden and model["type"] == "BPE":
        prefix = model["continuing_subword_prefix"] or ""
        merges = [(left, right, left + right.removeprefix(prefix)) for left, right in model["merges"]]
        if not model["ignore_merges"]:  # a text gives what merges make
            hidden &= {whole for _, _, whole in merges}
        model["merges"] = [merge[:2] for merge in merges if hidden.isdisjoint(merge)]
    if not hidden:
        return False

    def rename(piece: str) -> str:
        if piece in hidden:
            return f"\ufdd0{piece}"
        return piece

    if isinstance(model["vocab"], dict):
        model["vocab"] = {rename(piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [(rename(piece), score) for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = rename(model["unk_token"])
    for token in description["added_tokens"]:
        token["content"] = rename(token["content"])
    description["post_processor"] = None  # names special tokens, and is not used for texts
    return True


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
    first = next(texts, None)
    if first is None:  # the library would silently write a tokenizer of 256 bytes
        raise UserError("input: no document to train a tokenizer on; check --input")
    trained.train_from_iterator(chain([first], texts), trainer)
    return write_tokenizer(trained, target, eos_token=END_OF_TEXT)


def check_new_tokenizer(folder: Path, overwrite: bool) -> None:
    """Raise UserError if `folder` has a tokenizer, or settings of one, that must not be overwritten."""
    for name in (HF_FILE, HF_CONFIG, *_OLD_CONFIGS):
        if not overwrite and (folder / name).exists():
            raise UserError(f"output: {folder / name} exists; pass --overwrite or another folder")


def write_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, **special: str) -> Tokenizer:
    """Write FOLDER/tokenizer.json and tokenizer_config.json, which names the special tokens, and load them."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False}
    folder.mkdir(parents=True, exist_ok=True)
    for name in _OLD_CONFIGS:  # would add tokens
        (folder / name).unlink(missing_ok=True)
    for name, text in ((HF_CONFIG, json.dumps(config, indent=2)), (HF_FILE, tokenizer.to_str(pretty=True))):
        with atomic_write(folder / name) as partial:
            partial.write_text(text + "\n", encoding="utf-8")
    return Tokenizer(folder)


HALF_CHARACTER = "\ufffd"  # written by decoders for an incomplete character


class TextStream:
    """Decodes a growing list of tokens, token by token; the parts together are the text of all tokens.

        tokens    " caf"   0xC3   0xA9   "s"
        put       " caf"   ""     "é"    "s"        the two bytes of é are two tokens

    With byte fallback a run of bytes is returned with the token after it, because one wrong byte makes all of the run
    invalid. tokenizers' DecodeStream refuses bytes that are no UTF-8, which young models write ("Invalid prefix
    encountered"). The text of the tokens `before` is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = list(before)
        self._waiting: list[int] = []

    def put(self, token: int) -> str:
        """Add the next token; return the text that is final and has not been returned yet."""
        self._waiting.append(token)
        if token in self._tokenizer.byte_ids or not self._tokenizer.decode([token]):
            return ""
        text = self.end()
        if text[-1:] in ("", HALF_CHARACTER):
            return ""
        # the waiting tokens begin where a text was complete, and have a text even without the tokens before them
        self._shown = self._waiting
        self._waiting = []
        return text

    def end(self) -> str:
        """Return the remaining text, an incomplete character."""
        return self._tokenizer.continuation(self._shown, self._waiting)


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return what each token adds to the text of the tokens, of which there is at least one."""
    stream = TextStream(tokenizer)
    texts = [stream.put(token) for token in tokens]
    texts[-1] += stream.end()
    return texts


def ids_without_rows(tokenizer: Tokenizer, rows: int) -> list[str]:
    """Return a line that says how many ids of a tokenizer a model of `rows` token ids does not have, if any."""
    more = tokenizer.vocab_size - rows
    if more <= 0:
        return []
    ids = f"{tokenizer.vocab_size:,} ids of {tokenizer.file}"
    return [f"{more:,} of the {ids} have no row in the model's {rows:,}; a text that uses one is refused"]


def vocabulary_size(requested: int | None, tokenizer: str | None) -> int:
    """Return V, the number of token ids of a model: as requested, else of the tokenizer, which is only then loaded."""
    if requested is not None:
        return requested
    if tokenizer is None:
        raise UserError("vocab_size: got nothing, needs a number or a tokenizer_model to take it from")
    return Tokenizer(tokenizer).vocab_size
