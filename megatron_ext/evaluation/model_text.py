"""The tokenizer of a trained model, with the tokens that begin and end its texts."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.checkpoint.hf.folder import has_tokenizer, read_config
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.data.text.chat import ChatError, ChatTemplate
from megatron_ext.data.text.tokenizer import Tokenizer, ids_without_rows
from megatron_ext.errors import UserError
from megatron_ext.files.reading import read_object

logger = logging.getLogger(__name__)
# what transformers' generate() also applies without sampling, with the values that change nothing
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}


def warn_of_unapplied(source: str, options: Mapping[str, Any]) -> None:
    """Log a warning for options of `source` that change the texts of transformers' generate(), but not those here."""
    for name, value in options.items():
        if value and name in NEUTRAL and value != NEUTRAL[name]:
            logger.warning("%s: %s %s is applied by transformers' generate(), not here", source, name, value)


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

        With `bos` texts begin with the `bos_token_id` of a Hugging Face configuration, or with the BOS of the tokenizer
        of a run; with `chat` the tokenizer's chat template is used. `eod_token` replaces the tokenizer's own
        end-of-document token.

        Raises:
            UserError: no tokenizer, no BOS, or no chat template.
        """
        name = tokenizer or pretrained.tokenizer
        if name is None and pretrained.checkpoint is None and has_tokenizer(pretrained.folder):
            name = str(pretrained.folder)
        if name is None:
            raise UserError(f"tokenizer: {pretrained.folder} has none; give --tokenizer FOLDER")
        opened = Tokenizer(name, eod_token)
        for line in ids_without_rows(opened, pretrained.vocab_size):
            logger.warning("tokenizer: %s", line)
        config: dict[str, Any] = {}
        if pretrained.checkpoint is None:  # generation_config.json wins over config.json
            over = read_object(pretrained.folder / "generation_config.json", "is no JSON object; correct or remove it")
            config = read_config(pretrained.folder)
            config |= {key: value for key, value in (over or {}).items() if value is not None}
            warn_of_unapplied("generation_config.json", over or {})
        begin = None
        if bos and chat:
            raise UserError("bos: got --bos with --chat, whose template spells BOS; leave --bos out")
        if bos:
            begin = config.get("bos_token_id")
            if pretrained.checkpoint is not None:
                begin = opened.bos_id
            if not isinstance(begin, int):
                raise UserError(f"bos: {pretrained.folder} names no bos_token_id; leave --bos out")
        ends = config.get("eos_token_id")  # one token, several, or none
        if not isinstance(ends, list):
            ends = [ends]
        stop = {token for token in ends if isinstance(token, int)}
        end = None
        try:
            end = opened.eod_id
            stop.add(end)
        except UserError:
            if eod_token is not None:
                raise  # the user's token is wrong; a tokenizer without an end token is fine
        template = None
        if chat:
            template = ChatTemplate.of(name, option="chat")
            try:
                if template.turn_end:
                    stop.add(opened.encode_spelled(template.turn_end)[0][-1])
            except ChatError as error:
                raise UserError(f"chat: {name}: {error}; correct the template") from None
        return cls(pretrained, opened, begin, end, frozenset(stop), template)

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Encode a text; special tokens spelled in it are ordinary text, except in a chat. Raises as `checked`."""
        if self.template is not None:
            return self.checked(self.tokenizer.encode_spelled(text)[0])
        tokens = self.tokenizer.encode(text)
        if begin and self.begin is not None:
            tokens = [self.begin, *tokens]
        return self.checked(tokens)

    def checked(self, tokens: list[int]) -> list[int]:
        """Return the tokens; raise UserError for one that the model's embedding has no row for."""
        largest = max(tokens, default=0)
        if largest >= self.pretrained.vocab_size:
            raise UserError(
                f"text: holds token id {largest} ({self.tokenizer.decode([largest])!r}), but the embedding of "
                f"{self.pretrained.folder} has {self.pretrained.vocab_size} rows; leave it out of the text, or "
                "give the model's own --tokenizer or --eod-token"
            )
        return tokens

    def answer(self, prompt: Sequence[int], tokens: Sequence[int], *, special: bool = True) -> str:
        """Decode a generated answer as a continuation of its prompt, without the token that ended it.

        Without `special` all special tokens are left out.
        """
        if tokens and tokens[-1] in self.stop:
            tokens = tokens[:-1]
        if not special:
            tokens = [token for token in tokens if token not in self.tokenizer.special]
        return self.tokenizer.continuation(prompt, tokens)
