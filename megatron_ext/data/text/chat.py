r"""Render conversations with the tokenizer's chat template, and find the characters of the assistant's messages.

    messages --render--> "<|user|>Hi<|end|>\n<|assistant|>Hello<|end|>\n"
                                                       ^^^^^^^^^^^^ the assistant's span, including its end token

If a template marks the assistant's text ({% generation %} ... {% endgeneration %}), these marks are used. Otherwise an
assistant's turn begins at the end of the rendered preceding messages, including the generation prompt, and ends at the
end of the text rendered up to and including it, without white space after its end token.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_ext.data.text.tokenizer import HF_CONFIG, HF_FILE, Tokenizer, read_beside
from megatron_ext.errors import UserError, first_line, optional_module

TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("system", "developer", "user", "assistant", "tool")
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
Messages = list[dict[str, Any]]
Spans = tuple[tuple[int, int], ...]  # the characters [start, end) of each of the assistant's messages


class ChatError(Exception):
    """A short reason why messages cannot be rendered, or why the assistant's text cannot be found."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the names and texts of tokens (bos_token, ...) that are its variables.

    `special` are the texts of all special tokens, which neither messages nor tools may contain.
    """

    source: str
    variables: tuple[tuple[str, str], ...]
    special: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: str | os.PathLike[str]) -> "ChatTemplate":
        """Read the template from a Hugging Face tokenizer's folder.

        Raises UserError for no template, one that uses the date, or if transformers is missing.
        """
        opened = Tokenizer(tokenizer)
        file = opened.file
        if file.name != HF_FILE:
            raise UserError(f"messages_field: {file} has no chat template; needs a folder with {HF_FILE} and one")
        config = read_beside(file, HF_CONFIG)
        source = config.get("chat_template")
        if isinstance(source, list):  # several templates with names
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if file.with_name(TEMPLATE_FILE).exists():
            source = file.with_name(TEMPLATE_FILE).read_text(encoding="utf-8")
        if not isinstance(source, str):
            raise UserError(
                f"messages_field: {file.parent} has no chat template; put {TEMPLATE_FILE} there, or chat_template into "
                f"its {HF_CONFIG}"
            )
        # A data set must depend only on its inputs.
        if "strftime_now" in source:
            raise UserError(
                f"messages_field: the chat template of {file.parent} asks for today's date (strftime_now), so the "
                "dataset would depend on the day; write a fixed date into the template"
            )
        _templates()  # fail here rather than in the first worker if transformers is missing
        return cls(source, tuple(sorted(opened.named.items())), tuple(sorted(opened.special.values())))

    @property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of everything that determines the text."""
        return hashlib.sha256(json.dumps([self.source, self.variables]).encode()).hexdigest()

    def render(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> tuple[str, Spans]:
        """Return a conversation as text, and the spans of the assistant's messages in it.

        Raises ChatError for invalid messages or tools, if the template rejects them, or if the spans cannot be found.
        """
        _check(messages, tools, self.special)
        text, marked = self._render(messages, tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return text, ()
        if not MARKED.search(self.source):  # without these marks transformers finds no spans
            return text, tuple(self._span(text, messages, tools, turn) for turn in turns)
        if not marked:
            raise ChatError("the chat template marks nothing as the assistant's by {% generation %}")
        return text, marked

    def prompt(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> str:
        """Render a conversation up to the assistant's next turn, with the generation prompt; errors as `render`."""
        _check(messages, tools, self.special)
        return self._render(messages, tools, prompt=True)[0]

    @cached_property
    def turn_end(self) -> str | None:
        """The special token with which the template ends the assistant's turns; None if it has none."""
        text, spans = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        start, end = spans[-1]
        return next((token for token in self.special if text[start:end].endswith(token)), None)

    def _render(self, messages: Messages, tools: Any, prompt: bool = False) -> tuple[str, Spans]:
        try:
            texts, indices = _templates().render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=MARKED.search(self.source) is not None,
                add_generation_prompt=prompt,
                **dict(self.variables),
            )
        except Exception as error:  # a template may raise any exception
            cause = first_line(error)
            raise ChatError(f"the chat template does not take these messages ({cause})") from None
        return texts[0], tuple((int(start), int(end)) for start, end in indices[0]) if indices else ()

    def _span(self, text: str, messages: Messages, tools: Any, turn: int) -> tuple[int, int]:
        """Return the span of the assistant's message `turn`, by rendering the conversation up to it and before it."""
        up_to_it, _ = self._render(messages[: turn + 1], tools)
        before, prompted = self._before(messages[:turn], tools)
        if not (text.startswith(up_to_it) and up_to_it.startswith(before)):
            raise ChatError(
                f"message {turn + 1}: the chat template renders the beginning of a conversation otherwise than in the "
                "whole, so the assistant's tokens cannot be found; mark them in the template by {% generation %}"
            )
        start = len(before)
        if not prompted:  # a heading such as "Assistant:" may precede the message
            content = (messages[turn].get("content") or "").strip()
            start = up_to_it.find(content, start)
            if start < 0 or not content:
                raise ChatError(
                    f"message {turn + 1}: the chat template has no generation prompt and does not spell the message as "
                    "it is, so the assistant's tokens cannot be found; mark them in the template by {% generation %}"
                )
        end_token = "|".join(map(re.escape, self.special)) or "(?!)"
        blank = re.compile(rf"(?:{end_token})(\s+)$").search(up_to_it, start)
        return start, blank.start(1) if blank else len(up_to_it)

    def _before(self, messages: Messages, tools: Any) -> tuple[str, bool]:
        """Render what precedes an assistant's turn, and return whether it ends with a generation prompt."""
        try:
            plain, _ = self._render(messages, tools)
            text, _ = self._render(messages, tools, prompt=True)
        except ChatError:
            if messages:
                raise
            return "", False  # many templates need a message
        return text, text != plain


def _check(messages: Messages, tools: Any, special: tuple[str, ...]) -> None:
    """Raise ChatError for messages and tools that a template might render incorrectly."""
    if not messages:
        raise ChatError("the conversation is empty")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatError(f"message {number} needs an object with role and content")
        if message["role"] not in ROLES:
            raise ChatError(f"message {number} has role {message['role']!r}, needs one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ChatError(f"message {number} has no text as content")
        _check_spelled(f"message {number} spells", message, special)  # includes tool calls
    if tools is not None and not isinstance(tools, list):
        raise ChatError(f"tools is a {type(tools).__name__}, needs a list")
    _check_spelled("tools spell", tools, special)


def _check_spelled(who: str, value: Any, special: tuple[str, ...]) -> None:
    whole = json.dumps(value, ensure_ascii=False)
    spelled = next((token for token in special if token in whole), None)
    if spelled is not None:
        raise ChatError(f"{who} the special token {spelled!r}")


def _templates() -> Any:
    return optional_module("messages_field", "transformers.utils.chat_template_utils")
