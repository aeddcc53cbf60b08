"""HELMET's JSON key-value retrieval (arXiv 2410.02694) and Lost in the Middle's questions (MDQA, arXiv 2307.03172)."""

from __future__ import annotations

import gzip
import json
import random
import uuid
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.evaluation.recall.sample import Count, Sample, Sizes, fill
from megatron_ext.evaluation.recall.scoring import Metric

JSON_KV, MDQA = "json_kv", "mdqa"
SHOTS = 2
DEPTHS = 6  # of the asked key: 0, 1/5, ... 1 of the pairs before it
DOCUMENTS = 30


def json_kv(length: int, count: Count, number: int, seed: str) -> list[Sample]:
    """Make samples of a JSON object with UUIDs as keys and values, two solved examples and a key to look up.

    Sample i asks for the key at depth (i mod 6) / 5. The object has as many pairs as fit.
    """
    made: list[Sample] = []
    for place in range(number):
        depth = place % DEPTHS / (DEPTHS - 1)

        def make(size: int, draw: random.Random, depth: float = depth) -> Sample:
            return _pairs(size, draw, depth)

        made += fill(make, Sizes(SHOTS + 1), length, count, f"{seed}:{place}", 1)
    return made


def _pairs(size: int, draw: random.Random, depth: float) -> Sample:
    pairs = [(_uuid(draw), _uuid(draw)) for _ in range(size)]
    asked = round(depth * (size - 1))
    solved = draw.sample([place for place in range(size) if place != asked], SHOTS)
    written = ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
    shown = "".join(f"Key: {pairs[place][0]}\nCorresponding value: {pairs[place][1]}\n\n" for place in solved)
    key, value = pairs[asked]
    prompt = (
        f"JSON data:\n{{{written}}}\n\nExtract the value corresponding to the specified key in the JSON object below."
        f"\n\n{shown}Key: {key}\nCorresponding value:"
    )
    return Sample(JSON_KV, prompt, (value,), 100, Metric.SUBSPAN)


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


@dataclass(frozen=True)
class SearchQuestion:
    """Asks about search results.

    Attributes:
        text: the question.
        answers: any of which is right.
        results: title and text of each.
        gold: which of them has the answer.
    """

    text: str
    answers: tuple[str, ...]
    results: tuple[tuple[str, str], ...]
    gold: int


def read_mdqa(path: Path) -> list[SearchQuestion]:
    """Read Lost in the Middle's nq-open .jsonl or .jsonl.gz.

    Raises:
        UserError: another format.
    """
    asked = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for line in filter(str.strip, file):
                item = json.loads(line)
                results = item["ctxs"]
                asked.append(
                    SearchQuestion(
                        item["question"],
                        tuple(item["answers"]),
                        tuple((result["title"], result["text"]) for result in results),
                        next(place for place, result in enumerate(results) if result["isgold"]),
                    )
                )
    except (ValueError, KeyError, TypeError, EOFError, StopIteration) as error:
        raise UserError(
            f"mdqa: line {len(asked) + 1} of {path} is not in the published format ({error!r}); give the file as it "
            "was published"
        ) from None
    if not asked:
        raise UserError(f"mdqa: {path} has no question; give the file as published")
    return asked


def mdqa(asked: list[SearchQuestion], length: int, count: Count, number: int) -> list[Sample]:
    """Ask the file's first questions, about the 30 results of each in their order.

    Raises:
        UserError: too few questions or results, or prompts that do not fit.
    """
    if number > len(asked):
        raise UserError(f"samples: got {number}, mdqa has {len(asked)} questions; lower --samples")
    made = []
    for place, question in enumerate(asked[:number], start=1):
        if len(question.results) != DOCUMENTS:
            raise UserError(
                f"mdqa: question {place} has {len(question.results)} documents, needs {DOCUMENTS}; give the file of "
                f"{DOCUMENTS} total documents"
            )
        results = "\n".join(
            f"Document [{rank}](Title: {title}) {text}" for rank, (title, text) in enumerate(question.results, start=1)
        )
        prompt = (
            "Write a high-quality answer for the given question using only the provided search results (some of which "
            f"might be irrelevant).\n\n{results}\n\nQuestion: {question.text}\nAnswer:"
        )
        sample = Sample(MDQA, prompt, question.answers, 100, Metric.FIRST_LINE)
        if (tokens := count(prompt) + sample.new_tokens) > length:
            raise UserError(
                f"lengths: got {length}, question {place} of mdqa takes {tokens} tokens with its answer; give a longer "
                "one, or leave mdqa out of --tasks"
            )
        made.append(sample)
    return made
