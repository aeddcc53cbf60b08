"""MDQA for lm-eval: questions on 20 or 30 documents of which one, at a known position, has the answer.

The data are the `qa_data` of github.com/nelson-liu/lost-in-the-middle, in the folder $MDQA_DATA or data/mdqa:

20_total_documents/nq-open-20_total_documents_gold_at_{0,4,9,14,19}.jsonl.gz
30_total_documents/nq-open-30_total_documents_gold_at_{0,4,9,14,19,24,29}.jsonl.gz
"""

import gzip
import json
import os
import re
import string
from pathlib import Path
from typing import Any

import datasets


def load(documents: int, **unused: object) -> dict[str, datasets.Dataset]:
    """Read the files of a number of documents; each question comes once for each position, then the next question.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a line has another number of documents, or its gold document elsewhere, or files differ in length.
    """
    folder = Path(os.environ.get("MDQA_DATA", "data/mdqa")) / f"{documents}_total_documents"
    by_position = [
        _read(folder / f"nq-open-{documents}_total_documents_gold_at_{gold}.jsonl.gz", documents, gold)
        for gold in (0, *range(4, documents, 5))
    ]
    lines = [line for of_question in zip(*by_position, strict=True) for line in of_question]
    return {"test": datasets.Dataset.from_list(lines)}


def _read(path: Path, documents: int, gold: int) -> list[dict[str, Any]]:
    if not path.exists():
        missing = f"{path.parent.name}/{path.name} is missing"
        raise FileNotFoundError(f"MDQA_DATA: {missing} in {path.parent.parent}, needs qa_data of lost-in-the-middle")
    lines = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            if [text["isgold"] for text in line["ctxs"]] != [place == gold for place in range(documents)]:
                raise ValueError(f"{path.name}: needs lines of {documents} documents with isgold at {gold} only")
            texts = [{"title": text["title"], "text": text["text"]} for text in line["ctxs"]]
            lines.append({"question": line["question"], "answers": line["answers"], "texts": texts, "gold": gold})
    return lines


def score(line: dict[str, Any], texts: list[str]) -> dict[str, float]:
    """Score the first line of a text: 1 if it contains one of the answers, in all and for the gold position."""
    found = _normalized(texts[0].split("\n")[0])
    right = float(any(_normalized(answer) in found for answer in line["answers"]))
    return {"acc": right, f"gold_at_{line['gold']}": right}


def _normalized(text: str) -> str:
    """Lower the case and remove punctuation, articles and repeated spaces."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:the|an|a)\b", " ", plain).split())
