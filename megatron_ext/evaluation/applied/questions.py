"""Questions out of files in their published formats: KILT, MS MARCO, TREC, SQuAD, QuALITY, HumanEval, ...

file --reader--> list[Question]; `READERS` names them.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

POPULAR = 1000  # PopQA's questions about pages with fewer views a month are asked, as HELMET does
UNKNOWN = -1  # the gain of a document of which its file does not say whether it holds an answer
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OPTION = re.compile(r"^([A-Z])[.)] ", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """Holds a retrieved document.

    Attributes:
        text: of it.
        title: empty where it has none.
        name: its ID; empty where it has none.
        gain: how relevant it is to be ranked, or 1 where it holds an answer and 0 where not, or `UNKNOWN`.
    """

    text: str
    title: str = ""
    name: str = ""
    gain: int = 0


@dataclass(frozen=True)
class Program:
    """Holds what a piece of code is to do.

    Attributes:
        entry_point: the function that is tested.
        test: code that tests it.
        unittest: the test is a `unittest.TestCase` named TestCases (BigCodeBench), not a function `check` (HumanEval).
    """

    entry_point: str
    test: str
    unittest: bool


@dataclass(frozen=True)
class Question:
    """Holds a question as its file has it.

    Attributes:
        text: of the question; empty where the article alone is asked about.
        answers: any of which is right; of a labelled text its label; of a choice none.
        group: questions of one group, such as those about one article, are no examples for each other.
        documents: retrieved ones, in their order.
        article: one long text.
        options: to choose from; empty where there are none, or where `text` lists them.
        letters: of the options that `text` lists.
        gold: the right option, counted from 0.
        program: what the code that continues `text` is to do.
    """

    text: str
    answers: tuple[str, ...] = ()
    group: str = ""
    documents: tuple[Document, ...] = ()
    article: str = ""
    options: tuple[str, ...] = ()
    letters: int = 0
    gold: int = -1
    program: Program | None = None


def read_questions(task: str, format: str, path: Path) -> list[Question]:
    """Read the questions of a file.

    Args:
        task: whose they are, for messages.
        format: one of `READERS`.
        path: the file, or of RACE a folder.

    Raises:
        UserError: no such file, another format, or nothing in it.
    """
    try:
        found = list(READERS[format](path))
    except OSError as error:
        reason = error.strerror or error  # gzip's have no number
        raise UserError(f"data: {task} needs {path}, which cannot be read ({reason}); check the path") from None
    except (*_MISFITS, EOFError, RecursionError, zlib.error, csv.Error) as error:
        reason = re.sub(r"\s+", " ", str(error) if isinstance(error, _BadLineError) else repr(error))[:200]
        raise UserError(
            f"data: {path} is not in the published format of {task} ({reason}); give the file as it was published"
        ) from None
    if not found:
        raise UserError(f"data: {path} has no question for {task}; give the file as it was published")
    return found


_MISFITS = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError)


class _BadLineError(ValueError):
    """Says which line of a file is wrong."""


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a .jsonl or .jsonl.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                parsed = json.loads(line)
            except ValueError:
                raise _BadLineError(f"line {number} is no JSON") from None
            except RecursionError:
                raise _BadLineError(f"line {number} is JSON nested too deep") from None
            if not isinstance(parsed, dict):
                raise _BadLineError(f"line {number} is no JSON object")
            yield parsed


def _each(path: Path, make: Callable[[dict[str, Any]], Iterator[Question]]) -> Iterator[Question]:
    """Make questions of each object of a file, naming the object where that fails."""
    for number, item in enumerate(_objects(path), start=1):
        try:
            yield from make(item)
        except _MISFITS as error:
            raise _BadLineError(f"object {number}: {error!r}") from None


def _texts(values: Any) -> tuple[str, ...]:
    """Check a list of strings, of which there must be one; each is taken once."""
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ValueError(f"needs a list of texts, got {str(values)[:40]}")
    return tuple(dict.fromkeys(_text(value) for value in values))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"needs a text, got {str(value)[:40]}")
    value.encode()  # JSON can spell half a character, which no tokenizer takes
    return value


def _kilt(path: Path) -> Iterator[Question]:
    def make(item: dict[str, Any]) -> Iterator[Question]:
        documents = tuple(
            Document(_text(part["text"]), _text(part["title"]), gain=_marked(part)) for part in item["ctxs"]
        )
        question = _text(item["question"])
        yield Question(question, _texts(item["answers"]), str(item.get("id", question)), documents)

    return _each(path, make)


def _marked(part: dict[str, Any]) -> int:
    """Return the gain of a retrieved document."""
    return UNKNOWN if part.get("has_answer") is None else int(bool(part["has_answer"]))


def _popqa(path: Path) -> Iterator[Question]:
    popular = {str(item["question"]) for item in _objects(path) if float(item.get("s_pop", 0)) >= POPULAR}
    return (question for question in _kilt(path) if question.text not in popular)


def _msmarco(path: Path) -> Iterator[Question]:
    def make(item: dict[str, Any]) -> Iterator[Question]:
        documents = tuple(
            Document(_text(part["text"]), _text(part.get("title", "")), str(part["id"]), int(part["label"]))
            for part in item["ctxs"]
        )
        if unusable := [document.name for document in documents if not document.name.isdecimal()]:
            raise ValueError(f"needs numbers as IDs, got {unusable[0][:40]}")
        yield Question(_text(item["query"]), (), str(item["qid"]), documents)

    return _each(path, make)


def _labelled(path: Path, label_fields: tuple[str, ...] = ("label", "category", "intent")) -> Iterator[Question]:
    """Read texts with labels: TREC's .label, a .csv with a header, .jsonl of Hugging Face's rows."""
    if path.suffix == ".label":  # "DESC:manner How did serfdom develop ... ?"
        for number, line in enumerate(path.read_text(encoding="latin-1").splitlines(), start=1):
            label, _, text = line.strip().partition(" ")
            if ":" not in label or not text:
                raise _BadLineError(f"line {number} has no label and text")
            yield Question(text, (label.split(":")[0] if "coarse_label" in label_fields else label,), text)
    elif path.suffix == ".csv":
        csv.field_size_limit(sys.maxsize)  # 131,072 characters are less than a text may have
        for row in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")):
            yield _example(row, label_fields)
    else:
        yield from _each(path, lambda item: iter([_example(item, label_fields)]))


def _example(row: dict[str, Any], label_fields: tuple[str, ...]) -> Question:
    text = next((row[name] for name in ("text", "sentence", "content") if row.get(name) is not None), None)
    label = next((row[name] for name in label_fields if row.get(name) is not None), None)
    if text is None or label is None:
        raise ValueError(f"needs a text and one of {', '.join(label_fields)}, got {', '.join(map(str, row))[:80]}")
    return Question(_text(text), (str(label),), text)


def _trec_coarse(path: Path) -> Iterator[Question]:
    return _labelled(path, ("coarse_label", "label"))


def _trec_fine(path: Path) -> Iterator[Question]:
    return _labelled(path, ("fine_label", "label"))


def _narrativeqa(path: Path) -> Iterator[Question]:
    """Read Hugging Face's rows, each with the whole text."""

    def make(item: dict[str, Any]) -> Iterator[Question]:
        story, answers = item["document"], [answer["text"] for answer in item["answers"]]
        text = _text(story["text"])
        yield Question(_text(item["question"]["text"]), _texts(answers), str(story.get("id", text)), article=text)

    return _each(path, make)


def _infinitebench(path: Path) -> Iterator[Question]:
    def make(item: dict[str, Any]) -> Iterator[Question]:
        options = tuple(_text(option) for option in item.get("options") or ())
        answers = _texts(item["answer"] if isinstance(item["answer"], list) else [item["answer"]])
        gold = options.index(answers[0]) if options else -1
        text = _text(item["context"])
        yield Question(_text(item.get("input", "")), answers, text, article=text, options=options, gold=gold)

    return _each(path, make)


def _multi_lexsum(path: Path) -> Iterator[Question]:
    """Read Hugging Face's rows; cases without a short summary are left out, as HELMET does."""

    def make(item: dict[str, Any]) -> Iterator[Question]:
        if item["summary/short"] is not None:
            text = "\n\n".join(_text(source) for source in item["sources"])
            yield Question("", (_text(item["summary/short"]),), str(item.get("id", text)), article=text)

    return _each(path, make)


def _squad(path: Path) -> Iterator[Question]:
    """Read SQuAD's JSON, 1.1 or 2.0; questions without an answer are left out."""
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            documents = (Document(_text(paragraph["context"])),)
            for item in paragraph["qas"]:
                if item["answers"] and not item.get("is_impossible", False):
                    answers = _texts([answer["text"] for answer in item["answers"]])
                    yield Question(_text(item["question"]), answers, paragraph["context"], documents)


def _hotpotqa(path: Path) -> Iterator[Question]:
    for item in json.loads(path.read_text(encoding="utf-8")):
        documents = tuple(Document("".join(sentences), _text(title)) for title, sentences in item["context"])
        yield Question(_text(item["question"]), (_text(item["answer"]),), str(item["_id"]), documents)


def _nq_open(path: Path) -> Iterator[Question]:
    def make(item: dict[str, Any]) -> Iterator[Question]:
        question = _text(item["question"])
        yield Question(question, _texts(item["answer"]), question)

    return _each(path, make)


def _triviaqa(path: Path) -> Iterator[Question]:
    for item in json.loads(path.read_text(encoding="utf-8"))["Data"]:
        answers = _texts([item["Answer"]["Value"], *item["Answer"]["Aliases"]])
        yield Question(_text(item["Question"]), answers, str(item["QuestionId"]))


def _leval(path: Path) -> Iterator[Question]:
    """Read L-Eval's closed-ended tasks: instructions that list their options, and the right letters."""

    def make(item: dict[str, Any]) -> Iterator[Question]:
        article = _text(item["input"])
        for text, output in zip(item["instructions"], item["outputs"], strict=True):
            letters = "".join(_OPTION.findall(text))
            if len(letters) < 2 or not LETTERS.startswith(letters):
                raise ValueError(f"needs options A. to D. below a question, got {text[-40:]}")
            yield Question(text, (), article, article=article, letters=len(letters), gold=letters.index(output))

    return _each(path, make)


def _quality(path: Path) -> Iterator[Question]:
    """Read QuALITY's .htmlstripped files; the test set's have no right options."""

    def make(item: dict[str, Any]) -> Iterator[Question]:
        for asked in item["questions"]:
            options = tuple(_text(option) for option in asked["options"])
            gold = int(asked["gold_label"]) - 1
            if not 0 <= gold < len(options):
                raise ValueError(f"needs gold_label 1..{len(options)}, got {gold + 1}")
            article = _text(item["article"])
            yield Question(_text(asked["question"]), (), article, article=article, options=options, gold=gold)

    return _each(path, make)


def _race(path: Path) -> Iterator[Question]:
    """Read RACE's folder of .txt files, each a JSON object; or .jsonl of such objects."""
    for item in _race_objects(path):
        article = _text(item["article"])
        for text, options, answer in zip(item["questions"], item["options"], item["answers"], strict=True):
            several = tuple(_text(option) for option in options)
            gold = LETTERS[: len(several)].index(answer)
            yield Question(_text(text), (), article, article=article, options=several, gold=gold)


def _race_objects(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        for file in sorted(path.glob("*.txt"), key=lambda file: (len(file.stem), file.stem)):
            yield json.loads(file.read_text(encoding="utf-8"))
    else:
        yield from _objects(path)


def _humaneval(path: Path) -> Iterator[Question]:
    def make(item: dict[str, Any]) -> Iterator[Question]:
        program = Program(_text(item["entry_point"]), _text(item["test"]), unittest=False)
        yield Question(_text(item["prompt"]), (), str(item["task_id"]), program=program)

    return _each(path, make)


def _bigcodebench(path: Path) -> Iterator[Question]:
    def make(item: dict[str, Any]) -> Iterator[Question]:
        program = Program(_text(item["entry_point"]), _text(item["test"]), unittest=True)
        yield Question(_text(item["complete_prompt"]), (), str(item["task_id"]), program=program)

    return _each(path, make)


READERS: dict[str, Callable[[Path], Iterator[Question]]] = {
    "kilt": _kilt,
    "popqa": _popqa,
    "msmarco": _msmarco,
    "labelled": _labelled,
    "trec_coarse": _trec_coarse,
    "trec_fine": _trec_fine,
    "narrativeqa": _narrativeqa,
    "infinitebench": _infinitebench,
    "multi_lexsum": _multi_lexsum,
    "squad": _squad,
    "hotpotqa": _hotpotqa,
    "nq_open": _nq_open,
    "triviaqa": _triviaqa,
    "leval": _leval,
    "quality": _quality,
    "race": _race,
    "humaneval": _humaneval,
    "bigcodebench": _bigcodebench,
}
