"""Text to token ids and back, by any tokenizer; and how to train a byte-level BPE."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from megatron_ext.data.text.tokenizer_backends import END_OF_TEXT, HF_CONFIG, HF_FILE, HuggingFace, open_backend
from megatron_ext.errors import UserError
from megatron_ext.files.aside import file_aside

KNOWN_EOD_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>")
KNOWN_BOS_TOKENS = ("<|begin_of_text|>", "<s>")
BYTES_AND_EOD = 257


class Tokenizer:
    """Makes a tokenizer deterministic: whole texts, no padding, no truncation, no BPE dropout.

    A document's text is data: where it spells a special token ("</s>"), that is encoded as ordinary
    characters, so an end-of-document token (EOD) stands only where a document ends.

    Args:
        path: a folder that holds tokenizer.json (and perhaps tokenizer_config.json), or that file; a
            SentencePiece .model or a folder with one; a tiktoken file; "tiktoken:NAME"; or "bytes".
        eod_token: the EOD, if not the one that the tokenizer itself names.
        bos_token: the token that documents may begin with (BOS), if not the one that the tokenizer itself names.

    Attributes:
        file: where the tokenizer comes from.
        fingerprint: hexadecimal SHA-256; two tokenizers with the same one give the same token ids.
        vocab_size: one more than the largest token id.

    Raises:
        UserError: no such file, one that is no tokenizer, an `eod_token` or `bos_token` that is not in its
            vocabulary.
    """

    def __init__(
        self, path: str | os.PathLike[str], eod_token: str | None = None, bos_token: str | None = None
    ) -> None:
        self._backend = open_backend(os.fspath(path))
        self.file = self._backend.file
        self.fingerprint = self._backend.fingerprint
        self.vocab_size = self._backend.vocab_size
        self._eod_token, self._bos_token = eod_token, bos_token
        if eod_token is not None:
            self.eod_id  # noqa: B018 (a wrong --eod-token is refused at once)
        if bos_token is not None:
            self.bos_id  # noqa: B018 (as a wrong --bos-token is)

    def encode(self, text: str) -> list[int]:
        """Encode a text as token ids; no special token is added."""
        return self._backend.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text as `encode` does."""
        return self._backend.encode_batch(texts)

    def encode_spelled(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Encode each text, and say which characters [start, end) each token has.

        For texts whose special tokens were written by a template. Hugging Face's tokenizers alone.
        """
        assert isinstance(self._backend, HuggingFace)
        return self._backend.encode_spelled(texts)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to their text, special tokens spelled out."""
        return self._backend.decode([int(token) for token in ids])

    @cached_property
    def eod_id(self) -> int:
        """The id of the end-of-document token.

        Raises:
            UserError: the tokenizer names none and `eod_token` was not given.
        """
        name = self._eod_token or self._backend.configured_eod()
        return self._special("eod_token", "end", name, KNOWN_EOD_TOKENS)

    @cached_property
    def bos_id(self) -> int:
        """The id of the token that documents may begin with.

        Raises:
            UserError: the tokenizer names none and `bos_token` was not given.
        """
        name = self._bos_token or self._backend.configured_bos()
        return self._special("bos_token", "beginning", name, KNOWN_BOS_TOKENS)

    def _special(self, option: str, what: str, name: str | None, known: Sequence[str]) -> int:
        """Find the id of a token by its name, or of the first known one."""
        for token in (name,) if name else known:
            if (number := self._backend.token_id(token)) is not None:
                return number
        flag = f"--{option.replace('_', '-')}"
        if name:
            raise UserError(f"{option}: {name!r} is not in the vocabulary of {self.file}; pass another {flag}")
        raise UserError(f"{option}: {self.file} names no {what} token and has none of {', '.join(known)}; pass {flag}")


def train_bpe(
    texts: Iterable[str], vocab_size: int, folder: str | os.PathLike[str], *, overwrite: bool = False
) -> Tokenizer:
    """Train a byte-level BPE with the end token `<|endoftext|>` (id 0) and write it into `folder`.

    The same texts give the same file. The folder then holds what transformers' AutoTokenizer loads. Scarce
    texts give fewer tokens than asked for: see the answer's `vocab_size`.

    Raises:
        UserError: a vocabulary too small for 256 bytes and the end token, no text, a tokenizer in the way.
    """
    target = Path(folder)
    if vocab_size < BYTES_AND_EOD:
        raise UserError(f"vocab_size: got {vocab_size}, needs at least {BYTES_AND_EOD} (256 bytes and {END_OF_TEXT})")
    if not overwrite and (target / HF_FILE).exists():
        raise UserError(f"output: {target / HF_FILE} exists; pass --overwrite or another folder")
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
    if (first := next(texts, None)) is None:  # the library would write a tokenizer of 256 bytes without a word
        raise UserError("input: no document to train a tokenizer on; check --input")
    trained.train_from_iterator(chain([first], texts), trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    target.mkdir(parents=True, exist_ok=True)
    with file_aside(target / HF_CONFIG) as aside:
        aside.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with file_aside(target / HF_FILE) as aside:
        aside.write_text(trained.to_str(pretty=True) + "\n", encoding="utf-8")
    return Tokenizer(target)
