"""Continue prompts or chat with a trained model: what `tools/generate.py` runs."""

import argparse
import json
import sys

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
from megatron_ext.run.generate import Generator, Prompt, open_generator


def generate_text(options: argparse.Namespace, processes: ParallelConfig, sampling: Sampling) -> None:
    """Continue the prompts or chat by the flags of `tools/generate.py`; print or write the texts. Collective."""
    texts: list[str] = [] if options.chat else options.prompt
    if options.input is not None:
        texts = [document.text for document in read_documents(options.input, options.json_key)]
    model = Pretrained.find(options.model)
    text = ModelText.of(model, options.tokenizer, options.eod_token, bos=options.bos, chat=options.chat)
    prompts = [Prompt(text.encode(given), options.max_new_tokens) for given in texts]
    longest = max((prompt.length for prompt in prompts), default=options.max_new_tokens)
    with open_generator(text, processes, longest, options) as generator:
        first = generator.model.ranks.world == 0
        answers: list[list[int]] = []
        if options.chat:
            _chat(options, generator, sampling)
        elif options.output is None and len(prompts) == 1:
            print(texts[0] if first else "", end="", flush=True)
            _answer_and_print(generator, prompts[0], sampling)
        else:
            answers = generator.answer(prompts, sampling)
    dist.destroy_process_group()
    if not first:
        return
    if options.output is None:
        for number, answer in enumerate(answers):
            print(f"{chr(10) if number else ''}[{number + 1}] {texts[number]}{text.answer(answer)}")
        return
    with atomic_write(options.output) as aside, aside.open("w", encoding="utf-8") as file:
        for given, prompt, answer in zip(texts, prompts, answers, strict=True):
            record = {
                "prompt": given,
                "answer": text.answer(answer),
                "tokens": answer,
                "prompt_tokens": len(prompt.tokens),
                "ended": "stop token" if answer[-1] in text.stop else "--max-new-tokens",
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _answer_and_print(generator: Generator, prompt: Prompt, sampling: Sampling) -> list[int]:
    """Answer a prompt; process 0 prints each part of the text as soon as it is complete."""
    first, text = generator.model.ranks.world == 0, generator.text
    stream = TextStream(text.decode, prompt.tokens)

    def show(number: int, token: int) -> None:
        if first and token not in text.stop:
            print(stream.put(token), end="", flush=True)

    (answer,) = generator.answer([prompt], sampling, show)
    if first:
        print(stream.end())
    return answer


def _chat(options: argparse.Namespace, generator: Generator, sampling: Sampling) -> None:
    """Run a conversation; process 0 reads the user's turns."""
    text, ranks = generator.text, generator.model.ranks
    assert text.template is not None
    if generator.shares > 1:
        raise UserError(
            f"chat: got {ranks.world_size} processes, needs one copy of the model; start as many as "
            "--tensor-model-parallel-size times --pipeline-model-parallel-size"
        )
    messages = [{"role": "system", "content": options.system}] if options.system else []

    def ask() -> str:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        return sys.stdin.readline().strip()

    # an empty line, or the end of standard input, ends the conversation
    turns = iter(ask, "") if options.prompt is None else iter(options.prompt)
    while (turn := run_on_rank0(ranks, lambda: next(turns, None), options.model)) is not None:
        messages.append({"role": "user", "content": turn})
        try:
            tokens = text.encode(text.template.prompt(messages))
        except ChatError as error:
            raise UserError(f"chat: {error}; rephrase the message") from None
        answer = _answer_and_print(generator, Prompt(tokens, options.max_new_tokens), sampling)
        messages.append({"role": "assistant", "content": text.answer(answer)})
