"""A small offline probe of long-context recall: a sentence hidden in a text, and a key of a JSON object.

A sample is correct if the model's greedy answer contains the hidden string. `needle` follows RULER's niah_single
(arXiv 2404.06654), `json_kv` HELMET's JSON KV (arXiv 2410.02694); the benchmarks themselves are tasks of lm-eval.
"""

import functools
import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = 6  # sample i hides at depth (i mod 6) / 5 of the text
NEW_TOKENS = 64


@dataclass(frozen=True)
class Sample:
    """A question about a long text."""

    task: str  # a name in `TASKS`
    length: int  # maximum number of tokens of prompt and answer
    prompt: str  # ends where the answer begins
    answer: str  # the string that the answer must contain


def _needle(size: int, depth: float, seed: str, text: Sequence[str]) -> tuple[str, str]:
    draw = random.Random(seed)
    key, value = str(uuid.UUID(int=draw.getrandbits(128))), str(draw.randint(10**6, 10**7 - 1))
    sentences = [text[place % len(text)] for place in range(size)]
    sentences.insert(round(depth * size), f"The special magic number for {key} is: {value}.")
    question = f"What is the special magic number for {key} mentioned in the text?"
    return (
        f"A special magic number is hidden in the following text.\n{' '.join(sentences)}\n{question} "
        f"The special magic number for {key} mentioned in the text is"
    ), value


def _json_kv(size: int, depth: float, seed: str, text: Sequence[str]) -> tuple[str, str]:
    """Ask for one of `size` keys, after two solved examples."""
    draw = random.Random(seed)
    pairs = [[str(uuid.UUID(int=draw.getrandbits(128))) for _ in range(2)] for _ in range(size)]
    key, value = pairs[round(depth * (size - 1))]
    examples = [pair for pair in draw.sample(pairs, min(3, size)) if pair[0] != key][:2]
    shown = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in examples)
    written = ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
    return (
        f"JSON data:\n{{{written}}}\n\nExtract the value corresponding to the specified key in the JSON object above."
        f"\n\n{shown}Key: {key}\nCorresponding value:"
    ), value


TASKS = {"needle": _needle, "json_kv": _json_kv}


def make_samples(
    tasks: Sequence[str],
    lengths: Sequence[int],
    encode: Callable[[str], Sequence[int]],
    number: int,
    seed: int,
    text: str | None = None,
) -> Iterator[Sample]:
    """Make `number` samples of each task in `TASKS` that fill each length, the tokens of prompt and answer.

    `text` is around the needle, None for a repeated sentence.

    Raises:
        UserError: a length that is too short for a sample.
    """
    sentences = re.split(r"(?<=[.!?])\s+", NOISE if text is None else text.strip())
    for task, length, place in itertools.product(tasks, lengths, range(number)):
        depth, own_seed = place % DEPTHS / (DEPTHS - 1), f"{seed}:{task}:{place}"
        make = functools.partial(TASKS[task], depth=depth, seed=own_seed, text=sentences)
        budget = length - NEW_TOKENS
        # start from an estimate of the tokens per sentence or pair
        short, longer = len(encode(make(4)[0])), len(encode(make(36)[0]))
        size = max(4 + int((budget - short) * 32 / max(longer - short, 1)), 1)
        while (needed := len(encode(make(size)[0]))) > budget:
            if size == 1:
                raise UserError(f"lengths: got {length}, {task} needs at least {needed + NEW_TOKENS} tokens")
            size = max(size - max(size // 50, 1), 1)
        yield Sample(task, length, *make(size))
