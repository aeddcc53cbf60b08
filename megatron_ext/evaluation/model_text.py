"""A model's text: the tokenizer that belongs to it, the token that begins a text, those that end one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.checkpoint.hf.auxiliary import has_tokenizer
from megatron_ext.checkpoint.hf.folder import read_config
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.data.text.chat import ChatError, ChatTemplate
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError
from megatron_ext.files.json_file import read_object


@dataclass(frozen=True, eq=False)
class ModelText:
    """Turns text into a model's tokens and back.

    Attributes:
        tokenizer: the model's.
        name: where that comes from.
        begin: the token that begins every text; None for none.
        end: the tokenizer's end-of-document token; None where it has none.
        stop: tokens that end what the model writes.
    """

    tokenizer: Tokenizer
    name: str
    begin: int | None
    end: int | None
    stop: frozenset[int]

    @classmethod
    def of(
        cls, pretrained: Pretrained, tokenizer: str | None = None, eod_token: str | None = None, *, bos: bool = False
    ) -> ModelText:
        """Open the tokenizer that a model's folder holds or names.

        Args:
            pretrained: the model.
            tokenizer: instead of its own.
            eod_token: the end token, if not the one that the tokenizer names.
            bos: texts begin with the token that the model's configuration names as `bos_token_id`. Rows of ours
                have none.

        Raises:
            UserError: no tokenizer, one with token ids that the model does not know, no such begin token.
        """
        name = tokenizer or pretrained.tokenizer
        if name is None and pretrained.checkpoint is None and has_tokenizer(pretrained.folder):
            name = str(pretrained.folder)
        if name is None:
            raise UserError(f"tokenizer: {pretrained.folder} has none; give --tokenizer FOLDER")
        opened = Tokenizer(name, eod_token)
        size = pretrained.model.vocab_size
        if size is not None and opened.vocab_size > size:
            raise UserError(
                f"tokenizer: {name} has {opened.vocab_size} token ids, {pretrained.folder} knows {size}; "
                "give --tokenizer with the model's own"
            )
        said: dict[str, Any] = {}
        if pretrained.checkpoint is None:  # generation_config.json wins over config.json
            over = read_object(pretrained.folder / "generation_config.json", "is no JSON object; mend it or remove it")
            said = read_config(pretrained.folder)
            said |= {key: value for key, value in (over or {}).items() if value is not None}
        begin = said.get("bos_token_id")
        if bos and not isinstance(begin, int):
            raise UserError(f"bos: {pretrained.folder} names no bos_token_id; leave --bos out")
        ends = said.get("eos_token_id")  # one token, several, or none
        stop = {token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)}
        try:
            end = opened.eod_id
        except UserError:
            if eod_token is not None:
                raise  # its own name is wrong; a tokenizer without an end token is none the worse
            end = None
        return cls(opened, name, begin if bos else None, end, frozenset(stop if end is None else stop | {end}))

    def encode(self, text: str) -> list[int]:
        """Encode a text; what spells a special token in it is ordinary text."""
        tokens = self.tokenizer.encode(text)
        return tokens if self.begin is None else [self.begin, *tokens]

    def encode_chat(self, rendered: str) -> list[int]:
        """Encode what a chat template has written, special tokens as such; it has its own begin token, if any."""
        return self.tokenizer.encode_spelled([rendered])[0][0]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; those that the model has and its tokenizer has not, its padding, are no text."""
        return self.tokenizer.decode([token for token in tokens if token < self.tokenizer.vocab_size])

    def answer(self, tokens: Sequence[int]) -> str:
        """Decode what the model wrote, without the token that ended it."""
        return self.decode(tokens[:-1] if tokens and tokens[-1] in self.stop else tokens)

    def chat(self) -> tuple[ChatTemplate, frozenset[int]]:
        """Return the tokenizer's chat template, and the tokens that end what the assistant says.

        Raises:
            UserError: it has none, or one that cannot be rendered.
        """
        template = ChatTemplate.of(self.name)
        try:
            ends = [self.encode_chat(template.turn_end)[-1]] if template.turn_end else []
        except ChatError as error:
            raise UserError(f"chat: {self.name}: {error}; correct the template") from None
        return template, self.stop | frozenset(ends)
