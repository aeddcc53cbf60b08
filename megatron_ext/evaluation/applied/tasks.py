"""All applied tasks by name: how each is asked, how often solved before, and by which figure it is compared."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.evaluation.applied import prompts
from megatron_ext.evaluation.applied.prompts import Draft, Story
from megatron_ext.evaluation.applied.questions import LETTERS, UNKNOWN, Program, Question, read_questions
from megatron_ext.evaluation.applied.scoring import Metric, check_rouge

logger = logging.getLogger(__name__)


class Family(StrEnum):
    """Says how a task is asked and scored."""

    RAG = "retrieved documents"
    RANKING = "re-ranking"
    LABELS = "many-shot labels"
    LONG_QUESTION = "long question answering"
    SUMMARY = "summarisation"
    READING = "reading comprehension"
    CLOSED_BOOK = "closed-book questions"
    CHOICE = "multiple choice"
    CODE = "code"


@dataclass(frozen=True)
class Task:
    """Says how a task is asked and scored.

    Attributes:
        family: of prompts and figures.
        format: of its files, one of `READERS`.
        metric: by which models are compared.
        shots: solved examples before a question.
        new_tokens: of an answer, at most.
        fills: documents, examples or a text fill every length; else a prompt has a length of its own, and is asked at
            the greatest alone.
        stops: texts that end an answer and are no part of it.
        documents: of a question, the first so many; None for all.
        story: the words of a task about one long text.
        options_follow: the options' own text is what may follow the prompt, not their letters.
    """

    family: Family
    format: str
    metric: Metric
    shots: int = 0
    new_tokens: int = 0
    fills: bool = False
    stops: tuple[str, ...] = ("\n",)
    documents: int | None = None
    story: Story | None = None
    options_follow: bool = False

    @property
    def heading(self) -> str:
        """What a prompt ends with."""
        if self.story is not None:
            return self.story.heading
        return {Family.RANKING: "Ranking:", Family.LABELS: "label:"}.get(self.family, "Answer:")

    @property
    def fills_with_examples(self) -> bool:
        """Whether a prompt shows as many examples as fit."""
        return self.family is Family.LABELS

    @property
    def asks_again(self) -> bool:
        """Whether files have a question in several rows: HELMET's, with the right document at several depths."""
        return self.family in (Family.RAG, Family.RANKING)

    @property
    def rouge(self) -> bool:
        """Whether answers are scored by ROUGE too."""
        return self.family in (Family.LONG_QUESTION, Family.SUMMARY)


def _rag(format: str = "kilt") -> Task:
    return Task(Family.RAG, format, Metric.SUBSTRING_MATCH, shots=2, new_tokens=20, fills=True)


def _labels(format: str = "labelled") -> Task:
    return Task(Family.LABELS, format, Metric.EXACT_MATCH, new_tokens=20, fills=True)


def _reading(format: str, shots: int, documents: int | None = None) -> Task:
    return Task(Family.READING, format, Metric.EXACT_MATCH, shots, new_tokens=32, documents=documents)


_INFINITE = "You are given a story and a question"
_CONCISE = "Answer the question as concisely as you can, using a single phrase if possible."
_LISTED = "Question: {question}\nOptions:\n{options}"
_HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```", "<file_sep>")
_BIGCODE_STOPS = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ", "\nif __name__", "\nprint(", "\n```")

TASKS: dict[str, Task] = {
    # HELMET's: words, examples, answer lengths and figures
    "kilt_nq": _rag(),
    "kilt_triviaqa": _rag(),
    "kilt_hotpotqa": _rag(),
    "kilt_popqa": _rag("popqa"),
    "msmarco": Task(Family.RANKING, "msmarco", Metric.NDCG, shots=2, new_tokens=200, fills=True),
    "icl_trec_coarse": _labels("trec_coarse"),
    "icl_trec_fine": _labels("trec_fine"),
    "icl_banking77": _labels(),
    "icl_clinc150": _labels(),
    "icl_nlu": _labels(),
    "narrativeqa": Task(
        Family.LONG_QUESTION,
        "narrativeqa",
        Metric.F1,
        shots=2,
        new_tokens=100,
        fills=True,
        stops=(),
        story=Story(
            f"You are given a story, which can be either a novel or a movie script, and a question. {_CONCISE}",
            "For example:",
            "Question: {question}\nAnswer:",
            "Now, use the following story to answer the question:\n\n",
            "Question: {question}\n",
            "Answer:",
        ),
    ),
    "infbench_qa": Task(
        Family.LONG_QUESTION,
        "infinitebench",
        Metric.ROUGE_L,
        shots=2,
        new_tokens=10,
        fills=True,
        stops=(),
        story=Story(
            f"{_INFINITE}. {_CONCISE}",
            "For example:",
            "[story text]\nQuestion: {question}\nAnswer:",
            "Now, read the following story:\n\n",
            "Question: {question}\n\n",
            "Answer:",
        ),
    ),
    "infbench_choice": Task(
        Family.CHOICE,
        "infinitebench",
        Metric.ACCURACY,
        shots=2,
        fills=True,
        story=Story(
            f"{_INFINITE} with multiple choices. Choose the best answer from the options provided. Only one of the "
            "following options is correct, output the answer using one single letter (A, B, C, or D). Don't say "
            "anything else.",
            "For example:",
            f"[story text]\n{_LISTED}\nAnswer:",
            "Now, read the following story:\n\n",
            f"{_LISTED}\n\n",
            "Answer:",
        ),
    ),
    "infbench_sum": Task(
        Family.SUMMARY,
        "infinitebench",
        Metric.ROUGE_L,
        shots=2,
        new_tokens=1200,
        fills=True,
        stops=(),
        story=Story(
            "You are given a book and you are tasked to summarize it. Write a summary of about 1000 to 1200 words. "
            "Only write about the plot and characters of the story. Do not discuss the themes or background of the "
            "book. Do not provide any analysis or commentary.",
            "For example:",
            "[story text]\nSummary:",
            "Now, read the following story:\n\n",
            "Now summarize the book.\n\n",
            "Summary:",
        ),
    ),
    "multi_lexsum": Task(
        Family.SUMMARY,
        "multi_lexsum",
        Metric.ROUGE_L,
        shots=2,
        new_tokens=400,
        fills=True,
        stops=(),
        story=Story(
            "You are given the legal documents in a civil rights lawsuit, and you are tasked to summarize the case. "
            "Write a concise summary of one paragraph (200 to 250 words). The summary should contain a short "
            "description of the background, the parties involved, and the outcomes of the case.",
            "Example summaries:",
            "Summary:",
            "Now, write a summary of the following legal documents.\n",
            "Now please summarize the case.\n\n",
            "Summary:",
            before="Legal documents:\n",
        ),
    ),
    # SkyLadder's, beside HELMET's
    "icl_dbpedia": _labels(),
    "icl_agnews": _labels(),
    "icl_amazon": _labels(),
    "icl_yelp": _labels(),
    "icl_sst2": _labels(),
    "squad": _reading("squad", 4),
    "hotpotqa": _reading("hotpotqa", 2),
    "nq": _reading("kilt", 2, documents=1),
    "triviaqa": _reading("kilt", 2, documents=1),
    "nq_closed": Task(Family.CLOSED_BOOK, "nq_open", Metric.EXACT_MATCH, shots=5, new_tokens=20),
    "triviaqa_closed": Task(Family.CLOSED_BOOK, "triviaqa", Metric.EXACT_MATCH, shots=5, new_tokens=20),
    "race": Task(
        Family.CHOICE,
        "race",
        Metric.ACCURACY_PER_TOKEN,
        story=Story(
            "", "For example:", "Question: {question}\nAnswer:", "", "Question: {question}\n", "Answer:", "Article: "
        ),
        options_follow=True,
    ),
    "toefl": Task(
        Family.CHOICE,
        "leval",
        Metric.ACCURACY,
        story=Story(
            "Read the text, and answer the question by the letter of the right option.",
            "For example:",
            "[text]\nQuestion: {question}\nAnswer:",
            "Now, read the following text:\n\n",
            "Question: {question}\n",
            "Answer:",
        ),
    ),
    "quality": Task(
        Family.CHOICE,
        "quality",
        Metric.ACCURACY,
        story=Story(
            "Read the text, and answer the question by the letter of the right option.",
            "For example:",
            "[text]\nQuestion: {question}\n{options}\nAnswer:",
            "Now, read the following text:\n\n",
            "Question: {question}\n{options}\n",
            "Answer:",
        ),
    ),
    "humaneval": Task(Family.CODE, "humaneval", Metric.PASS_AT_1, new_tokens=512, stops=_HUMANEVAL_STOPS),
    "bigcodebench": Task(Family.CODE, "bigcodebench", Metric.PASS_AT_1, new_tokens=1280, stops=_BIGCODE_STOPS),
}


@dataclass(frozen=True)
class Given:
    """Holds the user's files of a task.

    Attributes:
        questions: to be asked.
        examples: to be shown solved; where no file of them is given, the questions themselves.
    """

    questions: tuple[Question, ...]
    examples: tuple[Question, ...]


@dataclass(frozen=True)
class Sample:
    """Asks a model something.

    Attributes:
        task: its name.
        question: that it asks, the same in several samples where documents alone differ.
        prompt: up to where the answer begins.
        new_tokens: of the answer, at most; 0 where options are weighed.
        kept, pieces: pieces of the prompt that it shows, of all that there are: documents, examples, slices of a text.
        answers: any of which is right.
        options: what may follow the prompt.
        gold: the right one of them.
        gains: of the documents that are shown.
        program: what the code is to do.
    """

    task: str
    question: str
    prompt: str
    new_tokens: int
    kept: int
    pieces: int
    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    gold: int = -1
    gains: tuple[tuple[str, int], ...] = ()
    program: Program | None = None


def read_given(data: Mapping[str, Path], examples: Mapping[str, Path]) -> dict[str, Given]:
    """Read the files of the tasks, in the order of `TASKS`.

    Raises:
        UserError: no such task, a file that cannot be read, examples that no task asks for or that are missing.
    """
    for name in (*data, *examples):
        if name not in TASKS:
            raise UserError(f"data: got {name}, needs one of {', '.join(TASKS)}")
    if spare := [name for name in examples if name not in data]:
        raise UserError(f"examples: got some of {spare[0]}, which no --data asks; give --data {spare[0]}=FILE too")
    given = {}
    for name, task in TASKS.items():
        if name not in data:
            continue
        if task.rouge:
            check_rouge()
        if task.family is Family.LABELS and name not in examples:
            raise UserError(
                f"examples: {name} needs labelled texts to show; give --examples {name}=FILE of its training set"
            )
        questions = tuple(read_questions(name, task.format, data[name]))
        shown = tuple(read_questions(name, task.format, examples[name])) if name in examples else questions
        if task.family is Family.RAG:
            _check_marked(name, questions, "data", 1)
            _check_marked(name, shown, "examples", prompts.EXAMPLE_DOCUMENTS)
        if task.family is Family.LABELS:
            known = {example.answers for example in shown}
            if unknown := [question.answers[0] for question in questions if question.answers not in known]:
                raise UserError(f"examples: {name} asks for the label {unknown[0]}, which none of them has; give all")
        given[name] = Given(questions, shown)
    return given


def _check_marked(name: str, questions: Sequence[Question], field: str, kept: int) -> None:
    """Refuse retrieved documents of which the right one could be left out unseen: all but `kept` of them may be."""
    for question in questions:
        if len(question.documents) > kept and any(document.gain == UNKNOWN for document in question.documents):
            raise UserError(
                f"{field}: {name} shows some of each question's documents, and the file does not say of all whether "
                f"they hold an answer; add has_answer to the ctxs of {question.text[:60]!r} and the others"
            )


def make_samples(
    given: Mapping[str, Given],
    lengths: Sequence[int],
    count: Callable[[str], int],
    number: int,
    shots: int | None,
    seed: int,
) -> dict[int, list[Sample]]:
    """Make every task's samples: at every length, or at the greatest alone where a prompt has a length of its own.

    Args:
        given: questions and examples of the tasks.
        lengths: tokens of prompt and answer together.
        count: tokens of a text.
        number: questions of each task, drawn by the seed, each in all of its rows; all where there are no more.
        shots: solved examples of every task that has them; None for each task's own.
        seed: of what is asked and shown.

    Raises:
        UserError: too few examples, or a question that does not fit a length.
    """
    made: dict[int, list[Sample]] = {length: [] for length in lengths}
    for name, own in given.items():
        task = TASKS[name]
        asked = _drawn(task, own.questions, number, random.Random(f"{seed}:{name}"))
        for length in lengths if task.fills else [max(lengths)]:
            samples = [_sample(name, task, question, own, length, count, shots, seed) for question in asked]
            _warn_of_less(name, task, samples, length, task.shots if shots is None else shots)
            made[length] += samples
    return {length: samples for length, samples in made.items() if samples}


def _drawn(task: Task, questions: Sequence[Question], number: int, draw: random.Random) -> list[Question]:
    """Draw what is asked, in its order: a question in all of its rows, of labelled texts as many of each label."""
    if task.asks_again:
        asked = sorted({question.group for question in questions})
        chosen = set(draw.sample(asked, min(number, len(asked))))
        return [question for question in questions if question.group in chosen]
    if number >= len(questions):
        return list(questions)
    if task.family is Family.LABELS:
        return list(itertools.islice(rounds(questions, draw, again=False), number))
    return [questions[place] for place in sorted(draw.sample(range(len(questions)), number))]


def rounds(examples: Sequence[Question], draw: random.Random, *, again: bool = True) -> Iterator[Question]:
    """Yield labelled texts in rounds: one of each label in every round, in an order that is drawn.

    Args:
        examples: to draw from.
        draw: what is drawn with.
        again: begin a label's texts again where they are used up, without end; else leave the label out.
    """
    by_label: dict[str, list[Question]] = {}
    for example in examples:
        by_label.setdefault(example.answers[0], []).append(example)
    for own in by_label.values():
        draw.shuffle(own)
    for number in itertools.count():
        texts = [own[number % len(own)] for own in by_label.values() if again or number < len(own)]
        if not texts:
            return
        draw.shuffle(texts)
        yield from texts


def _sample(
    name: str,
    task: Task,
    question: Question,
    given: Given,
    length: int,
    count: Callable[[str], int],
    shots: int | None,
    seed: int,
) -> Sample:
    draw = random.Random(f"{seed}:{name}:{question.group}:{question.text}")
    numbers: dict[str, int] = {}
    if task.family is Family.LABELS:
        labels = sorted({example.answers[0] for example in given.examples})
        numbers = dict(zip(labels, draw.sample(range(len(labels)), len(labels)), strict=True))
    options = _options(task, question)
    longest = max((count(option) for option in options), default=task.new_tokens)
    room = length - longest
    draft = _draft(name, task, question, given, numbers, room, shots, draw)
    try:
        prompt, kept = prompts.fit(draft, room, count)
    except UserError as error:
        raise UserError(
            f"lengths: got {length}, a question of {name} {error} beside its answer's {longest}; give a longer one, "
            "fewer --shots, or leave the task out"
        ) from None
    shown = [document for document, rank in zip(question.documents, draft.rank, strict=False) if rank < kept]
    return Sample(
        task=name,
        question=question.group if task.asks_again else prompt,
        prompt=prompt,
        new_tokens=task.new_tokens,
        kept=kept,
        pieces=len(draft.pieces),
        answers=(str(numbers[question.answers[0]]),) if numbers else question.answers,
        options=options,
        gold=question.gold,
        gains=tuple((document.name, document.gain) for document in shown) if task.family is Family.RANKING else (),
        program=question.program,
    )


def _options(task: Task, question: Question) -> tuple[str, ...]:
    """List what may follow a prompt: letters, or the options themselves."""
    if task.family is not Family.CHOICE:
        return ()
    if task.options_follow:
        return tuple(f" {option}" for option in question.options)
    return tuple(f" {letter}" for letter in LETTERS[: question.letters or len(question.options)])


def _draft(
    name: str,
    task: Task,
    question: Question,
    given: Given,
    numbers: Mapping[str, int],
    room: int,
    shots: int | None,
    draw: random.Random,
) -> Draft:
    """Word a question."""
    if task.family is Family.CODE:
        return Draft("", question.text.rstrip())
    others = (example for example in given.examples if example.group != question.group)
    if task.family is Family.LABELS:
        texts = list(others)
        # a text, a heading and a number take more than four tokens
        return prompts.labelled(question, list(itertools.islice(rounds(texts, draw), max(room // 4, 1))), numbers)
    examples = _examples(name, list(others), task.shots if shots is None else shots, draw)
    if task.story is not None:
        return task.story.draft(question, examples)
    if task.family is Family.RAG:
        return prompts.with_documents(question, examples)
    if task.family is Family.RANKING:
        return prompts.ranked(question, examples)
    return prompts.solved_before(question, examples, task.documents)


def _examples(name: str, others: Sequence[Question], shots: int, draw: random.Random) -> list[Question]:
    """Draw solved examples, each of another group."""
    by_group = {example.group: example for example in draw.sample(others, len(others))} if shots else {}
    if len(by_group) < shots:
        raise UserError(
            f"examples: {name} shows {shots}, and there are {len(by_group)} beside the question; give --examples "
            f"{name}=FILE, or fewer --shots"
        )
    return list(by_group.values())[:shots]


def _warn_of_less(name: str, task: Task, samples: Sequence[Sample], length: int, shots: int) -> None:
    """Say where a prompt of a length of its own had to lose examples or text."""
    less = sum(sample.kept < sample.pieces for sample in samples)
    if less and not task.fills:
        what = "the end of their text" if task.story is not None else f"some of their {shots} examples"
        logger.warning("%s: %d of %d prompts of %d tokens lack %s", name, less, len(samples), length, what)
