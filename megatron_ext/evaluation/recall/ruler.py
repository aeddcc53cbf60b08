"""RULER's thirteen tasks (arXiv 2404.06654), for any length, tokenizer and haystack.

    task              haystack             hidden in it                                 asked for
    niah_single_1     one sentence again   1 key with a number of 7 digits              the number
    niah_single_2, 3  essays               1 key with a number; with a UUID             the value
    niah_multikey_1   essays               4 keys with a number each                    one key's number
    niah_multikey_2   needles              1 more needle; all have words and numbers    its number
    niah_multikey_3   needles              1 more needle; all have two UUIDs            its UUID
    niah_multivalue   essays               1 key with 4 numbers                         all four
    niah_multiquery   essays               4 keys with a number each                    all four
    vt                one sentence again   VAR A = 12345, VAR B = VAR A, ... (4 hops)   the 5 variables
    cwe               -                    10 words 30 times, others 3 times            the 10 words
    fwe               -                    made-up words, the k-th k ** -2 as often     the 3 most frequent
    qa_1, qa_2        SQuAD; HotpotQA      the paragraphs that answer a question        an answer

Wording, counts, depths, answer lengths and scores are the published ones. What is not: essays are the user's text, its
sentences are found by Punkt without a trained model, which would be one language's (so a needle may stand after "Mr.");
below 4096 tokens `cwe` repeats words 6 times and once, as published, and below 2000 the example of `vt` is shorter than
500 tokens.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.errors import UserError, missing_package
from megatron_ext.evaluation.recall.sample import Count, Make, Sample, Sizes, fill
from megatron_ext.evaluation.recall.scoring import Metric
from megatron_ext.evaluation.recall.words import all_words, random_word

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, 40)))  # percent of the sentences before a needle
SHORT = 4096  # tokens below which `cwe` repeats its words less often
EXAMPLE = 500  # tokens of the example that goes before `vt`


@dataclass(frozen=True)
class Needles:
    """Describes a needle-in-a-haystack task.

    Attributes:
        haystack: noise, essay or needle.
        key, value: words, numbers or uuids.
        keys, values, queries: hidden keys, values of each, and keys that are asked for.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}
QA = {"qa_1": "squad", "qa_2": "hotpotqa"}
TASKS = (*NIAH, "vt", "cwe", "fwe", *QA)


@dataclass(frozen=True)
class Material:
    """Holds what tasks are made of that is not made up.

    Attributes:
        essay: a long text; None where there is none.
        questions: of qa_1 and qa_2, by task.
    """

    essay: Essay | None
    questions: dict[str, Questions]

    def lacks(self, task: str) -> str | None:
        """Say which flag gives what a task needs; None where it is there."""
        if task in NIAH and NIAH[task].haystack == "essay" and self.essay is None:
            return "--haystack"
        return f"--{QA[task]}" if task in QA and task not in self.questions else None


def samples(task: str, length: int, count: Count, material: Material, number: int, seed: str) -> list[Sample]:
    """Make a task's samples; arguments as of `fill`."""
    make: Make
    if task in NIAH:
        kind = NIAH[task]
        hidden = kind.keys * kind.values
        make, sizes = partial(_niah, task, kind, material.essay), Sizes(1 if kind.haystack == "essay" else hidden)
    elif task == "vt":
        budget = min(EXAMPLE, length // 4)
        example = _HOPS + 1  # how much noise the largest solved example within the budget has
        while count(_example(example + 1, random.Random(f"{seed}:example"))) <= budget:
            example += 1
        make, sizes = partial(_chains, example), Sizes(_HOPS + 1)
    elif task == "cwe":
        make = partial(_common_words, length < SHORT)
        sizes = Sizes(_COMMON + 1, len(all_words()), "it has no more words; leave cwe out of --tasks")
    elif task == "fwe":
        make, sizes = partial(_coded_words, max((length - _CODED_TOKENS) // 50, 4)), Sizes(100)
    else:
        questions = material.questions[task]
        if number > len(questions.asked):
            raise UserError(f"samples: got {number}, {task} has {len(questions.asked)} questions; lower --samples")
        # each sample has a question of its own
        made: list[Sample] = []
        for place in range(number):
            make, sizes = partial(questions.sample, task, place), Sizes(len(questions.asked[place].needed))
            made += fill(make, sizes, length, count, f"{seed}:{place}", 1)
        return made
    return fill(make, sizes, length, count, seed, number)


def _value(kind: str, draw: random.Random) -> str:
    if kind == "numbers":
        return str(draw.randint(10**6, 10**7 - 1))
    return random_word(draw) if kind == "words" else str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _niah(task: str, kind: Needles, essay: Essay | None, size: int, draw: random.Random) -> Sample:
    keys = [_value(kind.key, draw) for _ in range(kind.keys)]
    values = [[_value(kind.value, draw) for _ in range(kind.values)] for _ in keys]
    needles = [
        NEEDLE.format(kind=kind.value, key=key, value=value)
        for key, own in zip(keys, values, strict=True)
        for value in own
    ]
    draw.shuffle(needles)
    if kind.haystack == "essay":
        assert essay is not None
        sentences = essay.sentences(size)
        depths = sorted(draw.sample(DEPTHS, len(needles)))  # in percent of the sentences, each needle at its own
        context = " ".join(_among(sentences, needles, [len(sentences) * depth // 100 for depth in depths]))
    else:
        others = [NOISE] * size
        if kind.haystack == "needle":
            others = [
                NEEDLE.format(kind=kind.value, key=_value(kind.key, draw), value=_value(kind.value, draw))
                for _ in range(size)
            ]
        context = "\n".join(_among(others, needles, draw.sample(range(size), len(needles))))
    asked = draw.sample(range(kind.keys), kind.queries)
    names = [keys[number] for number in asked]
    query = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
    answers = tuple(value for number in asked for value in values[number])
    several, what = len(answers) > 1, kind.value if len(answers) > 1 else kind.value[:-1]
    prompt = (
        f"{'Some' if several else 'A'} special magic {what} {'are' if several else 'is'} hidden within the following "
        f"text. Make sure to memorize it. I will quiz you about the {what} afterwards.\n{context}\nWhat "
        f"{'are all' if several else 'is'} the special magic {what} for {query} mentioned in the provided text? "
        f"The special magic {what} for {query} mentioned in the provided text {'are' if several else 'is'}"
    )
    return Sample(task, prompt, answers, 128, Metric.ALL)


def _among(others: Sequence[str], hidden: Sequence[str], places: Sequence[int]) -> list[str]:
    """Put each hidden text before the other at its place."""
    mixed = list(others)
    for place, text in sorted(zip(places, hidden, strict=True), reverse=True):
        mixed.insert(place, text)
    return mixed


class Essay:
    """Serves any number of a text's words, from its beginning, as sentences; the text begins anew where it ends.

    Args:
        text: the user's.

    Raises:
        UserError: a text without a word, or no nltk.
    """

    def __init__(self, text: str) -> None:
        try:
            from nltk.tokenize.punkt import PunktSentenceTokenizer
        except ImportError:
            raise missing_package("haystack", "nltk") from None
        self.text = text
        self._words = text.split()
        if not self._words:
            raise UserError("haystack: has no word; give a long text")
        self._splitter: Any = PunktSentenceTokenizer()
        self.sentences = lru_cache(maxsize=64)(self._sentences)

    def _sentences(self, words: int) -> list[str]:
        """Return the sentences of so many words."""
        repeated = self._words * -(-words // len(self._words))
        found: list[str] = self._splitter.tokenize(" ".join(repeated[:words]))
        return found


_HOPS = 4


def _chain_text(size: int, letters: int, draw: random.Random) -> tuple[str, list[str]]:
    """Hide one chain of assignments in noise; the text with its question, and the variables."""
    different: dict[str, None] = {}  # a set that keeps its order
    while len(different) < _HOPS + 1:
        different["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
    names, value = list(different), draw.randrange(10000, 99999)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {later} = VAR {earlier} " for earlier, later in itertools.pairwise(names)]
    places = sorted(draw.sample(range(size), len(chain)))
    context = "\n".join(_among([NOISE] * size, chain, places))
    text = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: "
        f"According to the chain(s) of variable assignment in the text above, {len(names)} variables are assigned "
        f"the value {value}, they are: "
    )
    return text, names


def _example(size: int, draw: random.Random) -> str:
    """Write a solved chain, whose variables have 3 letters."""
    text, names = _chain_text(size, 3, draw)
    return f"{text} {' '.join(names)}\n\n"


def _chains(example: int, size: int, draw: random.Random) -> Sample:
    shown = _example(example, draw)
    text, names = _chain_text(size, 5, draw)
    return Sample("vt", shown + text, tuple(names), 30, Metric.ALL)


_COMMON = 10


def _word_list(size: int, common: int, others: int, draw: random.Random) -> tuple[str, list[str]]:
    """Number a shuffled list of `size` different words, of which 10 stand in it `common` times, the rest `others`."""
    drawn = draw.sample(all_words(), size)
    words = drawn[:_COMMON] * common + drawn[_COMMON:] * others
    draw.shuffle(words)
    return _numbered(words), drawn[:_COMMON]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _common_words(short: bool, size: int, draw: random.Random) -> Sample:
    def ask(context: str) -> str:
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? "
            "Answer: The top 10 words that appear most often in the list are:"
        )

    context, solved = _word_list(*((20, 3, 1) if short else (40, 10, 3)), draw)
    example = f"{ask(context)} {_numbered(solved)}\n"
    context, common = _word_list(size, *((6, 1) if short else (30, 3)), draw)
    return Sample("cwe", example + ask(context), tuple(common), 120, Metric.ALL)


_CODED_TOKENS = 50
_ZETA_2 = math.pi**2 / 6


def _coded_words(vocabulary: int, size: int, draw: random.Random) -> Sample:
    """Write about `size` made-up words, the k-th of them size * k ** -2 / zeta(2) times; the first is noise, "..."."""
    words: dict[str, None] = {}
    while len(words) < vocabulary:
        words["".join(draw.choices(string.ascii_lowercase, k=6))] = None
    ranked = ["...", *list(words)[1:]]
    text = [word for k, word in enumerate(ranked, start=1) for _ in range(int(size * k**-2 / _ZETA_2))]
    draw.shuffle(text)
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(text)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    return Sample("fwe", prompt, tuple(ranked[1:4]), _CODED_TOKENS, Metric.ALL)


@dataclass(frozen=True)
class Question:
    """Asks about documents, counted through all of a data set's.

    Attributes:
        text: the question.
        answers: any of which is right.
        needed: documents that are always shown.
        near: documents that are shown next: other paragraphs of the same article.
    """

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """Holds a data set of questions and the documents that answer them."""

    asked: tuple[Question, ...]
    documents: tuple[str, ...]

    def sample(self, task: str, number: int, size: int, draw: random.Random) -> Sample:
        """Ask a question about its own documents and others, `size` of them in all."""
        question = self.asked[number]
        chosen = [*question.needed]
        wanted = size - len(chosen)
        if wanted <= len(question.near):
            chosen += draw.sample(question.near, wanted)
        else:
            chosen += question.near
            taken = set(chosen)
            others = [place for place in range(len(self.documents)) if place not in taken]
            wanted = size - len(chosen)
            again, left = divmod(wanted, len(others)) if others else (0, 0)  # all of them as often as it takes
            chosen += [*(others * again), *draw.sample(others, left)]
        draw.shuffle(chosen)
        context = "\n\n".join(
            f"Document {place}:\n{self.documents[document]}" for place, document in enumerate(chosen, start=1)
        )
        how = (
            "Answer the question based on the given documents. Only give me the answer and do not output any other "
            "words."
        )
        prompt = (
            f"{how}\n\nThe following are given documents.\n\n{context}\n\n{how}\n\nQuestion: {question.text} Answer:"
        )
        return Sample(task, prompt, question.answers, 32, Metric.PART)


def read_squad(path: Path) -> Questions:
    """Read SQuAD's JSON, 1.1 or 2.0; questions without an answer are left out.

    Raises:
        UserError: another format.
    """
    return _read(path, "squad", _squad)


def read_hotpotqa(path: Path) -> Questions:
    """Read HotpotQA's JSON (distractor setting).

    Raises:
        UserError: another format.
    """
    return _read(path, "hotpotqa", _hotpotqa)


def _squad(data: Any) -> Questions:
    numbers = _numbered_once(paragraph["context"] for article in data["data"] for paragraph in article["paragraphs"])
    asked = []
    for article in data["data"]:
        own = [numbers[paragraph["context"]] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            here = numbers[paragraph["context"]]
            near = tuple(dict.fromkeys(number for number in own if number != here))
            for item in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in item["answers"]))
                if answers and not item.get("is_impossible", False):
                    asked.append(Question(item["question"], answers, (here,), near))
    return Questions(tuple(asked), tuple(numbers))


def _hotpotqa(data: Any) -> Questions:
    def documents(item: Any) -> Iterator[str]:
        return (f"{title}\n{''.join(sentences)}" for title, sentences in item["context"])

    numbers = _numbered_once(document for item in data for document in documents(item))
    asked = [
        Question(
            item["question"], (item["answer"],), tuple(dict.fromkeys(numbers[document] for document in documents(item)))
        )
        for item in data
    ]
    return Questions(tuple(asked), tuple(numbers))


def _numbered_once(texts: Iterator[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(sorted(set(texts)))}


def _read(path: Path, what: str, parse: Callable[[Any], Questions]) -> Questions:
    try:
        questions = parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        reason = re.sub(r"\s+", " ", repr(error))[:120]
        raise UserError(
            f"{what}: {path} is not in the published format ({reason}); give the file as published"
        ) from None
    if not questions.asked:
        raise UserError(f"{what}: {path} has no question with an answer; give the file as published")
    return questions
