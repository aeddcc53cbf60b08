"""The libraries that tokenize, behind one interface: tokenizers, SentencePiece, tiktoken; and plain bytes.

Each is deterministic and takes a text whole: no padding, no truncation, no dropout. A text that spells a
special token ("</s>") holds ordinary characters, never that token.

The library refused is transformers' AutoTokenizer. In each worker it takes 2.6 s of a core and 260 MB to open, where
tokenizers takes 0.1 s and 33 MB; it encodes an eighth fewer tokens per second (see `cutting`), and turns
"<|endoftext|>" in a text into the end token unless told otherwise. Measured by benchmarks/libraries.py, in
benchmarks/results/2026-11-22-libraries-cpu.txt. Chat templates are transformers' own: see `chat`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers.models import BPE

from megatron_ext.cli import program
from megatron_ext.data.text.cutting import ChunkEncoder, added_tokens, can_cut
from megatron_ext.errors import UserError, echo, first_line, missing_package
from megatron_ext.files.json_file import read_object

HF_FILE = "tokenizer.json"
HF_CONFIG = "tokenizer_config.json"
MODEL_FILE = "tokenizer.model"
TIKTOKEN_PREFIX = "tiktoken:"
BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
# The pattern that GPT-4 (cl100k_base) and Llama 3 split texts by.
TIKTOKEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Backend(Protocol):
    """Does the work of a tokenizer.

    Attributes:
        file: where the tokenizer comes from; its name, where it is no file.
        fingerprint: hexadecimal SHA-256 of all that decides its token ids.
        vocab_size: one more than the largest token id.
    """

    file: Path
    fingerprint: str
    vocab_size: int

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def configured_eod(self) -> str | None: ...

    def configured_bos(self) -> str | None: ...


def open_backend(name: str) -> Backend:
    """Open the tokenizer that `name` names: "bytes", "tiktoken:NAME", or a path.

    Raises:
        UserError: nothing there, or nothing that is a tokenizer.
    """
    if name == BYTES:
        return ByteTokenizer()
    if name.startswith(TIKTOKEN_PREFIX):
        rest = name.removeprefix(TIKTOKEN_PREFIX)
        return TiktokenFile(Path(rest)) if Path(rest).is_file() else TiktokenName(rest)
    file = Path(name)
    if file.is_dir():
        inside = [file / HF_FILE, file / MODEL_FILE, *sorted(file.glob("*.tiktoken")), *sorted(file.glob("*.model"))]
        file = next(filter(Path.is_file, inside), inside[0])
    if not file.is_file():
        raise UserError(
            f"tokenizer: {file} does not exist; needs a folder that holds {HF_FILE} ({program('train-tokenizer')} "
            f"makes one), a SentencePiece .model, a .tiktoken file, tiktoken:NAME, or {BYTES}"
        )
    if file.suffix not in (".model", ".tiktoken"):
        return HuggingFace(file)
    with file.open("rb") as lines:  # Llama 3's tokenizer.model is a tiktoken file, Llama 2's a SentencePiece model
        is_tiktoken = file.suffix == ".tiktoken" or TIKTOKEN_LINE.fullmatch(lines.readline(4096))
    return TiktokenFile(file) if is_tiktoken else SentencePiece(file)


def read_beside(file: Path, name: str) -> dict[str, Any]:
    """Read the JSON object `name` in the folder of a tokenizer's file; it is empty where there is no such file.

    Raises:
        UserError: the file holds something else.
    """
    return read_object(file.with_name(name), "is not a JSON object; mend it or remove it") or {}


def spelling(token: Any) -> str | None:
    """Spell a token of a Hugging Face configuration, which holds either its text or a description of it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class HuggingFace:
    """Reads a tokenizer.json, and the end token that a tokenizer_config.json beside it names."""

    def __init__(self, file: Path) -> None:
        self.file = file
        raw = file.read_bytes()
        self.fingerprint = hashlib.sha256(raw).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as error:  # the library raises bare Exceptions and ValueErrors
            cause = first_line(error)
            raise UserError(f"tokenizer: {file} is not a {HF_FILE} ({cause}); export it again") from None
        # What a tokenizer.json may ask for and a dataset must not have: texts cut or padded, the special token where a
        # text spells it, other ids at each call.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        if isinstance(self._tokenizer.model, BPE):
            self._tokenizer.model.dropout = None
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._spelling: tokenizers.Tokenizer | None = None
        about = self._tokenizer.to_str()
        self._chunks = ChunkEncoder(self._encode, added_tokens(about)) if can_cut(about) else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(texts) if self._chunks is None else self._chunks(texts)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_spelled(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Encode texts, and say which characters [start, end) each token has; here "</s>" is the special token."""
        if self._spelling is None:
            self._spelling = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
            self._spelling.encode_special_tokens = False
        encodings = self._spelling.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def configured_eod(self) -> str | None:
        return self._configured("eos_token")

    def configured_bos(self) -> str | None:
        return self._configured("bos_token")

    def _configured(self, name: str) -> str | None:
        """Return a token that the configuration names; None where it names none.

        Raises:
            UserError: what it names is no token.
        """
        given = read_beside(self.file, HF_CONFIG).get(name)
        text = spelling(given)
        if text is None and given is not None:
            beside = self.file.with_name(HF_CONFIG)
            raise UserError(f"tokenizer: {beside} has {name} {echo(given)}, needs a token's text; mend it")
        return text or None


class SentencePiece:
    """Reads a SentencePiece .model."""

    def __init__(self, file: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise missing_package(f"tokenizer: {file}", "sentencepiece") from None
        self.file = file
        raw = file.read_bytes()
        self.fingerprint = hashlib.sha256(raw).hexdigest()
        try:
            self._model = SentencePieceProcessor(model_proto=raw)
            self.vocab_size: int = self._model.get_piece_size()
        except RuntimeError:
            raise UserError(f"tokenizer: {file} is not a SentencePiece model; export it again") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._model.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def token_id(self, token: str) -> int | None:
        piece = self._model.piece_to_id(token)
        return None if self._model.is_unknown(piece) else piece

    def configured_eod(self) -> str | None:
        end = self._model.eos_id()
        return None if end < 0 else self._model.id_to_piece(end)

    def configured_bos(self) -> str | None:
        begin = self._model.bos_id()
        return None if begin < 0 else self._model.id_to_piece(begin)


class _Tiktoken:
    """Encodes as tiktoken does: ranks of byte pairs, a pattern that splits texts, special tokens."""

    def __init__(self, file: Path, encoding: Any) -> None:
        self.file = file
        self._encoding = encoding
        # tiktoken shows neither ranks nor pattern of an encoding in public, and they decide the ids.
        ranks = sorted((rank, token.hex()) for token, rank in encoding._mergeable_ranks.items())
        content = [ranks, encoding._pat_str, sorted(encoding._special_tokens.items())]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        self.vocab_size: int = encoding.n_vocab

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)

    def token_id(self, token: str) -> int | None:
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None

    def configured_eod(self) -> str | None:
        return None

    def configured_bos(self) -> str | None:
        return None


class TiktokenName(_Tiktoken):
    """Opens an encoding that tiktoken (or a plug-in of it) knows by name, from its cache or the network."""

    def __init__(self, name: str) -> None:
        tiktoken = _import_tiktoken()
        if name not in tiktoken.list_encoding_names():
            known = ", ".join(sorted(tiktoken.list_encoding_names()))
            raise UserError(
                f"tokenizer: {name!r} is no file and no encoding of tiktoken; needs a file or one of {known}"
            )
        try:
            encoding = tiktoken.get_encoding(name)
        except Exception as error:  # whatever the network raises
            raise UserError(
                f"tokenizer: tiktoken's {name} is not in its cache and cannot be fetched ({type(error).__name__}); "
                "set TIKTOKEN_CACHE_DIR to a folder filled on a machine with network, or pass a .tiktoken file"
            ) from None
        super().__init__(Path(TIKTOKEN_PREFIX + name), encoding)


class TiktokenFile(_Tiktoken):
    """Reads a file of lines "BASE64 RANK"; FILE.json may name its "pattern" and "special_tokens".

    Without FILE.json: the pattern of cl100k_base and Llama 3, and <|endoftext|> after the last rank.
    """

    def __init__(self, file: Path) -> None:
        tiktoken = _import_tiktoken()
        beside = file.with_name(f"{file.name}.json")
        # A file of ranks holds no pattern; under another encoding's name the default one would give wrong ids.
        if not beside.exists() and file.stem in tiktoken.list_encoding_names() and file.stem != "cl100k_base":
            raise UserError(
                f"tokenizer: {file} does not hold the pattern of {file.stem}; pass tiktoken:{file.stem}, or put the "
                f'pattern and the special tokens into {beside}: {{"pattern": "...", "special_tokens": {{"...": 1}}}}'
            )
        try:
            pairs = (line.split() for line in file.read_bytes().splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
            last = max(ranks.values())
        except ValueError:
            raise UserError(
                f"tokenizer: {file} is not a tiktoken file (lines of BASE64 RANK); export it again"
            ) from None
        about = {"pattern": TIKTOKEN_PATTERN, "special_tokens": {END_OF_TEXT: last + 1}}
        try:
            if beside.exists():
                about |= json.loads(beside.read_text(encoding="utf-8"))
            encoding = tiktoken.Encoding(
                file.name, pat_str=about["pattern"], mergeable_ranks=ranks, special_tokens=about["special_tokens"]
            )
        except (ValueError, TypeError) as error:
            cause = first_line(error)
            raise UserError(f"tokenizer: {beside if beside.exists() else file} is wrong ({cause}); mend it") from None
        super().__init__(file, encoding)


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes of UTF-8; 256 is <|endoftext|>."""

    file = Path(BYTES)
    fingerprint = hashlib.sha256(BYTES.encode()).hexdigest()
    vocab_size = 257

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: list[int]) -> str:
        parts = (END_OF_TEXT.encode() if token == 256 else bytes([token]) for token in ids)
        return b"".join(parts).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        raw = token.encode()
        return 256 if token == END_OF_TEXT else raw[0] if len(raw) == 1 else None

    def configured_eod(self) -> str | None:
        return END_OF_TEXT

    def configured_bos(self) -> str | None:
        return None


def _import_tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError:
        raise missing_package("tokenizer: a tiktoken encoding", "tiktoken") from None
    return tiktoken
