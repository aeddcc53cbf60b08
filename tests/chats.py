"""Chat data made up for tests: a tokenizer with a chat template, and conversations."""

import json
import random
from pathlib import Path
from typing import Any

import tokenizers

from megatron_ext.data.text.tokenizer import train_bpe

START, END = "<|im_start|>", "<|im_end|>"
WORDS = ["the", "window", "grows", "documents", "wait", "naïve", "😀", "tokens", "and", "rows", "of", "context"]
HEAD = "{{ '<|im_start|>' + m['role'] + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MARKED = (  # ChatML, with what the assistant says marked
    "{% for m in messages %}" + HEAD + "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}" + PROMPT
)
HEADED = "{% for m in messages %}" + HEAD + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"  # ChatML, no prompt
PLAIN = HEADED + PROMPT  # ChatML as most models have it


def put_tokenizer(folder: Path, template: str | None) -> Path:
    """A byte-level BPE with ChatML's tokens; the folder."""
    train_bpe([" ".join(WORDS) + " user assistant system\n"] * 3, 320, folder)
    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([START, END])
    tokenizer.save(str(file))
    bos = {"__type": "AddedToken", "content": "<|endoftext|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": bos}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def put_wide_tokenizer(folder: Path) -> Path:
    """A tokenizer of 257 ids, and of two more that a model of 257 rows has none for: <pad>, and <tool> in a text."""
    train_bpe(["x"], 257, folder)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added_tokens = {
        str(257 + i): {"content": token, "special": not i, **flags} for i, token in enumerate(("<pad>", "<tool>"))
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": added_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def conversations(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    """Each of 1 to 3 questions and answers, some with a system message."""
    rng = random.Random(seed)

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))

    chats = []
    for _ in range(count):
        chat = [{"role": "system", "content": text()}] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 3)):
            chat += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        chats.append(chat)
    return chats


def put_chats(file: Path, chats: list[Any], field: str = "messages") -> Path:
    """A line for each conversation; the file."""
    file.write_text("".join(json.dumps({field: chat}) + "\n" for chat in chats))
    return file
