"""A small file of every task in its published format, written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

ANIMALS = ("dog", "cat", "hen", "cow", "pig", "fox", "owl", "bee")
COLOURS = ("red", "blue", "green", "black", "white", "brown", "grey", "pink")
STORY = " ".join(f"Lily met a {colour} {animal} in the park." for colour in COLOURS for animal in ANIMALS)


def kilt(number: int, documents: int = 8) -> dict[str, Any]:
    """A question with retrieved documents, of which the sixth has the answer."""
    animal, colour = ANIMALS[number], COLOURS[number]
    texts = [f"The {animal} sleeps in house {place}." for place in range(documents)]
    texts[5 % documents] = f"The {animal} is {colour}."
    return {
        "id": f"q{number}",
        "question": f"what colour is the {animal}",
        "answers": [colour, f"{colour} all over"],
        "ctxs": [
            {"id": str(place), "title": f"{animal} {place}", "text": text, "has_answer": colour in text}
            for place, text in enumerate(texts)
        ],
    }


def msmarco(number: int) -> dict[str, Any]:
    labels = [0, 0, 2, 0, 1, 0]
    return {
        "qid": str(900 + number),
        "query": f"where is the {ANIMALS[number]}",
        "ctxs": [
            {"id": str(10 * number + place), "text": f"The {ANIMALS[number]} is at {place}.", "label": label}
            for place, label in enumerate(labels)
        ],
    }


def labelled(count: int, labels: int = 3) -> list[dict[str, Any]]:
    return [
        {"text": f"text {number} of {COLOURS[number % 8]}", "label": f"l{number % labels}"} for number in range(count)
    ]


def infinitebench(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "context": f"{STORY} {number}",
        "input": f"What did Lily meet {number} times?",
        "answer": [ANIMALS[number]],
        "options": list(ANIMALS[number : number + 4]) if number < 5 else list(ANIMALS[4:]),
    }


def humaneval(number: int) -> dict[str, Any]:
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": f'def add_{number}(a, b):\n    """Add two numbers and {number}."""\n',
        "entry_point": f"add_{number}",
        "canonical_solution": f"    return a + b + {number}\n",
        "test": f"def check(candidate):\n    assert candidate(1, 2) == {3 + number}\n",
    }


def bigcodebench(number: int) -> dict[str, Any]:
    start = f'import math\n\ndef task_func(x):\n    """Take the root of x, and add {number}."""\n'
    test = (
        "import unittest\n\nclass TestCases(unittest.TestCase):\n"
        f"    def test_root(self):\n        self.assertEqual(task_func(4), {2 + number})\n"
        f"    def test_none(self):\n        self.assertEqual(task_func(0), {number})\n"
    )
    solution = f"    return math.sqrt(x) + {number}\n"
    return {
        "task_id": f"BigCodeBench/{number}",
        "complete_prompt": start,
        "instruct_prompt": "Write it.",
        "canonical_solution": solution,
        "code_prompt": start,
        "test": test,
        "entry_point": "task_func",
    }


def _squad(number: int) -> dict[str, Any]:
    asked = {"question": f"Who sings song {number}?", "answers": [{"text": ANIMALS[number]}], "is_impossible": False}
    never = {"question": "Who never sings?", "answers": [], "is_impossible": True}
    return {"context": f"The {ANIMALS[number]} sings song {number}.", "qas": [asked, never]}


def _hotpotqa(number: int) -> dict[str, Any]:
    animal, colour = ANIMALS[number], COLOURS[number]
    context = [[animal, [f"The {animal} is {colour}.", " It sleeps."]], ["park", ["The park is big."]]]
    return {"_id": f"h{number}", "question": f"Is the {animal} big?", "answer": colour, "context": context}


def _triviaqa(number: int) -> dict[str, Any]:
    answer = {"Value": ANIMALS[number], "Aliases": [ANIMALS[number].upper()], "NormalizedAliases": [ANIMALS[number]]}
    return {"QuestionId": f"t{number}", "Question": f"Who has colour {COLOURS[number]}?", "Answer": answer}


def _narrativeqa(number: int) -> dict[str, Any]:
    return {
        "document": {"id": f"d{number}", "text": f"{STORY} The end of {number}."},
        "question": {"text": f"Who is number {number}?"},
        "answers": [{"text": f"the {ANIMALS[number]}"}, {"text": f"a {COLOURS[number]} {ANIMALS[number]}"}],
    }


def _multi_lexsum(number: int) -> dict[str, Any]:
    summary = None if number == 1 else f"Lily met the {ANIMALS[number]}."
    return {"id": f"c{number}", "sources": [STORY, f"Paper {number}."], "summary/short": summary}


def _leval(number: int) -> dict[str, Any]:
    instructions = [f"what is it {part}\nA. a dog\nB. a cat\nC. a hen\nD. a cow" for part in range(2)]
    return {"instructions": instructions, "outputs": ["C", "A"], "input": f"{STORY} {number}", "evaluation": "exam"}


def _quality(number: int) -> dict[str, Any]:
    asked = {
        "question": f"Who is {number}?",
        "options": list(ANIMALS[:4]),
        "gold_label": number % 4 + 1,
        "difficult": 0,
    }
    return {"article_id": str(number), "article": f"{STORY} {number}", "questions": [asked]}


def _race(number: int) -> dict[str, Any]:
    return {
        "id": f"high{number}.txt",
        "article": f"Lily met a {ANIMALS[number]}. They played in the park.",
        "questions": ["Whom did Lily meet?", "Where did they play?"],
        "options": [
            ["a bird", f"a {ANIMALS[number]}", "nobody", "Tom"],
            ["in the park", "at home", "at school", "here"],
        ],
        "answers": ["B", "A"],
    }


ROWS: dict[str, list[Any]] = {
    "kilt_nq": [kilt(number) for number in range(8)],
    "kilt_popqa": [{**kilt(number), "s_pop": 10**number} for number in range(6)],
    "msmarco": [msmarco(number) for number in range(5)],
    "icl_banking77": labelled(12),
    "narrativeqa": [_narrativeqa(number) for number in range(4)],
    "infbench_qa": [infinitebench(number) for number in range(4)],
    "infbench_choice": [infinitebench(number) for number in range(4)],
    "infbench_sum": [infinitebench(number) | {"options": [], "input": ""} for number in range(4)],
    "multi_lexsum": [_multi_lexsum(number) for number in range(5)],
    "nq": [kilt(number) for number in range(5)],
    "nq_closed": [{"question": f"who is {name}", "answer": [name, f"the {name}"]} for name in ANIMALS],
    "toefl": [_leval(number) for number in range(3)],
    "quality": [_quality(number) for number in range(4)],
    "race": [_race(number) for number in range(3)],
    "humaneval": [humaneval(number) for number in range(3)],
    "bigcodebench": [bigcodebench(number) for number in range(2)],
}


def write_files(folder: Path) -> dict[str, Path]:
    """Write a file of each task; where each is."""
    files = {}
    for name, rows in ROWS.items():
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed = folder / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress(files["humaneval"].read_bytes()))
    wholes = {
        "squad": {"data": [{"paragraphs": [_squad(number) for number in range(8)]}]},
        "hotpotqa": [_hotpotqa(number) for number in range(5)],
        "triviaqa_closed": {"Data": [_triviaqa(number) for number in range(8)]},
    }
    for name, whole in wholes.items():
        files[name] = folder / f"{name}.json"
        files[name].write_text(json.dumps(whole))
    trec = folder / "trec.label"
    trec.write_bytes(
        "".join(f"{'DESC:manner' if n % 2 else 'NUM:date'} What is caf\xe9 {n} ?\n" for n in range(8)).encode("latin-1")
    )
    files |= {"humaneval": packed, "icl_trec_coarse": trec, "icl_trec_fine": trec}
    (folder / "race").mkdir()
    for number, row in enumerate(ROWS["race"]):
        (folder / "race" / f"{number}.txt").write_text(json.dumps(row))
    files["race"] = folder / "race"
    return files
