"""Continue prompts, or talk, with a run or checkpoint of ours (of any layout) or a Hugging Face folder.

python tools/generate.py MODEL --prompt "Once upon a time" --max-new-tokens 200
python tools/generate.py MODEL --input prompts.jsonl --output answers.jsonl --batch-size 16
python tools/generate.py MODEL --chat --temperature 0.7 --top-p 0.9

Text is greedy unless --temperature is given. The trainer's flags of processes (--tensor-model-parallel-size, --device,
--attention-backend, ...) work here too; processes of torchrun beyond --tensor-model-parallel-size share the prompts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
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
    from megatron_ext.run.generate import Generator, Prompt


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="run, checkpoint or Hugging Face folder")
    add(
        "--prompt", nargs="+", metavar="TEXT", help="texts to continue; with --chat the user's turns, one after another"
    )
    add("--input", nargs="+", metavar="FILE", help=".jsonl, .txt, .parquet files whose texts are prompts")
    add("--json-key", default="text", metavar="FIELD", help="field of --input that holds the text [text]")
    add(
        "--chat",
        action="store_true",
        help="talk by the tokenizer's chat template; turns are --prompt, or stdin's lines",
    )
    add("--system", metavar="TEXT", help="what --chat begins with")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="of each text [128]")
    add("--temperature", type=float, metavar="T", help="draw tokens, logits divided by T [the likeliest token]")
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest with P of the probability together")
    add("--seed", type=int, default=1234, help="of the draws; each prompt has its own, whatever its batch [1234]")
    add("--batch-size", type=int, default=8, metavar="N", help="texts at a time in each group of processes [8]")
    add("--output", type=Path, metavar="FILE", help="write a line of JSON for each prompt instead of text")
    add("--overwrite", action="store_true", help="replace an output that is there")
    add_model_flags(parser)
    return parser.parse_known_args(argv)


def prompts(options: argparse.Namespace) -> list[str]:
    """Read the texts to continue."""
    if (options.prompt is None) == (options.input is None):
        raise UserError("prompt, input: needs one of the two; give --prompt TEXT, --input FILE, or --chat")
    if options.prompt is not None:
        return list(options.prompt)
    from megatron_ext.data.text.documents import read_documents

    return [document.text for document in read_documents(options.input, options.json_key)]


def complete(options: argparse.Namespace, flags: list[str], sampling: Sampling) -> None:
    """Continue prompts, and print or write the texts."""
    from megatron_ext.checkpoint.pretrained import Pretrained
    from megatron_ext.data.text.streaming import TextStream
    from megatron_ext.evaluation.model_text import ModelText
    from megatron_ext.run.generate import Generator, Prompt, inference_layout
    from megatron_ext.run.inference import open_model, warn_beyond_training

    processes = inference_layout(parse_processes(flags))
    texts = [] if options.chat else prompts(options)
    pretrained = Pretrained.find(options.model)
    model_text = ModelText.of(pretrained, options.tokenizer, options.eod_token, bos=options.bos)
    asked = [Prompt(model_text.encode(text), options.max_new_tokens) for text in texts]
    longest = max((prompt.length for prompt in asked), default=options.max_new_tokens)
    warn_beyond_training(pretrained, longest)
    first = is_first(os.environ)
    with open_model(pretrained, processes, longest, options.dtype) as model:
        if options.chat:
            talk(options, Generator(model, 1, model_text.chat()[1]), model_text, sampling)
            return
        generator = Generator(model, options.batch_size, model_text.stop)
        if options.output is None and len(asked) == 1 and first:  # shown as it comes
            print(texts[0], end="", flush=True)
            stream = TextStream(model_text.decode, asked[0].tokens)
            generator.answer(asked, sampling, shown(stream, generator.stop))
            print(stream.end())
            return
        answers = generator.answer(asked, sampling)
    if not first:
        return
    if options.output is not None:
        with atomic_write(options.output) as aside, aside.open("w", encoding="utf-8") as file:
            for text, prompt, answer in zip(texts, asked, answers, strict=True):
                file.write(json.dumps(record(text, prompt, answer, model_text), ensure_ascii=False) + "\n")
        return
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        print(f"{'' if number == 0 else chr(10)}[{number + 1}] {text}{model_text.answer(answer)}")


def record(text: str, prompt: Prompt, answer: list[int], model_text: ModelText) -> dict[str, Any]:
    """Make a line of the output."""
    ended = bool(answer) and answer[-1] in model_text.stop
    return {
        "prompt": text,
        "answer": model_text.answer(answer),
        "tokens": answer,
        "prompt_tokens": len(prompt.tokens),
        "ended": "stop token" if ended else "--max-new-tokens",
    }


def shown(stream: Any, stop: frozenset[int]) -> Any:
    """Print each piece of text as soon as it is certain."""

    def show(number: int, token: int) -> None:
        if token not in stop:
            print(stream.put(token), end="", flush=True)

    return show


def talk(options: argparse.Namespace, generator: Generator, model_text: ModelText, sampling: Sampling) -> None:
    """Hold a conversation: the user's turns come from --prompt or from standard input, which process 0 reads."""
    from megatron_ext.data.text.chat import ChatError
    from megatron_ext.data.text.streaming import TextStream
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
    given = iter(options.prompt) if options.prompt is not None else turns()
    while True:
        said = run_on_rank0(ranks, lambda: next(given, None), options.model)
        if said is None:
            return
        messages.append({"role": "user", "content": said})
        try:
            tokens = model_text.encode_chat(template.prompt(messages))
        except ChatError as error:
            raise UserError(f"chat: {error}; say it otherwise") from None
        stream = TextStream(model_text.decode, tokens)
        show = shown(stream, generator.stop) if first else None
        (answer,) = generator.answer([Prompt(tokens, options.max_new_tokens)], sampling, show)
        if first:
            print(stream.end())
        spoken = answer[:-1] if answer[-1] in generator.stop else answer
        messages.append({"role": "assistant", "content": model_text.decode(spoken)})


def turns() -> Iterator[str]:
    """Read the user's turns, a line each, until the end of standard input or an empty line."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def check(options: argparse.Namespace) -> Sampling:
    """Refuse what cannot be done before any model is read; how tokens are chosen.

    Raises:
        UserError: flags that do not go together, an output that is there.
    """
    if options.chat and (options.input is not None or options.output is not None):
        raise UserError("chat: got --input or --output beside --chat, which takes turns by --prompt or standard input")
    if options.system is not None and not options.chat:
        raise UserError("system: needs --chat; add it, or write the text into the prompt")
    if options.output is not None and options.output.exists() and not options.overwrite:
        raise UserError(f"output: {options.output} exists; pass --overwrite or another file")
    if options.max_new_tokens < 1:
        raise UserError(f"max_new_tokens: got {options.max_new_tokens}, needs at least 1")
    if options.batch_size < 1:
        raise UserError(f"batch_size: got {options.batch_size}, needs at least 1 text at a time")
    return Sampling(options.temperature, options.top_k, options.top_p, options.seed)


@command
def main(argv: list[str]) -> int:
    options, flags = parse_options(argv)
    first = is_first(os.environ)
    logging.basicConfig(format="%(message)s", level=logging.WARNING if first else logging.ERROR)
    read_launch(os.environ)
    complete(options, flags, check(options))
    from megatron_ext.run.inference import leave

    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
