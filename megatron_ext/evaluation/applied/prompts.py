"""The prompt of a question, and what of it is left out where it is too long.

A prompt is a head, pieces, and a tail; the pieces are what may be left out: whole documents, whole examples, or the
slices of one long text, whose end then goes. The head and the question in the tail always stay.

    head    "Use the given documents to write ..."  and two solved examples
    pieces  document | document | document | document          kept by rank of importance, shown in their order
    tail    "Question: ...\\nAnswer:"
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.errors import UserError
from megatron_ext.evaluation.applied.questions import LETTERS, Document, Question

OMITTED = " ... [the rest of the text is omitted]"
SLICE = 200  # characters of a long text that stay or go together, about
EXAMPLE_DOCUMENTS, EXAMPLE_PASSAGES = 3, 10  # of a solved example, as in HELMET's files of examples
Count = Callable[[str], int]


@dataclass(frozen=True)
class Draft:
    """Holds a prompt from which pieces may be left out.

    Attributes:
        head, tail: what stays.
        pieces: each with the space behind it.
        rank: of each piece, how early it is kept: 0 first; a permutation.
        least: pieces that must stay.
        omitted: what stands for those that were left out.
    """

    head: str
    tail: str
    pieces: tuple[str, ...] = ()
    rank: tuple[int, ...] = ()
    least: int = 0
    omitted: str = ""

    def prompt(self, kept: int) -> str:
        """Write the prompt with so many pieces."""
        shown = (piece for piece, rank in zip(self.pieces, self.rank, strict=True) if rank < kept)
        return f"{self.head}{''.join(shown)}{self.omitted if kept < len(self.pieces) else ''}{self.tail}"


def in_order(head: str, pieces: Sequence[str], tail: str, least: int = 0, omitted: str = "") -> Draft:
    """Make a draft whose first pieces are kept."""
    return Draft(head, tail, tuple(pieces), tuple(range(len(pieces))), least, omitted)


def fit(draft: Draft, room: int, count: Count) -> tuple[str, int]:
    """Keep as many pieces as a prompt has room for: one more would not fit. Return the prompt, and their number.

    What each piece takes alone is added up to guess where that is, and whole prompts are counted around it only,
    because a tokenizer may join what stands side by side, or put a token of its own before a text.

    Args:
        draft: what there is to keep.
        room: tokens of the prompt, at most.
        count: tokens of a text.

    Raises:
        UserError: not even the least fits; the message lacks what was asked for.
    """

    def tokens(kept: int) -> int:
        return count(draft.prompt(kept))

    least = min(draft.least, len(draft.pieces))
    bare = tokens(0)
    alone: list[int] = []  # the tokens of the first pieces, together
    for _, piece in sorted(zip(draft.rank, draft.pieces, strict=True)):
        if alone and alone[-1] > 2 * room:
            break
        alone.append((alone[-1] if alone else 0) + count(piece))
    if len(alone) == len(draft.pieces) and tokens(len(alone)) <= room:  # what stands for less may be longer than all
        return draft.prompt(len(alone)), len(alone)
    kept, scale = 0, 1.0
    for _ in range(3):
        kept = max(bisect.bisect_right(alone, (room - bare) / scale), least)
        if not kept or kept > len(alone):
            break
        scale = max(tokens(kept) - bare, 1) / max(alone[kept - 1], 1)
    while kept > least and tokens(kept) > room:
        kept -= 1
    while kept < len(draft.pieces) and tokens(kept + 1) <= room:
        kept += 1
    if (needed := tokens(kept)) > room:
        raise UserError(f"takes {needed} tokens at least, and there is room for {room}")
    return draft.prompt(kept), kept


def spread(documents: Sequence[Document]) -> tuple[int, ...]:
    """Rank documents: those with a gain first, then the others evenly, so that the depth of what is kept stays.

    Documents 0..7 of which 5 has a gain: 5, then 0, then halves, quarters, ... of the rest.
    """
    order = [number for number, document in enumerate(documents) if document.gain > 0]
    rest = [number for number, document in enumerate(documents) if document.gain <= 0]
    taken = set()
    for parts in (2**power for power in range(len(rest).bit_length() + 1)):
        for part in range(parts):
            place = part * len(rest) // parts
            if place < len(rest) and place not in taken:
                taken.add(place)
                order.append(rest[place])
    rank = [0] * len(documents)
    for place, number in enumerate(order):
        rank[number] = place
    return tuple(rank)


def slices(text: str) -> list[str]:
    """Cut a text between words into pieces of about `SLICE` characters; joined they are the text."""
    return re.findall(rf"(?s).{{1,{SLICE}}}(?=\s|$)|\S+|\s+", text)


def shown(document: Document) -> str:
    """Write a document as HELMET does."""
    return f"Document (Title: {document.title}): {document.text}" if document.title else f"Document: {document.text}"


def with_documents(question: Question, examples: Sequence[Question]) -> Draft:
    """Ask about retrieved documents, with solved examples of `EXAMPLE_DOCUMENTS` each."""
    head = (
        "Use the given documents to write a concise and short answer to the question. Write your answer in the "
        "following format:\nAnswer: [answer]\n\n"
    )
    for example in examples:
        few = _most_wanted(example.documents, EXAMPLE_DOCUMENTS)
        head += "".join(f"{shown(document)}\n\n" for document in few)
        head += f"Question: {example.text}\nAnswer: {example.answers[0]}\n\n"
    pieces = tuple(f"{shown(document)}\n\n" for document in question.documents)
    return Draft(head, f"Question: {question.text}\nAnswer:", pieces, spread(question.documents), least=1)


def ranked(question: Question, examples: Sequence[Question]) -> Draft:
    """Ask for a ranking of documents, with solved examples of `EXAMPLE_PASSAGES` each."""

    def passage(document: Document) -> str:
        return f"[ID: {document.name}] {shown(document)}\n\n"

    head = (
        "You are provided with a list of documents, each indicated by their ID. Rank each document based on their "
        "relevance to the question in descending order from most relelvant to least relevant texts. Include all "  # sic
        "documents in the rankings. Write your answer using the unique IDs, with the following format:\nRanking: ID3 > "
        "ID1 > ID2\n\n"
    )
    for example in examples:
        few = _most_wanted(example.documents, EXAMPLE_PASSAGES)
        right = " > ".join(document.name for document in sorted(few, key=lambda document: -document.gain))
        head += "".join(map(passage, few)) + f"Query: {example.text}\nRanking: {right}\n\n"
    pieces = tuple(map(passage, question.documents))
    return Draft(head, f"Query: {question.text}\nRanking:", pieces, spread(question.documents), least=1)


def labelled(question: Question, examples: Sequence[Question], numbers: Mapping[str, int]) -> Draft:
    """Ask for the number that stands for a text's label, after as many examples as fit."""
    head = (
        "Use the provided mapping from the text to label to assign a label to the text. Only output "
        '"label: {label}" and nothing else. \n\n'
    )
    pieces = [f"{example.text}\nlabel: {numbers[example.answers[0]]}\n\n" for example in examples]
    return in_order(head, pieces, f"{question.text}\nlabel:", least=1)


@dataclass(frozen=True)
class Story:
    """Words a question about one long text.

    Attributes:
        task: what there is to do.
        examples, example, now: before, of, and behind solved examples, which have no text of their own.
        before, after: the text; the question follows.
        heading: what the prompt ends with.
    """

    task: str
    examples: str
    example: str
    now: str
    after: str
    heading: str
    before: str = ""

    def draft(self, question: Question, examples: Sequence[Question]) -> Draft:
        """Write a question about the text, whose end is left out where it is too long."""
        head = f"{self.task}\n\n" if self.task else ""
        if examples:
            solved = (f"{self.filled(self.example, example)} {self.answer(example)}" for example in examples)
            joined = "\n\n".join(solved)
            head += f"{self.examples}\n\n{joined}\n\n{self.now}"
        tail = f"\n\n{self.filled(self.after, question)}{self.heading}"
        return in_order(f"{head}{self.before}", slices(question.article), tail, least=1, omitted=OMITTED)

    def answer(self, question: Question) -> str:
        """Return the right answer: the letter of an option where they are listed, the option itself where not."""
        if question.gold < 0:
            return question.answers[0].strip()
        listed = bool(question.letters) or "{options}" in self.example
        return LETTERS[question.gold] if listed else question.options[question.gold]

    @staticmethod
    def filled(words: str, question: Question) -> str:
        """Put a question and its options where the words name them."""
        options = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, question.options, strict=False))
        return words.replace("{options}", options).replace("{question}", question.text)


def solved_before(question: Question, examples: Sequence[Question], documents: int | None) -> Draft:
    """Ask about short documents, or none, after whole examples of the same kind.

    Args:
        question: what is asked.
        examples: those that fit are kept.
        documents: of a question, the first so many; None for all.
    """

    def written(item: Question) -> str:
        lines = [f"{part.title}: {part.text}" if part.title else part.text for part in item.documents[:documents]]
        context = "".join(f"Context: {line}\n" for line in lines)
        return f"{context}Question: {item.text}\nAnswer:"

    pieces = [f"{written(example)} {example.answers[0]}\n\n" for example in examples]
    return in_order("", pieces, written(question))


def _most_wanted(documents: Sequence[Document], number: int) -> list[Document]:
    """Choose documents for an example, in their order: those with a gain first, then the others evenly."""
    ranks = spread(documents)
    return [document for document, rank in zip(documents, ranks, strict=True) if rank < number]
