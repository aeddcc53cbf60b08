"""Continue prompts, or chat, with a run, a checkpoint of any layout or a Hugging Face folder.

python tools/generate.py MODEL --prompt "Once upon a time" --max-new-tokens 200
python tools/generate.py MODEL --input prompts.jsonl --output answers.jsonl --batch-size 16
python tools/generate.py MODEL --chat --temperature 0.7 --top-p 0.9

Decoding is greedy unless --temperature is given. The trainer's parallel flags (--tensor-model-parallel-size, --device,
--attention-backend, ...) are accepted too; data- and context-parallel processes share the prompts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.cli import Parser, command
from megatron_ext.config.arguments import parse_processes
from megatron_ext.errors import UserError
from megatron_ext.evaluation.flags import add_model_flags
from megatron_ext.evaluation.sampling import Sampling
from megatron_ext.files.atomic import atomic_write
from megatron_ext.launch import is_first, read_launch

if TYPE_CHECKING:  # importing Megatron takes seconds
    from megatron_ext.evaluation.model_text import ModelText
    from megatron_ext.run.generate import Generator


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="run, checkpoint or Hugging Face folder")
    add("--prompt", nargs="+", metavar="TEXT", help="texts to continue; with --chat the user's turns in order")
    add("--input", nargs="+", metavar="FILE", help=".jsonl, .txt, .parquet files whose texts are prompts")
    add("--json-key", default="text", metavar="FIELD", help="field of --input that holds the text [text]")
    add("--chat", action="store_true", help="chat by the tokenizer's template; turns are --prompt or lines of stdin")
    add("--system", metavar="TEXT", help="system message of --chat")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="tokens to generate at most [128]")
    add("--temperature", type=float, metavar="T", help="sample with logits divided by T [greedy]")
    add("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="sample among the likeliest tokens of probability P together")
    add("--seed", type=int, default=1234, help="seed; each prompt has its own random numbers [1234]")
    add("--batch-size", type=int, default=8, metavar="N", help="texts at a time on each copy of the model [8]")
    add("--output", type=Path, metavar="FILE", help="write one line of JSON for each prompt instead of text")
    add("--overwrite", action="store_true", help="replace an existing output")
    add_model_flags(parser)
    return parser.parse_known_args(argv)


def check(options: argparse.Namespace) -> Sampling:
    """Check the options before any model is read; return the sampling options.

    Raises:
        UserError: incompatible options, or an output that exists.
    """
    if options.chat and (options.input is not None or options.output is not None):
        raise UserError("chat: got --input or --output beside --chat, which takes turns by --prompt or standard input")
    if not options.chat and (options.prompt is None) == (options.input is None):
        raise UserError("prompt, input: needs one of the two; give --prompt TEXT, --input FILE, or --chat")
    if options.system is not None and not options.chat:
        raise UserError("system: needs --chat; add it, or write the text into the prompt")
    if options.output is not None and options.output.exists() and not options.overwrite:
        raise UserError(f"output: {options.output} exists; pass --overwrite or another file")
    for name in ("max_new_tokens", "batch_size"):
        if (value := getattr(options, name)) < 1:
            raise UserError(f"{name}: got {value}, needs at least 1")
    return Sampling(options.temperature, options.top_k, options.top_p, options.seed)


def generate(options: argparse.Namespace, flags: list[str], sampling: Sampling) -> None:
    """Continue the prompts or chat, and print or write the texts."""
    from megatron_ext.checkpoint.pretrained import Pretrained
    from megatron_ext.data.text.documents import read_documents
    from megatron_ext.evaluation.model_text import ModelText
    from megatron_ext.run.generate import Generator, Prompt, inference_layout
    from megatron_ext.run.inference import open_model, warn_beyond_training

    processes = inference_layout(parse_processes(flags))
    texts: list[str] = [] if options.chat else options.prompt
    if options.input is not None:
        texts = [document.text for document in read_documents(options.input, options.json_key)]
    pretrained = Pretrained.find(options.model)
    model_text = ModelText.of(pretrained, options.tokenizer, options.eod_token, bos=options.bos)
    prompts = [Prompt(model_text.encode(text), options.max_new_tokens) for text in texts]
    longest = max((prompt.length for prompt in prompts), default=options.max_new_tokens)
    warn_beyond_training(pretrained, longest)
    first = is_first(os.environ)
    with open_model(pretrained, processes, longest, options.dtype) as model:
        if options.chat:
            chat(options, Generator(model, 1, model_text.chat()[1]), model_text, sampling)
            return
        generator = Generator(model, options.batch_size, model_text.stop)
        if options.output is None and len(prompts) == 1 and first:
            print(texts[0], end="", flush=True)
            show, end = printer(model_text, generator, prompts[0].tokens)
            generator.answer(prompts, sampling, show)
            end()
            return
        answers = generator.answer(prompts, sampling)
    if not first:
        return
    if options.output is None:
        for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            print(f"{'' if number == 0 else chr(10)}[{number + 1}] {text}{model_text.answer(answer)}")
        return
    with atomic_write(options.output) as aside, aside.open("w", encoding="utf-8") as file:
        for text, prompt, answer in zip(texts, prompts, answers, strict=True):
            record = {
                "prompt": text,
                "answer": model_text.answer(answer),
                "tokens": answer,
                "prompt_tokens": len(prompt.tokens),
                "ended": "stop token" if answer[-1] in model_text.stop else "--max-new-tokens",
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def printer(
    model_text: ModelText, generator: Generator, prompt: Any
) -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """Return functions that print the text of each new token as soon as it is complete, and the rest at the end."""
    from megatron_ext.data.text.streaming import TextStream

    stream = TextStream(model_text.decode, prompt)

    def show(number: int, token: int) -> None:
        if token not in generator.stop:
            print(stream.put(token), end="", flush=True)

    return show, lambda: print(stream.end())


def chat(options: argparse.Namespace, generator: Generator, model_text: ModelText, sampling: Sampling) -> None:
    """Run a conversation; process 0 reads the user's turns."""
    from megatron_ext.data.text.chat import ChatError
    from megatron_ext.engine.parallel import run_on_rank0
    from megatron_ext.run.generate import Prompt

    template, _ = model_text.chat()
    first, ranks = is_first(os.environ), generator.model.ranks
    if generator.shares > 1:
        raise UserError(
            f"chat: got {ranks.world_size} processes, needs one copy of the model; start as many as "
            "--tensor-model-parallel-size times --pipeline-model-parallel-size"
        )
    messages = [{"role": "system", "content": options.system}] if options.system else []
    turns = iter(options.prompt) if options.prompt is not None else stdin_turns()
    while (turn := run_on_rank0(ranks, lambda: next(turns, None), options.model)) is not None:
        messages.append({"role": "user", "content": turn})
        try:
            tokens = model_text.encode_chat(template.prompt(messages))
        except ChatError as error:
            raise UserError(f"chat: {error}; say it otherwise") from None
        show, end = printer(model_text, generator, tokens)
        (answer,) = generator.answer([Prompt(tokens, options.max_new_tokens)], sampling, show if first else None)
        if first:
            end()
        spoken = answer[:-1] if answer[-1] in generator.stop else answer
        messages.append({"role": "assistant", "content": model_text.decode(spoken)})


def stdin_turns() -> Iterator[str]:
    """Read the user's turns, one line each, until the end of standard input or an empty line."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


@command
def main(argv: list[str]) -> int:
    options, flags = parse_options(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING if is_first(os.environ) else logging.ERROR)
    read_launch(os.environ)
    generate(options, flags, check(options))
    from megatron_ext.run.inference import leave

    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
