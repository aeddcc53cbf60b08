"""Recall samples have the published structure, for three tokenizers: read back from the prompts alone."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.data.text.tokenizer import Tokenizer, train_bpe
from megatron_ext.errors import UserError
from megatron_ext.evaluation.recall import ruler
from megatron_ext.evaluation.recall.sample import Sample
from megatron_ext.evaluation.recall.scoring import Metric
from megatron_ext.evaluation.recall.tasks import TASKS, Material, choose_tasks, make_samples, read_material

pytest.importorskip("wonderwords", reason="needs wonderwords: pip install -e '.[eval]'")

Encode = Callable[[str], list[int]]
WORD = r"[A-Za-z' .]+-[A-Za-z' .-]+"
NUMBER = r"\d{7}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
SAMPLES = 4
LENGTHS = {"bytes": 9000, "bpe": 8192, "stories": 3000}


def story(sentences: int) -> str:
    draw = random.Random(0)
    words = ["the", "window", "grows", "and", "waits", "while", "long", "documents", "lie", "in", "rows"]
    return " ".join(" ".join(draw.choices(words, k=draw.randint(4, 12))).capitalize() + "." for _ in range(sentences))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A haystack, and data sets in their published formats."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "essay.txt").write_text(story(300))
    squad = [
        {
            "title": f"t{article}",
            "paragraphs": [
                {
                    "context": f"Paragraph {part} of article {article}. " + story(article + part + 1),
                    "qas": [
                        {"question": f"What is {article}.{part}?", "id": "a", "answers": _twice(f"it {article}")},
                        {"question": "Nothing?", "id": "b", "answers": [], "is_impossible": True},
                    ],
                }
                for part in range(3)
            ],
        }
        for article in range(12)
    ]
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": squad}))
    hotpot = [
        {
            "question": f"Which one is {number}?",
            "answer": f"answer {number}",
            "context": [[f"title {number + k}", [f"Sentence {number + k}.", " More."]] for k in range(10)],
            "supporting_facts": [],
        }
        for number in range(SAMPLES + 2)
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(hotpot))
    searched = [
        {
            "question": f"who was {number}",
            "answers": [f"person {number}", "nobody"],
            "ctxs": [{"title": f"T{k}", "text": f"text {k}", "isgold": k == number} for k in range(30)],
        }
        for number in range(SAMPLES)
    ]
    (folder / "mdqa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in searched))
    return {name: next(folder.glob(f"{name}.*")) for name in ("essay", "squad", "hotpotqa", "mdqa")}


def _twice(text: str) -> list[dict[str, Any]]:
    return [{"text": text, "answer_start": 0}] * 2


@pytest.fixture(scope="module")
def material(files: dict[str, Path]) -> Material:
    return read_material([str(files["essay"])], "text", files["squad"], files["hotpotqa"], files["mdqa"])


@pytest.fixture(scope="module", params=LENGTHS)
def encode(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Encode, int]:
    if request.param == "bytes":
        tokenizer = Tokenizer("bytes")
    elif request.param == "bpe":
        tokenizer = train_bpe([story(100)], 400, tmp_path_factory.mktemp("bpe"))
    else:
        tokenizer = Tokenizer(request.getfixturevalue("stories_model"))
    return tokenizer.encode, LENGTHS[request.param]


@pytest.fixture(scope="module")
def made(encode: tuple[Encode, int], material: Material) -> dict[str, list[Sample]]:
    count, length = encode
    samples = make_samples(TASKS, [length], count, material, SAMPLES, seed=1)[length]
    return {task: [sample for sample in samples if sample.task == task] for task in TASKS}


def test_prompts_and_answers_fill_the_length(encode: tuple[Encode, int], made: dict[str, list[Sample]]) -> None:
    """To the last piece of haystack, which is a word, a sentence, a pair, a document, a word six times."""
    count, length = encode
    for task, samples in made.items():
        assert len(samples) == SAMPLES
        assert len({sample.prompt for sample in samples}) == SAMPLES
        for sample in samples:
            total = len(count(sample.prompt)) + sample.new_tokens
            assert total <= length, task
            assert total > 0.9 * length or task in ("mdqa", "qa_1", "qa_2"), (task, total)


@pytest.mark.parametrize(
    ("task", "haystack", "key", "value", "keys", "values", "asked"),
    [
        ("niah_single_1", "noise", WORD, NUMBER, 1, 1, 1),
        ("niah_single_2", "essay", WORD, NUMBER, 1, 1, 1),
        ("niah_single_3", "essay", WORD, UUID, 1, 1, 1),
        ("niah_multikey_1", "essay", WORD, NUMBER, 4, 1, 1),
        ("niah_multikey_2", "needle", WORD, NUMBER, None, 1, 1),
        ("niah_multikey_3", "needle", UUID, UUID, None, 1, 1),
        ("niah_multivalue", "essay", WORD, NUMBER, 1, 4, 1),
        ("niah_multiquery", "essay", WORD, NUMBER, 4, 1, 4),
    ],
)
def test_needles(
    made: dict[str, list[Sample]],
    files: dict[str, Path],
    task: str,
    haystack: str,
    key: str,
    value: str,
    keys: int | None,
    values: int,
    asked: int,
) -> None:
    depths = []
    for sample in made[task]:
        head, context, question = re.fullmatch(r"(.*?)\n(.*)\n(.*)", sample.prompt, re.DOTALL).groups()
        plural = asked * values > 1
        kind = ("numbers" if value == NUMBER else "uuids")[: None if plural else -1]
        several = ("Some", "are") if plural else ("A", "is")
        assert head.startswith(f"{several[0]} special magic {kind} {several[1]} hidden within the following text.")
        found = re.findall(rf"One of the special magic \w+ for ({key}) is: ({value})\.", context)
        hidden: dict[str, set[str]] = {}
        for name, held in found:
            hidden.setdefault(name, set()).add(held)
        assert keys is None or len(hidden) == keys
        assert all(len(held) == values for held in hidden.values())
        assert re.search(rf" special magic {kind} for (.*) mentioned in the provided text (is|are)$", question)
        queried = re.search(r"magic \w+ for (.*?) mentioned", question).group(1).replace(", and ", ", ").split(", ")
        assert len(queried) == asked
        assert set(sample.answers) == {held for name in queried for held in hidden[name]}
        assert len(sample.answers) == asked * values
        assert sample.metric is Metric.ALL
        assert sample.new_tokens == 128
        if haystack == "noise":
            lines = context.split("\n")
            assert set(Counter(lines)) - {ruler.NOISE} == {line for line in lines if "magic" in line}
            assert Counter(lines)[ruler.NOISE] == len(lines) - 1
        elif haystack == "needle":
            assert len(found) == len(context.split("\n")) > 20
        else:
            needles = rf" ?One of the special magic \w+ for {key} is: {value}\."
            pieces = re.split(needles, context)
            essay = " ".join(files["essay"].read_text().split())
            rest = " ".join(piece.strip() for piece in pieces if piece.strip())
            assert (essay + " ").startswith(rest[: len(essay)])  # nothing else is changed
            for place, piece in enumerate(pieces[:-1]):  # between sentences, or after the last, which is cut off
                assert piece.rstrip()[-1:] in ("", ".") or not "".join(pieces[place + 1 :]).strip()
            sentences = rest.count(".") + (not rest.endswith("."))
            before = [
                sum(piece.count(".") for piece in pieces[: n + 1]) if "".join(pieces[n + 1 :]).strip() else sentences
                for n in range(len(pieces) - 1)
            ]
            assert set(before) <= {sentences * depth // 100 for depth in ruler.DEPTHS}
            depths += [place / sentences for place in before]
    if haystack == "essay":
        assert max(depths) - min(depths) > 0.2  # at depths of their own


def test_variables(made: dict[str, list[Sample]]) -> None:
    for sample in made["vt"]:
        example, text = sample.prompt.split("\n\nMemorize and track", 1)
        for part, letters, said in ((example, 3, None), (text, 5, sample.answers)):
            (value,) = re.findall(r"variables that are assigned the value (\d{5}) in the text above", part)
            steps = dict(re.findall(rf"^VAR ([A-Z]{{{letters}}}) = (?:VAR )?(\w+)", part, re.MULTILINE))
            reached, last = [], value
            while follower := next((name for name, of in steps.items() if of == last), None):
                reached.append(follower)
                last = follower
            assert len(reached) == len(steps) == 5
            assert "text above, 5 variables are assigned the value " + value + ", they are: " in part
            assert list(said or part.rsplit("they are: ", 1)[1].split()) == reached
            chain = [line for line in part.split("\n") if line.startswith("VAR")]
            assert [line.split(" = ")[0].removeprefix("VAR ") for line in chain] == reached  # in order
        assert sample.prompt.endswith("they are: ")
        assert sample.new_tokens == 30


def test_common_words(encode: tuple[Encode, int], made: dict[str, list[Sample]]) -> None:
    _, length = encode
    often, seldom = (6, 1) if length < 4096 else (30, 3)
    for sample in made["cwe"]:
        parts = re.findall(r"ones that appear most often\.\n(.*)\nQuestion: What are the 10 most common", sample.prompt)
        solved = re.search(r"often in the list are: (.*)\nBelow", sample.prompt).group(1)
        for context, answers, counts in (
            (parts[0], re.findall(r"\d+\. (.*?)(?= \d+\. |$)", solved), (3, 1) if length < 4096 else (10, 3)),
            (parts[1], sample.answers, (often, seldom)),
        ):
            numbered = re.findall(r"(\d+)\. (.*?)(?= \d+\. |$)", context)
            assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
            counted = Counter(word for _, word in numbered)
            common = {word for word, times in counted.items() if times == counts[0]}
            assert common == set(answers)
            assert len(answers) == 10
            assert {times for word, times in counted.items() if word not in common} == {counts[1]}
        assert sample.new_tokens == 120


def test_coded_words(made: dict[str, list[Sample]]) -> None:
    for sample in made["fwe"]:
        context = re.search(r"frequently appeared coded words\. (.*)\nQuestion", sample.prompt).group(1)
        counted = Counter(context.split()).most_common()
        assert counted[0][0] == "..."
        assert [word for word, _ in counted[1:4]] == list(sample.answers)
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counted[1:])
        for rank, (_, times) in enumerate(counted[:4], start=1):
            assert times == pytest.approx(counted[0][1] / rank**2, abs=1)
        assert sample.new_tokens == 50


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_questions(made: dict[str, list[Sample]], files: dict[str, Path], task: str) -> None:
    data = json.loads(files[ruler.QA[task]].read_text())
    for number, sample in enumerate(made[task]):
        shown = re.search(r"given documents\.\n\n(.*)\n\nAnswer the question", sample.prompt, re.DOTALL).group(1)
        places = re.split(r"(?:^|\n\n)Document (\d+):\n", shown)[1:]
        documents = places[1::2]
        assert list(map(int, places[0::2])) == list(range(1, len(documents) + 1))
        if task == "qa_1":
            article = data["data"][number // 3]
            paragraph = article["paragraphs"][number % 3]
            assert sample.answers == (paragraph["qas"][0]["answers"][0]["text"],)
            assert sample.prompt.endswith(f"Question: {paragraph['qas'][0]['question']} Answer:")
            assert paragraph["context"] in documents
            near = {other["context"] for other in article["paragraphs"]}
            assert near <= set(documents) or set(documents) <= near
        else:
            item = data[number]
            assert sample.answers == (item["answer"],)
            assert {f"{title}\n{''.join(text)}" for title, text in item["context"]} <= set(documents)
        assert (sample.metric, sample.new_tokens) == (Metric.PART, 32)


def test_pairs(made: dict[str, list[Sample]]) -> None:
    for number, sample in enumerate(made["json_kv"]):
        written = re.search(r"JSON data:\n(\{.*\})\n\nExtract", sample.prompt, re.DOTALL).group(1)
        pairs = json.loads(written)
        *solved, asked = re.findall(rf"Key: ({UUID})\nCorresponding value:(?: ({UUID}))?", sample.prompt)
        assert len(solved) == 2
        assert all(pairs[key] == value for key, value in solved)
        assert sample.answers == (pairs[asked[0]],)
        assert asked[0] not in [key for key, _ in solved]
        assert list(pairs).index(asked[0]) == round(number % 6 / 5 * (len(pairs) - 1))
        assert sample.metric is Metric.SUBSPAN


def test_search_results(made: dict[str, list[Sample]]) -> None:
    for number, sample in enumerate(made["mdqa"]):
        assert sample.prompt.count("Document [") == 30
        assert f"\nDocument [{number + 1}](Title: T{number}) text {number}\n" in sample.prompt
        assert sample.prompt.endswith(f"\n\nQuestion: who was {number}\nAnswer:")
        assert sample.answers == (f"person {number}", "nobody")


def test_samples_depend_on_seed_and_number_alone(encode: tuple[Encode, int], material: Material) -> None:
    count, length = encode
    tasks = ["niah_multiquery", "vt", "json_kv"]
    first, again, fewer, other = (
        make_samples(tasks, [length], count, material, number, seed)[length]
        for number, seed in ((3, 1), (3, 1), (2, 1), (3, 2))
    )
    assert first == again
    assert [sample for place, sample in enumerate(first) if place % 3 < 2] == fewer
    assert not {sample.prompt for sample in first} & {sample.prompt for sample in other}


def test_what_does_not_fit_is_refused(encode: tuple[Encode, int], material: Material) -> None:
    count, _ = encode
    for task in (task for task in TASKS if task != "mdqa"):
        with pytest.raises(UserError, match=f"lengths: got 150, .*{task}"):
            make_samples([task], [150], count, material, 1, 1)
    with pytest.raises(UserError, match="lengths: got 150, question 1 of mdqa"):
        make_samples(["mdqa"], [150], count, material, 1, 1)
    with pytest.raises(UserError, match="samples: got 40, qa_1 has 36 questions"):
        make_samples(["qa_1"], [4000], count, material, 40, 1)


def test_tasks_without_their_files(tmp_path: Path, files: dict[str, Path]) -> None:
    nothing = read_material(None, "text", None, None, None)
    chosen = choose_tasks(None, nothing)
    assert chosen == ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe", "json_kv"]
    for task, flag in (("niah_single_2", "--haystack"), ("qa_2", "--hotpotqa"), ("mdqa", "--mdqa")):
        with pytest.raises(UserError, match=f"tasks: got {task}, which needs a file; give {flag}"):
            choose_tasks([task], nothing)
    with pytest.raises(UserError, match="tasks: got niah, needs some of"):
        choose_tasks(["niah"], nothing)
    for name, read in (("hotpotqa", ruler.read_squad), ("squad", ruler.read_hotpotqa)):
        with pytest.raises(UserError, match="is not in the published format"):
            read(files[name])


def test_an_essay_begins_anew_where_it_ends() -> None:
    essay = ruler.Essay("One two.  Three\nfour five! Six")
    assert essay.sentences(5) == ["One two.", "Three four five!"]
    assert essay.sentences(9) == ["One two.", "Three four five!", "Six One two.", "Three"]
    with pytest.raises(UserError, match="haystack: has no word"):
        ruler.Essay(" \n")
