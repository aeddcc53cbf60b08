"""A question about a long text, and how a text of a wanted length is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.errors import UserError
from megatron_ext.evaluation.recall.scoring import Metric


@dataclass(frozen=True)
class Sample:
    """Asks a model for something that its prompt holds.

    Attributes:
        task: its name.
        prompt: up to where the answer begins.
        answers: what is looked for.
        new_tokens: of the answer, at most.
        metric: how an answer is scored.
    """

    task: str
    prompt: str
    answers: tuple[str, ...]
    new_tokens: int
    metric: Metric


Make = Callable[[int, random.Random], Sample]
Count = Callable[[str], int]


@dataclass(frozen=True)
class Sizes:
    """Says of which sizes a task's haystack may be, in its own unit: words, sentences, pairs, documents.

    Attributes:
        least: the smallest that holds all that is hidden.
        most: the largest; None for no limit.
        beyond: what to do where that is not enough.
    """

    least: int
    most: int | None = None
    beyond: str = ""


def fill(make: Make, sizes: Sizes, length: int, count: Count, seed: str, samples: int) -> list[Sample]:
    """Make samples whose prompt and answer fill `length` tokens as far as the haystack's unit allows.

    As RULER does it: the largest haystack that fits is searched on one sample and taken for all; where the draws of
    another one make it longer, its haystack is made smaller until it fits.

    Args:
        make: makes a sample with a haystack of a size.
        sizes: that are possible.
        length: tokens of prompt and answer together.
        count: tokens of a text.
        seed: of all draws; samples of one seed and number are the same.
        samples: how many.

    Raises:
        UserError: the smallest is too long, or the largest too short.
    """

    def tokens(sample: Sample) -> int:
        return count(sample.prompt) + sample.new_tokens

    def trial(size: int) -> Sample:
        return make(size, random.Random(f"{seed}:trial"))

    smallest = trial(sizes.least)
    if tokens(smallest) > length:
        raise UserError(
            f"lengths: got {length}, the shortest sample of {smallest.task} takes {tokens(smallest)} tokens with "
            "its answer; give a longer one, or leave the task out of --tasks"
        )
    fits, too_long = sizes.least, sizes.least + 1
    while tokens(trial(_within(too_long, sizes))) <= length:
        fits = _within(too_long, sizes)
        if fits == sizes.most:
            raise UserError(
                f"lengths: got {length}, {smallest.task} fills {tokens(trial(fits))} tokens at most; {sizes.beyond}"
            )
        too_long *= 2
    too_long = _within(too_long, sizes)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if tokens(trial(middle)) <= length:
            fits = middle
        else:
            too_long = middle
    made = []
    for number in range(samples):
        size = fits
        while tokens(sample := make(size, random.Random(f"{seed}:{number}"))) > length:
            if size == sizes.least:
                raise UserError(
                    f"lengths: got {length}, sample {number} of {sample.task} takes {tokens(sample)} tokens at least; "
                    "give a longer one, or leave the task out of --tasks"
                )
            size = max(size - max(size // 50, 1), sizes.least)
        made.append(sample)
    return made


def _within(size: int, sizes: Sizes) -> int:
    return size if sizes.most is None else min(size, sizes.most)
