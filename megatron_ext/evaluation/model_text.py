"""The tokenizer of a trained model, with the tokens that begin and end its texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.checkpoint.hf.folder import has_tokenizer, read_config
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.data.text.chat import ChatError, ChatTemplate
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError
from megatron_ext.files.reading import read_object


@dataclass(frozen=True, eq=False)
class ModelText:
    """Encodes and decodes the text of a model."""

    pretrained: Pretrained  # the model
    tokenizer: Tokenizer
    begin: int | None  # token at the start of every text, if any
    end: int | None  # the tokenizer's end-of-document token, if any
    stop: frozenset[int]  # tokens that end generated text; in a chat also the one that ends an assistant's turn
    template: ChatTemplate | None  # if this is a chat

    @classmethod
    def of(
        cls,
        pretrained: Pretrained,
        tokenizer: str | None = None,
        eod_token: str | None = None,
        *,
        bos: bool = False,
        chat: bool = False,
    ) -> "ModelText":
        """Open the tokenizer in a model's folder, or the one that the folder names, or another `tokenizer`.

        With `bos` texts begin with the `bos_token_id` of the model's configuration; with `chat` the tokenizer's chat
        template is used. `eod_token` replaces the tokenizer's own end-of-document token.

        Raises:
            UserError: no tokenizer, one with more token ids than the model, no `bos_token_id`, or no chat template.
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
        config: dict[str, Any] = {}
        if pretrained.checkpoint is None:  # generation_config.json wins over config.json
            over = read_object(pretrained.folder / "generation_config.json", "is no JSON object; correct or remove it")
            config = read_config(pretrained.folder)
            config |= {key: value for key, value in (over or {}).items() if value is not None}
        begin = config.get("bos_token_id")
        if bos and not isinstance(begin, int):
            raise UserError(f"bos: {pretrained.folder} names no bos_token_id; leave --bos out")
        ends = config.get("eos_token_id")  # one token, several, or none
        stop = {token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)}
        try:
            end = opened.eod_id
            stop.add(end)
        except UserError:
            if eod_token is not None:
                raise  # the given token is wrong; a tokenizer without an end token is fine
            end = None
        template = ChatTemplate.of(name) if chat else None
        try:
            if template is not None and template.turn_end:
                stop.add(opened.encode_spelled(template.turn_end)[0][-1])
        except ChatError as error:
            raise UserError(f"chat: {name}: {error}; correct the template") from None
        return cls(pretrained, opened, begin if bos else None, end, frozenset(stop), template)

    def encode(self, text: str) -> list[int]:
        """Encode a text; special tokens spelled in it are ordinary text, except in a chat."""
        if self.template is not None:
            return self.tokenizer.encode_spelled(text)[0]
        tokens = self.tokenizer.encode(text)
        return tokens if self.begin is None else [self.begin, *tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; ids beyond the tokenizer's vocabulary (padding of the model's) are left out."""
        return self.tokenizer.decode([token for token in tokens if token < self.tokenizer.vocab_size])

    def answer(self, tokens: Sequence[int]) -> str:
        """Decode a generated answer, without the token that ended it."""
        return self.decode(tokens[:-1] if tokens and tokens[-1] in self.stop else tokens)
