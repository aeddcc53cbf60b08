"""Continue prompts or chat with a trained model: what `tools/generate.py` runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.data.text.chat import ChatError
from megatron_ext.data.text.documents import read_documents
from megatron_ext.data.text.tokenizer import TextStream
from megatron_ext.engine.parallel import run_on_rank0
from megatron_ext.errors import UserError
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.evaluation.sampling import Sampling
from megatron_ext.files.atomic import atomic_write
from megatron_ext.run.generate import Generator, Prompt, inference_layout
from megatron_ext.run.inference import open_model, warn_beyond_training


def generate_text(options: argparse.Namespace, processes: ParallelConfig, sampling: Sampling) -> None:
    """Continue the prompts or chat, and print or write the texts. Collective.

    Args:
        options: the flags of `tools/generate.py`.
        processes: the parallel layout.
        sampling: how tokens are chosen.
    """
    texts: list[str] = [] if options.chat else options.prompt
    if options.input is not None:
        texts = [document.text for document in read_documents(options.input, options.json_key)]
    pretrained = Pretrained.find(options.model)
    model_text = ModelText.of(pretrained, options.tokenizer, options.eod_token, bos=options.bos)
    prompts = [Prompt(model_text.encode(text), options.max_new_tokens) for text in texts]
    longest = max((prompt.length for prompt in prompts), default=options.max_new_tokens)
    warn_beyond_training(pretrained, longest)
    with open_model(pretrained, inference_layout(processes), longest, options.dtype) as model:
        first = model.ranks.world == 0
        generator = Generator(model, options.batch_size, model_text.stop)
        answers: list[list[int]] = []
        if options.chat:
            _chat(options, Generator(model, 1, model_text.chat()[1]), model_text, sampling)
        elif options.output is None and len(prompts) == 1:
            print(texts[0] if first else "", end="", flush=True)
            _answer_and_print(generator, prompts[0], sampling, model_text)
        else:
            answers = generator.answer(prompts, sampling)
    dist.destroy_process_group()
    if first and options.output is not None:
        _write(options.output, texts, prompts, answers, model_text)
    elif first:
        for number, answer in enumerate(answers):
            print(f"{chr(10) if number else ''}[{number + 1}] {texts[number]}{model_text.answer(answer)}")


def _write(output: Path, texts: list[str], prompts: list[Prompt], answers: list[list[int]], text: ModelText) -> None:
    with atomic_write(output) as aside, aside.open("w", encoding="utf-8") as file:
        for given, prompt, answer in zip(texts, prompts, answers, strict=True):
            record = {
                "prompt": given,
                "answer": text.answer(answer),
                "tokens": answer,
                "prompt_tokens": len(prompt.tokens),
                "ended": "stop token" if answer[-1] in text.stop else "--max-new-tokens",
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _answer_and_print(generator: Generator, prompt: Prompt, sampling: Sampling, text: ModelText) -> list[int]:
    """Answer a prompt; process 0 prints each part of the text as soon as it is complete."""
    first, stream = generator.model.ranks.world == 0, TextStream(text.decode, prompt.tokens)

    def show(number: int, token: int) -> None:
        if first and token not in generator.stop:
            print(stream.put(token), end="", flush=True)

    (answer,) = generator.answer([prompt], sampling, show)
    if first:
        print(stream.end())
    return answer


def _chat(options: argparse.Namespace, generator: Generator, text: ModelText, sampling: Sampling) -> None:
    """Run a conversation; process 0 reads the user's turns."""
    template, _ = text.chat()
    ranks = generator.model.ranks
    if generator.shares > 1:
        raise UserError(
            f"chat: got {ranks.world_size} processes, needs one copy of the model; start as many as "
            "--tensor-model-parallel-size times --pipeline-model-parallel-size"
        )
    messages = [{"role": "system", "content": options.system}] if options.system else []
    turns = iter(options.prompt) if options.prompt is not None else _stdin_turns()
    while (turn := run_on_rank0(ranks, lambda: next(turns, None), options.model)) is not None:
        messages.append({"role": "user", "content": turn})
        try:
            tokens = text.encode_chat(template.prompt(messages))
        except ChatError as error:
            raise UserError(f"chat: {error}; rephrase the message") from None
        answer = _answer_and_print(generator, Prompt(tokens, options.max_new_tokens), sampling, text)
        reply = answer[:-1] if answer[-1] in generator.stop else answer
        messages.append({"role": "assistant", "content": text.decode(reply)})


def _stdin_turns() -> Iterator[str]:
    """Read the user's turns, one line each, until the end of standard input or an empty line."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
