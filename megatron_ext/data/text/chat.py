r"""Render conversations with the tokenizer's chat template, and find the characters of the assistant's messages.

    messages --render--> "<|user|>Hi<|end|>\n<|assistant|>Hello<|end|>\n"
                                                       ^^^^^^^^^^^^ the assistant's span, including its end token

If a template marks the assistant's text ({% generation %} ... {% endgeneration %}), these marks are used. Otherwise an
assistant's turn begins at the end of the rendered preceding messages, including the generation prompt, and ends at the
end of the text rendered up to and including it, without white space after its end token.

What transformers' `apply_chat_template` renders is rendered here to the same text. A message's keys that are null are
left out, as there. Texts in parts are given to a template as they are if it spells them, and otherwise joined.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ext.data.text.tokenizer import HF_CONFIG, HF_FILE, Tokenizer, read_beside
from megatron_ext.errors import UserError, first_line, optional_module
from megatron_ext.files.reading import JsonObject

TEMPLATE_FILE = "chat_template.jinja"
ADDITIONAL = "additional_chat_templates"
VARIABLES = "chat_template_kwargs"  # a field of a conversation, as in TRL
TOOL_USE = "tool_use"  # the name of the template for conversations with tools, if a tokenizer has several
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
INSTEAD_OF_CONTENT = ("tool_calls", "tool_call_id", *THOUGHTS)
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
JSON_ARGUMENTS = re.compile(r'"arguments": ("\{(?:[^"\\]|\\.)*")')  # in JSON: a string that holds an object
Messages = list[JsonObject]
Spans = tuple[tuple[int, int], ...]  # the characters [start, end) of each of the assistant's messages


class ChatError(Exception):
    """A short reason why messages cannot be rendered, or why the assistant's text cannot be found."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and its variables: the texts of tokens (bos_token, ...) by name, and what a conversation sets.

    `special` are the texts of all special tokens, which neither messages nor tools may contain; `tool_source` is the
    template for conversations with tools, if it is another one.
    """

    source: str
    variables: tuple[tuple[str, Any], ...]
    special: tuple[str, ...]
    tool_source: str | None = None

    @classmethod
    def of(
        cls,
        tokenizer: str | os.PathLike[str],
        *,
        option: str = "messages_field",
        eod_token: str | None = None,
        bos_token: str | None = None,
    ) -> "ChatTemplate":
        """Read the template from a Hugging Face tokenizer's folder.

        Args:
            tokenizer: the folder.
            option: what needs the template; for a data set, "messages_field", it must not use the date.
            eod_token, bos_token: as for `Tokenizer`; special in addition to the tokenizer's own.

        Raises UserError for no template, one that must not use the date, or if transformers is missing.
        """
        opened = Tokenizer(tokenizer, eod_token, bos_token)
        file = opened.file
        if file.name != HF_FILE:
            raise UserError(f"{option}: {file} has no chat template; needs a folder with {HF_FILE} and one")
        sources = _read_sources(file)
        if not isinstance(sources.get("default"), str):
            raise UserError(
                f"{option}: {file.parent} has no chat template; put {TEMPLATE_FILE} there, or chat_template into "
                f"its {HF_CONFIG}"
            )
        # A data set must depend only on its inputs.
        if option == "messages_field" and any(
            "strftime_now" in sources.get(name, "") for name in ("default", TOOL_USE)
        ):
            raise UserError(
                f"messages_field: the chat template of {file.parent} asks for today's date (strftime_now), so the "
                "dataset would depend on the day; write a fixed date into the template"
            )
        _templates()  # fail here rather than in the first worker if transformers is missing
        return cls(
            source=sources["default"],
            variables=tuple(sorted(opened.named.items())),
            special=tuple(sorted(opened.special.values())),
            tool_source=sources.get(TOOL_USE),
        )

    @property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of everything that determines the text."""
        content = json.dumps([self.source, self.variables, self.tool_source])
        return hashlib.sha256(content.encode()).hexdigest()

    def setting(self, variables: Any) -> "ChatTemplate":
        """Return the template with variables that a conversation sets, such as enable_thinking; errors as `render`."""
        if variables is None:
            return self
        if not isinstance(variables, dict):
            raise ChatError(f"{VARIABLES} is a {type(variables).__name__}, needs an object")
        _check_spelled(f"{VARIABLES} spells", variables, self.special)
        return replace(self, variables=(*self.variables, *variables.items()))

    def render(self, messages: Messages, tools: list[JsonObject] | None = None) -> tuple[str, Spans]:
        """Return a conversation as text, and the spans of the assistant's messages in it.

        Raises ChatError for invalid messages or tools, if the template rejects them, or if the spans cannot be found.
        """
        messages = self._prepare(messages, tools)
        text, marked = self._render(messages, tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return text, ()
        is_marking = MARKED.search(self._source(tools)) is not None  # if not, transformers finds no spans
        if is_marking and not marked:
            raise ChatError("the chat template marks nothing as the assistant's by {% generation %}")
        self._check_written(messages, tools, turns)
        if is_marking:
            return text, marked
        return text, tuple(self._span(text, messages, tools, turn) for turn in turns)

    def prompt(self, messages: Messages, *, continued: bool = False, may_spell: bool = False) -> str:
        """Render a conversation up to the assistant's next turn, with the generation prompt; errors as `render`.

        Args:
            messages: of the conversation.
            continued: the assistant goes on inside the last message instead.
            may_spell: messages may spell special tokens, which they then hold.
        """
        prepared = self._prepare(messages, None, may_spell=may_spell)
        return self._render(prepared, None, prompt=not continued, continued=continued)[0]

    @cached_property
    def turn_end(self) -> str | None:
        """The special token with which the template ends the assistant's turns; None if it has none."""
        text, spans = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        start, end = spans[-1]
        turn = text[start:end].rstrip()  # white space after the end token may be marked, too
        return max((token for token in self.special if turn.endswith(token)), key=len, default=None)

    def _source(self, tools: Any) -> str:
        if tools is None or self.tool_source is None:
            return self.source
        return self.tool_source

    def _prepare(self, messages: Messages, tools: Any, *, may_spell: bool = False) -> Messages:
        """Check messages and tools, and return the messages as the template gets them."""
        _check(messages, tools, () if may_spell else self.special)
        present = [{name: value for name, value in message.items() if value is not None} for message in messages]
        if not self._spells_parts(present, tools):
            for message in present:
                if "content" in message:
                    message["content"] = "".join(_texts(message))
        return present

    def _spells_parts(self, messages: Messages, tools: Any) -> bool:
        """Return whether the template spells the texts of all parts, by rendering probes in their place.

        A probe has characters that Python's repr of a list, which `{{ message.content }}` writes, spells otherwise.
        """
        probed: Messages = []
        probes: list[str] = []
        for message in messages:
            if isinstance(message.get("content"), list):
                parts = []
                for part in message["content"]:
                    probes.append(f"\ue000{len(probes)}\ue001")
                    parts.append({**part, "text": probes[-1]})
                message = {**message, "content": parts}
            probed.append(message)
        if not probes:
            return True
        try:
            text, _ = self._render(probed, tools)
        except ChatError:
            return False
        return all(probe in text for probe in probes)

    def _render(
        self, messages: Messages, tools: Any, prompt: bool = False, continued: bool = False
    ) -> tuple[str, Spans]:
        try:
            texts, indices = _templates().render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._source(tools),
                return_assistant_tokens_mask=not continued and MARKED.search(self._source(tools)) is not None,
                add_generation_prompt=prompt,
                continue_final_message=continued,
                **dict(self.variables),
            )
        except Exception as error:  # a template may raise any exception
            raise ChatError(f"the chat template does not take these messages ({first_line(error)})") from None
        spans = indices[0] if indices else ()
        return texts[0], tuple((int(start), int(end)) for start, end in spans)

    def _check_written(self, messages: Messages, tools: Any, turns: list[int]) -> None:
        """Raise ChatError for an assistant's message of which the template writes nothing, by rendering probes."""
        probed = list(messages)
        for turn in turns:
            probed[turn] = _with_probes(messages[turn], _probe(turn))
        try:
            text, _ = self._render(probed, tools)
        except ChatError:  # such as from a template that looks for a call's name among the tools
            return
        for turn in turns:
            if probed[turn] != messages[turn] and _probe(turn) not in text:
                raise ChatError(
                    f"message {turn + 1}: the chat template writes nothing of it, so an empty answer would be trained"
                )

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
            beginning = _texts(messages[turn])[0].strip()
            place = -1
            if beginning:
                place = self._place(messages[: turn + 1], tools)
            start = up_to_it.find(beginning, max(place, 0))
            if place < 0 or start < 0 or up_to_it[place:start].strip():
                raise ChatError(
                    f"message {turn + 1}: the chat template has no generation prompt and does not spell the message as "
                    "it is, so the assistant's tokens cannot be found; mark them in the template by {% generation %}"
                )
        end_token = "|".join(map(re.escape, self.special)) or "(?!)"
        blank = re.compile(rf"(?:{end_token})(\s+)$").search(up_to_it, start)
        if blank is not None:
            return start, blank.start(1)
        return start, len(up_to_it)

    def _place(self, messages: Messages, tools: Any) -> int:
        """Return where the template writes the text of the last message, by rendering a probe; -1 if nowhere."""
        *earlier, last = messages
        probe = f"\ue000{len(earlier)}\ue001"
        content: Any = probe
        if isinstance(last["content"], list):
            content = [{**last["content"][0], "text": probe}, *last["content"][1:]]
        return self._render([*earlier, {**last, "content": content}], tools)[0].find(probe)

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
        _check_content(number, message)
        _check_spelled(f"message {number} spells", message, special)  # includes tool calls
        if isinstance(message.get("content"), list):
            texts = _texts(message)
            joined = ["".join(texts), "".join(text.strip() for text in texts)]  # as templates join parts
            _check_spelled(f"message {number} spells", joined, special)
    if tools is not None and not isinstance(tools, list):
        raise ChatError(f"tools is a {type(tools).__name__}, needs a list")
    _check_spelled("tools spell", tools, special)


def _check_content(number: int, message: JsonObject) -> None:
    content = message.get("content")
    if content == [] or (content is None and not any(message.get(name) for name in INSTEAD_OF_CONTENT)):
        raise ChatError(f"message {number} has no text as content")
    if not isinstance(content, str | list | None):
        raise ChatError(f"message {number} has a {type(content).__name__} as content, needs a text or a list of parts")
    if not isinstance(content, list):
        return
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise ChatError(f"message {number} has a part of type {kind!r}, needs parts of type 'text'")
        if not isinstance(part.get("text"), str):
            raise ChatError(f"message {number} has a part of type 'text' without a text")


def _probe(turn: int) -> str:
    """Return a number that no conversation has: JSON, Python and a change of case leave digits as they are."""
    return f"5772156649{turn:06}"


def _with_probes(message: JsonObject, probe: str) -> JsonObject:
    """Return an assistant's message with a probe for each of its texts and for the name of each function it calls."""
    probed = dict(message)
    for name in ("content", *THOUGHTS):
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            probed[name] = probe
        elif name == "content" and isinstance(value, list):
            probed[name] = [{**part, "text": probe} for part in value]
    if isinstance(message.get("tool_calls"), list):
        probed["tool_calls"] = [_renamed(call, probe) for call in message["tool_calls"]]
    return probed


def _renamed(call: Any, probe: str) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": {**call["function"], "name": probe}}
    return {**call, "name": probe}


def _texts(message: JsonObject) -> list[str]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content]


def has_json_in_json(messages: Messages, text: str) -> bool:
    """Return whether a template wrote a call's arguments, already a string of JSON, as JSON once more."""
    strings = JSON_ARGUMENTS.findall(json.dumps(messages, ensure_ascii=False, default=str))
    return any(string in text for string in strings)


def _read_sources(file: Path) -> dict[str, str]:
    """Return the templates beside tokenizer.json, `file`, by name; with files, the configuration's are not read."""
    sources: dict[str, str] = {}
    configured = read_beside(file, HF_CONFIG).get("chat_template")
    if (file.parent / TEMPLATE_FILE).exists() or any((file.parent / ADDITIONAL).glob("*.jinja")):
        configured = None
    if isinstance(configured, list):
        sources = {entry["name"]: entry["template"] for entry in configured}
    elif configured is not None:
        sources["default"] = configured
    for name, place in (("default", TEMPLATE_FILE), (TOOL_USE, f"{ADDITIONAL}/{TOOL_USE}.jinja")):
        if (file.parent / place).exists():
            sources[name] = (file.parent / place).read_text(encoding="utf-8")
    return sources


def _check_spelled(who: str, value: Any, special: tuple[str, ...]) -> None:
    for text in _strings(value):
        for token in special:
            if token in text:
                raise ChatError(f"{who} the special token {token!r}")


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings inside a JSON value, and the names in its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _strings(name)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _templates() -> Any:
    return optional_module("messages_field", "transformers.utils.chat_template_utils")
