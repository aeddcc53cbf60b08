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
from contextlib import AbstractContextManager, nullcontext, suppress
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
from megatron_ext.files.reading import read_object

logger = logging.getLogger(__name__)
HF_FILE = "tokenizer.json"
HF_CONFIG = "tokenizer_config.json"
BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
KNOWN_EOD_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>")
KNOWN_BOS_TOKENS = ("<|begin_of_text|>", "<s>")
BYTES_AND_EOD = 257
ENCODERS = ("auto", PACKAGE, "tokenizers")
SLOW_ENCODER = f"tokenizers {tokenizers.__version__}"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
        name = os.fspath(path)
        self._library: tokenizers.Tokenizer | None = None  # None for "bytes"
        self.encoder = SLOW_ENCODER
        self.fast: FastEncoder | None = None
        self._only_gigatoken = encoder == PACKAGE
        self._eod_token, self._bos_token = eod_token, bos_token
        self.file, content, self.vocab_size = Path(name), BYTES.encode(), BYTES_AND_EOD
        self.named, self.special, self.byte_ids = dict[str, str](), dict[int, str](), frozenset[int]()
        if name != BYTES:
            if self.file.is_dir():
                self.file /= HF_FILE
            other_format = self.file.suffix in (".model", ".tiktoken") or self.file.name == "tekken.json"
            if other_format or not self.file.is_file():
                raise UserError(
                    f"tokenizer: {name} has no {HF_FILE}; {program('convert-tokenizer')} makes one from a "
                    f"SentencePiece, tiktoken or tekken file, {program('train-tokenizer')} from texts; or pass {BYTES}"
                )
            content = self.file.read_bytes()
            with self._errors(f"is not a {HF_FILE}", "export it again"):
                self._library = tokenizers.Tokenizer.from_buffer(content)
            self._library.no_truncation()
            self._library.no_padding()
            self._library.encode_special_tokens = True
            if isinstance(self._library.model, BPE):
                self._library.model.dropout = None
            own = self._library.get_added_tokens_decoder()
            self.named, more = read_added_tokens(self.file, own)
            with self._errors("cannot normalize its added tokens", "export it again"):
                self._library.add_tokens(more)
            added = self._library.get_added_tokens_decoder()
            self.special = {number: token.content for number, token in added.items() if token.special}
        borders: set[int] = {self.bos_id} if bos_token else set()  # a wrong token is refused at once
        with nullcontext() if eod_token else suppress(UserError):  # the tokenizer may have no end token
            borders.add(self.eod_id)
        self._ordinary, unknown = self._library, None  # encodes texts; its id for what it does not know
        if self._library is not None:
            self.special |= {number: str(self._library.id_to_token(number)) for number in borders}
            self._library.add_special_tokens([added[number] for number in borders & added.keys()])
            about = json.loads(self._library.to_str())
            vocabulary, model = self._library.get_vocab(with_added_tokens=True), about["model"]
            self.vocab_size = max(vocabulary.values(), default=-1) + 1
            if added != own:
                content += json.dumps(about["added_tokens"]).encode()
            if "ByteFallback" in str(about["decoder"]):
                self.byte_ids = frozenset(
                    vocabulary[one] for one in vocabulary if re.fullmatch("<0x[0-9a-fA-F]{2}>", one)
                )
            unknown = model["unk_id"] if model["type"] == "Unigram" else vocabulary.get(model["unk_token"])
            if _hide_special(about, set(self.special.values())):
                self._ordinary = tokenizers.Tokenizer.from_str(json.dumps(about))
                self._ordinary.encode_special_tokens = True
            if encoder != "tokenizers":
                self._use_gigatoken(about)
        elif self._only_gigatoken:
            raise UserError(f"encoder: got {PACKAGE} for the tokenizer {BYTES}, which needs none; pass --encoder auto")
        self._refused = frozenset(self.special) - {unknown} | borders
        self.fingerprint = hashlib.sha256(content).hexdigest()

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

    def _use_gigatoken(self, about: dict[str, Any]) -> None:
        try:
            for token in self.special.values():
                if len(token) == 1:
                    raise UnservedError(f"it would not refuse a text with the special token {token!r}")
            self.fast = FastEncoder(about)
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
        ids, others = self.encode_array(text).tolist(), self.encode(text)
        return None if ids == others else f"{self.encoder} gives {ids} and tokenizers {others} for {text!r}"

    def _refuse(self, text: str, token: int) -> NoReturn:
        raise UserError(
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
            if token in self._refused and self.special[token] not in text[start:end]:
                self._refuse(text[start:end], token)
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
        known = (token for token in ids if token < BYTES_AND_EOD)
        parts = (END_OF_TEXT.encode() if token == BYTES_AND_EOD - 1 else bytes([token]) for token in known)
        return b"".join(parts).decode(errors="replace")

    def continuation(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Decode token ids that continue the text of other tokens, so that the two texts joined are that of all."""
        head, whole = self.decode(before), self.decode([*before, *ids])
        # bytes that follow may turn a character of the same run of bytes into invalid ones (byte fallback)
        return whole[len(head) :] if whole.startswith(head) else self.decode(ids)

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
        name = given or self.named.get(configured)
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


def read_added_tokens(file: Path, own: Mapping[int, AddedToken]) -> tuple[dict[str, str], list[AddedToken]]:
    """Read the files beside tokenizer.json as transformers 5 does.

    Returns the special tokens that they name, and tokens to add to those of tokenizer.json (`own`, by id). Raises
    UserError for a description of a token that cannot be read.
    """
    config = read_beside(file, HF_CONFIG)
    numbers = config.get("added_tokens_decoder")
    older = read_beside(file, "special_tokens_map.json") if numbers is None else {}  # otherwise unused
    lists, extra = ("extra_special_tokens", "additional_special_tokens"), list[Any]()
    roles = {name: token for name, token in (config | older).items() if name.endswith("_token")}
    try:
        theirs = older.get(lists[0]) or (None if config.keys() & set(lists) else older.get(lists[1]))
        for found in (config.get(lists[0]) or config.get(lists[1]), theirs):
            if isinstance(found, dict):
                roles |= found
            else:
                extra += found or []
        named = {name: text for name, token in roles.items() if (text := spelling(token)) is not None}
        if numbers is not None:
            numbered = {int(number): AddedToken(**one) for number, one in numbers.items()}
        else:
            special = {*named.values(), *map(spelling, extra)}
            added = read_beside(file, "added_tokens.json").items()
            numbered = {int(number): AddedToken(text, special=text in special) for text, number in added} | dict(own)
        order = [*NAMES, *(name for name in named if name not in NAMES)]
        tokens = [numbered[number] for number in sorted(numbered)]
        known = {one.content for one in (*own.values(), *tokens)}
        for token in (*(roles[name] for name in order if name in named), *extra):
            flags: dict[str, Any] = {"content": token} if isinstance(token, str) else dict(token)
            flags.pop("__type", None)
            if flags["content"] not in known:
                tokens.append(AddedToken(**{"special": True, **flags}))
        for one in tokens:
            one.special = one.special or one.content in named.values()
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(
            f"tokenizer: {file.parent} describes a token that cannot be read ({first_line(error)}); "
            f"correct its {HF_CONFIG}"
        ) from None
    return named, tokens


def _hide_special(about: dict[str, Any], special: set[str]) -> bool:
    """Change tokenizer.json, `about`, so that its model makes no special tokens of texts; return whether it would.

    As in SentencePiece, where no text gives a control piece, such pieces are renamed to what no text holds; all ids
    stay. A piece of one character keeps its name, because without it texts would lose that character.
    """
    model = about["model"]
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
        return f"\ufdd0{piece}" if piece in hidden else piece

    if isinstance(model["vocab"], dict):
        model["vocab"] = {rename(piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [(rename(piece), score) for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = rename(model["unk_token"])
    for token in about["added_tokens"]:
        token["content"] = rename(token["content"])
    about["post_processor"] = None  # names special tokens, and is not used for texts
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


class TextStream:
    """Decodes a growing list of tokens, token by token; the parts joined are the text of all.

        tokens    " caf"   0xC3   0xA9   "s"
        put       " caf"   ""     "é"    "s"        the two bytes of é are two tokens

    With byte fallback a run of bytes is returned with the token after it, because one wrong byte makes all of the run
    invalid. tokenizers' DecodeStream refuses bytes that are no UTF-8, which young models write ("Invalid prefix
    encountered"). The text of the tokens `before` is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown, self._waiting = list(before), list[int]()

    def put(self, token: int) -> str:
        """Add the next token; return the text that is final and has not been returned yet."""
        self._waiting.append(token)
        if token in self._tokenizer.byte_ids or not self._tokenizer.decode([token]):
            return ""
        text = self.end()
        if text[-1:] in ("", HALF_CHARACTER):
            return ""
        # these begin where a text was complete, and have a text even without what precedes
        self._shown, self._waiting = self._waiting, []
        return text

    def end(self) -> str:
        """Return the remaining text, an incomplete character."""
        return self._tokenizer.continuation(self._shown, self._waiting)


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return what each of at least one token adds to their text."""
    stream = TextStream(tokenizer)
    return [*map(stream.put, tokens[:-1]), stream.put(tokens[-1]) + stream.end()]


def ids_without_rows(tokenizer: Tokenizer, rows: int) -> list[str]:
    """Return a line that says how many ids of a tokenizer a model of `rows` token ids does not have, if any."""
    more, ids = tokenizer.vocab_size - rows, f"{tokenizer.vocab_size:,} ids of {tokenizer.file}"
    return [f"{more:,} of the {ids} have no row in the model's {rows:,}; a text that uses one is refused"] * (more > 0)


def vocabulary_size(given: int | None, tokenizer: str | None) -> int:
    """Return V, the number of token ids of a model: as given, else of the tokenizer, which is only then loaded."""
    if given is not None:
        return given
    if tokenizer is None:
        raise UserError("vocab_size: got nothing, needs a number or a tokenizer_model to take it from")
    return Tokenizer(tokenizer).vocab_size
