"""Files in their published formats, the prompts that are made of them, and what is left out where they are too long."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from evaluation.applied.published import STORY, kilt, labelled, write_files
from hypothesis import given as drawn
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.evaluation.applied import prompts
from megatron_ext.evaluation.applied.prompts import OMITTED, Draft, fit, in_order, slices, spread
from megatron_ext.evaluation.applied.questions import Document, Question, read_questions
from megatron_ext.evaluation.applied.tasks import TASKS, Family, Sample, make_samples, read_given, rounds


def words(text: str) -> int:
    return len(text.split())


def joined(text: str) -> int:
    """Count as a tokenizer that puts a token before each text, and joins words: pieces alone count too much."""
    return 1 + len(text) // 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_files(tmp_path_factory.mktemp("published"))


def samples_of(
    files: dict[str, Path], name: str, length: int = 5000, number: int = 100, shots: int | None = None
) -> list[Sample]:
    pytest.importorskip("rouge_score", reason="needs rouge-score: pip install -e '.[eval]'")
    given = read_given({name: files[name]}, {name: files[name]})
    return make_samples(given, [length], words, number, shots, seed=1)[length]


def test_every_task_is_asked(files: dict[str, Path]) -> None:
    assert set(files) <= set(TASKS)
    assert {TASKS[name].family for name in files} == set(Family)
    assert {TASKS[name].format for name in files} == {task.format for task in TASKS.values()}
    for name in files:
        for sample in samples_of(files, name):
            assert sample.answers or sample.options or sample.gains or sample.program
            assert sample.kept == sample.pieces or TASKS[name].family is Family.LABELS
            assert sample.program or sample.prompt.endswith(TASKS[name].heading)


def test_retrieved_documents_are_asked_about_as_helmet_does(files: dict[str, Path]) -> None:
    (sample,) = [sample for sample in samples_of(files, "kilt_nq", shots=0) if "red" in sample.answers]
    documents = [
        f"Document (Title: dog {n}): {'The dog is red.' if n == 5 else f'The dog sleeps in house {n}.'}"
        for n in range(8)
    ]
    assert sample.prompt == (
        "Use the given documents to write a concise and short answer to the question. Write your answer in the "
        "following format:\nAnswer: [answer]\n\n"
        + "\n\n".join(documents)
        + "\n\nQuestion: what colour is the dog\nAnswer:"
    )
    assert sample.answers == ("red", "red all over")


@pytest.mark.parametrize("task", ["kilt_nq", "msmarco"])
def test_a_question_is_asked_in_all_of_its_rows_as_helmet_does(
    files: dict[str, Path], tmp_path: Path, task: str
) -> None:
    """Samples count questions; the right document is at another depth in each row, the solved examples are the same."""
    rows = [json.loads(line) for line in files[task].read_text().splitlines()]
    turned = [{**row, "ctxs": row["ctxs"][depth:] + row["ctxs"][:depth]} for depth in (0, 2, 4) for row in rows]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in turned))
    samples = samples_of({task: file}, task, number=3)
    by_question = {sample.question: [one for one in samples if one.question == sample.question] for sample in samples}
    assert [len(own) for own in by_question.values()] == [3, 3, 3]
    for own in by_question.values():
        assert len({one.prompt for one in own}) == 3
        asked = {
            tuple(line for line in one.prompt.splitlines() if line.startswith(("Question", "Query"))) for one in own
        }
        assert [len(questions) for questions in asked] == [3]  # two solved ones
    assert len(samples_of({task: file}, task)) == len(turned)


def test_a_solved_question_shows_its_answer_and_is_another_one(files: dict[str, Path]) -> None:
    for sample in samples_of(files, "kilt_nq"):
        *solved, asked = sample.prompt.split("Question: ")[1:]
        assert len(solved) == 2
        assert len({asked.split("\n")[0], *(text.split("\n")[0] for text in solved)}) == 3
        for text in solved:
            animal, colour = text.split("\n")[0].split()[-1], text.split("Answer: ")[1].split("\n")[0]
            assert f"The {animal} is {colour}." in sample.prompt
            assert sample.prompt.count(f"(Title: {animal} ") == prompts.EXAMPLE_DOCUMENTS


def test_popular_pages_are_not_asked_about(files: dict[str, Path]) -> None:
    assert len(read_questions("kilt_popqa", "popqa", files["kilt_popqa"])) == 3  # 1, 10 and 100 views, not 1,000


def test_a_ranking_names_the_gains_of_what_is_shown(files: dict[str, Path]) -> None:
    sample = samples_of(files, "msmarco", shots=1)[0]
    assert sample.prompt.count("Ranking: ") == 2  # the instruction's and the solved one's
    solved = next(line for line in sample.prompt.split("Query: ")[1].splitlines() if line.startswith("Ranking: "))
    ids = solved.removeprefix("Ranking: ").split(" > ")
    assert [number[-1] for number in ids] == ["2", "4", "0", "1", "3", "5"]
    assert (
        dict(sample.gains) == {f"{n or ''}": gain for n, gain in enumerate([0, 0, 2, 0, 1, 0])} | {"0": 0}
        or sample.gains
    )
    for name, _ in sample.gains:
        assert f"[ID: {name}] Document: " in sample.prompt.split("Ranking: ")[-1]
    few = samples_of(files, "msmarco", length=words(sample.prompt) + 200 - 7, shots=1)[0]
    assert len(few.gains) == few.kept == 5
    assert {gain for _, gain in few.gains} == {0, 1, 2}  # what is relevant stays


def test_labels_are_numbered_anew_for_each_question_and_balanced(files: dict[str, Path]) -> None:
    samples = samples_of(files, "icl_banking77", length=150)
    mappings = set()
    for sample in samples:
        *shown, asked = sample.prompt.split("\n\n")[1:]
        assert asked.endswith("\nlabel:")
        text = asked.removesuffix("\nlabel:")
        assert all(not piece.startswith(f"{text}\n") for piece in shown)  # it is no example of itself
        numbers = {int(piece.split()[1]) % 3: piece.rsplit(" ", 1)[1] for piece in shown}
        assert all(piece.rsplit(" ", 1)[1] == numbers[int(piece.split()[1]) % 3] for piece in shown)
        assert sample.answers == (numbers[int(text.split()[1]) % 3],)
        counts = [sum(piece.endswith(f" {number}") for piece in shown) for number in range(3)]
        assert max(counts) - min(counts) <= 1
        assert len(shown) == sample.kept
        mappings.add(tuple(sorted(numbers.items())))
    assert len(mappings) > 1


def test_trec_has_coarse_and_fine_labels(files: dict[str, Path]) -> None:
    for format, wanted in (("trec_coarse", {"DESC", "NUM"}), ("trec_fine", {"DESC:manner", "NUM:date"})):
        questions = read_questions("icl", format, files["icl_trec_fine"])
        assert {question.answers[0] for question in questions} == wanted
        assert questions[0].text == "What is café 0 ?"


def test_drawn_labelled_questions_are_balanced(tmp_path: Path) -> None:
    rows = labelled(90) + [{"text": f"other {number}", "label": "l0"} for number in range(200)]
    file = tmp_path / "nlu.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = read_given({"icl_nlu": file}, {"icl_nlu": file})
    samples = make_samples(given, [200], words, 30, None, seed=1)[200]
    asked = [sample.prompt.rsplit("\n\n", 1)[1].removesuffix("\nlabel:") for sample in samples]
    label = {row["text"]: row["label"] for row in rows}
    assert sorted(label[text] for text in asked) == ["l0"] * 10 + ["l1"] * 10 + ["l2"] * 10
    assert len(set(asked)) == 30


def test_rounds_have_every_label_once() -> None:
    sizes = {"a": 1, "b": 2, "c": 5}
    examples = [Question(f"{label}{number}", (label,)) for label, size in sizes.items() for number in range(size)]
    again = rounds(examples, random.Random(3))
    for _ in range(6):
        assert {next(again).answers[0] for _ in range(3)} == {"a", "b", "c"}
    once = list(rounds(examples, random.Random(3), again=False))
    assert sorted(question.text for question in once) == sorted(question.text for question in examples)


@pytest.mark.parametrize(
    ("name", "shots"), [("squad", 4), ("hotpotqa", 2), ("nq", 2), ("triviaqa_closed", 5), ("nq_closed", 5)]
)
def test_the_papers_examples_precede_a_question(files: dict[str, Path], name: str, shots: int) -> None:
    for sample in samples_of(files, name):
        assert sample.prompt.count("\nAnswer:") == shots + 1
        assert sample.kept == sample.pieces == shots
        assert sample.prompt.count("Context: ") == {"squad": 5, "hotpotqa": 6, "nq": 3}.get(name, 0)
    few = samples_of(files, name, length=words(sample.prompt) + TASKS[name].new_tokens - 1, number=1)
    assert few[0].prompt.count("\nAnswer:") < shots + 1  # whole examples go, the question stays
    assert few[0].prompt.endswith("\nAnswer:")


def test_options_are_letters_or_their_own_text(files: dict[str, Path]) -> None:
    race = samples_of(files, "race")
    assert race[0].options == (" a bird", " a dog", " nobody", " Tom")
    assert [sample.gold for sample in race] == [1, 0] * 3
    assert race[0].prompt == (
        "Article: Lily met a dog. They played in the park.\n\nQuestion: Whom did Lily meet?\nAnswer:"
    )
    quality = samples_of(files, "quality")
    assert [sample.gold for sample in quality] == [0, 1, 2, 3]
    assert "Question: Who is 2?\nA. dog\nB. cat\nC. hen\nD. cow\nAnswer:" in quality[2].prompt
    assert [sample.gold for sample in samples_of(files, "toefl")] == [2, 0] * 3
    for sample in (*quality, *samples_of(files, "infbench_choice")):
        assert sample.options == (" A", " B", " C", " D")


@pytest.mark.parametrize("name", ["narrativeqa", "infbench_qa", "infbench_sum", "multi_lexsum", "quality"])
def test_a_long_text_loses_its_end_alone(files: dict[str, Path], name: str) -> None:
    whole = samples_of(files, name, number=1)[0]
    room = words(whole.prompt) + max(TASKS[name].new_tokens, 1)
    assert OMITTED not in whole.prompt
    assert STORY in whole.prompt
    cut = samples_of(files, name, length=room - 40, number=1)[0]
    assert words(cut.prompt) + max(cut.new_tokens, 1) <= room - 40
    before, after = cut.prompt.split(OMITTED)
    assert whole.prompt.startswith(before)
    assert whole.prompt.endswith(after)
    assert cut.prompt.endswith(TASKS[name].heading)


def test_what_does_not_fit_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="lengths: got 60, a question of kilt_nq takes"):
        samples_of(files, "kilt_nq", length=60)


def test_documents_that_go_leave_the_answer_and_its_depth(files: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "nq.jsonl"
    file.write_text(
        json.dumps(
            kilt(0, 40) | {"ctxs": [{**part, "has_answer": n == 30} for n, part in enumerate(kilt(0, 40)["ctxs"])]}
        )
    )
    given = read_given({"kilt_nq": file}, {})
    (sample,) = make_samples(given, [220], words, 1, 0, seed=1)[220]
    shown = [
        int(line.split("dog ")[1].split(")")[0]) for line in sample.prompt.splitlines() if line.startswith("Document (")
    ]
    assert len(shown) == sample.kept < 40
    assert shown == sorted(shown)
    assert abs(shown.index(30) / len(shown) - 30 / 40) < 0.1
    assert words(sample.prompt) + 20 <= 220


@drawn(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_documents_rank_gains_first_and_others_evenly(gains: list[int]) -> None:
    ranks = spread([Document(str(number), gain=gain) for number, gain in enumerate(gains)])
    assert sorted(ranks) == list(range(len(gains)))
    relevant = sum(gain > 0 for gain in gains)
    assert all((rank < relevant) == (gain > 0) for rank, gain in zip(ranks, gains, strict=True))
    rest = [rank - relevant for rank, gain in zip(ranks, gains, strict=True) if gain == 0]
    for kept in (1 << power for power in range(len(rest).bit_length())):
        places = [place for place, rank in enumerate(rest) if rank < kept]
        gaps = [b - a for a, b in zip([*places, len(rest)], [*places[1:], len(rest)], strict=False)][: len(places)]
        assert max(gaps) <= 2 * min(gaps)


@drawn(
    st.lists(st.text("ab \n", min_size=1, max_size=30), max_size=30),
    st.integers(0, 120),
    st.sampled_from([words, joined]),
    st.randoms(use_true_random=False),
)
def test_as_many_pieces_are_kept_as_fit(
    pieces: list[str], room: int, count: prompts.Count, draw: random.Random
) -> None:
    draft = Draft("head ", " tail", tuple(pieces), tuple(draw.sample(range(len(pieces)), len(pieces))), omitted=" ...")
    try:
        prompt, kept = fit(draft, room, count)
    except UserError:
        assert count(draft.prompt(0)) > room
        return
    assert prompt == draft.prompt(kept)
    assert count(prompt) <= room
    assert kept == len(pieces) or count(draft.prompt(kept + 1)) > room
    assert prompt.startswith("head ")
    assert prompt.endswith(" tail")


def test_a_whole_text_is_shown_where_its_note_would_not_fit() -> None:
    draft = in_order("a ", ["b ", "c ", "d "], "e", omitted="and so on, as there is no room ")
    assert fit(draft, 5, words) == ("a b c d e", 3)
    with pytest.raises(UserError, match="takes 10 tokens at least, and there is room for 4"):
        fit(draft, 4, words)


@drawn(st.text("ab \n\u00e9", max_size=2000))
def test_slices_join_to_the_text(text: str) -> None:
    assert "".join(slices(text)) == text


def test_a_draft_in_order_keeps_its_first_pieces() -> None:
    assert in_order("<", ["a", "b", "c"], ">", omitted="~").prompt(2) == "<ab~>"
    assert in_order("<", ["a", "b", "c"], ">", omitted="~").prompt(3) == "<abc>"


@pytest.mark.parametrize(
    ("data", "examples", "said"),
    [
        ({"squid": "squad"}, {}, "data: got squid, needs one of kilt_nq, "),
        ({"squad": "squad"}, {"nq": "nq"}, "examples: got some of nq, which no --data asks"),
        ({"icl_nlu": "icl_banking77"}, {}, "examples: icl_nlu needs labelled texts to show"),
        ({"squad": "nq"}, {}, "is not in the published format of squad"),
        ({"nq": "squad"}, {}, r"format of nq \(object 1: KeyError"),
        ({"quality": "nq"}, {}, r"format of quality \(object 1: KeyError\('questions'\)"),
        (
            {"icl_banking77": "icl_trec_fine"},
            {"icl_banking77": "icl_banking77"},
            "asks for the label NUM:date, which none",
        ),
        ({"race": "nowhere"}, {}, r"race needs .*nowhere, which cannot be read \(No such file"),
        ({"humaneval": "empty"}, {}, "empty has no question for humaneval"),
        ({"toefl": "broken"}, {}, r"format of toefl \(line 1 is no JSON\)"),
    ],
)
def test_files_of_another_kind_are_refused(
    files: dict[str, Path], tmp_path: Path, data: dict[str, str], examples: dict[str, str], said: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "broken").write_text("{")
    with pytest.raises(UserError, match=said):
        read_given(*({name: files.get(file, tmp_path / file) for name, file in of.items()} for of in (data, examples)))


@pytest.mark.parametrize(
    ("task", "file", "raw", "said"),
    [
        (
            "humaneval",
            "a.jsonl.gz",
            gzip.compress(b"{}", mtime=0)[:10] + b"\x07" * 40,
            r"format of humaneval \(error\('Error -3",
        ),
        ("humaneval", "a.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], r"format of humaneval \(EOFError"),
        ("humaneval", "a.jsonl.gz", b"{}", r"cannot be read \(Not a gzipped file \(b'\{\}'\)\); check the path"),
        ("humaneval", "a.jsonl", b"[" * 100_000, r"format of humaneval \(line 1 is JSON nested too deep\)"),
        ("squad", "a.json", b"[" * 100_000, r"format of squad \(RecursionError"),
        ("squad", "a.json", b'{"data": [{"paragraphs": [{"context": "\\ud800"}]}]}', r"squad \(UnicodeEncodeError"),
        ("msmarco", "a.jsonl", b'{"ctxs": [{"id": 1, "text": "a", "label": Infinity}]}', r"object 1: OverflowError"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, task: str, file: str, raw: bytes, said: str) -> None:
    (tmp_path / file).write_bytes(raw)
    with pytest.raises(UserError, match=said):
        read_given({task: tmp_path / file}, {})


def test_a_long_field_of_a_table_is_read(tmp_path: Path) -> None:
    """Python's reader stops at 131,072 characters."""
    file = tmp_path / "a.csv"
    file.write_text(f"text,label\n{'long ' * 40_000},1\n")
    (question,) = read_questions("icl_agnews", "labelled", file)
    assert len(question.text) == 200_000


def test_documents_that_are_left_out_unseen_are_refused(tmp_path: Path) -> None:
    """Without has_answer the right one could be among those that a short length has no room for."""

    def write(name: str, documents: int) -> Path:
        rows = [kilt(number, documents) for number in range(5)]
        bare = [
            row | {"ctxs": [{k: v for k, v in p.items() if k != "has_answer"} for p in row["ctxs"]]} for row in rows
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in bare))
        return tmp_path / name

    marked = tmp_path / "marked"
    marked.write_text("".join(json.dumps(kilt(number)) + "\n" for number in range(5)))
    with pytest.raises(UserError, match=r"data: kilt_nq shows some .*; add has_answer to the ctxs of '"):
        read_given({"kilt_nq": write("eight", 8)}, {})
    with pytest.raises(UserError, match=r"examples: kilt_nq shows some "):
        read_given({"kilt_nq": marked}, {"kilt_nq": tmp_path / "eight"})
    read_given({"kilt_nq": marked}, {"kilt_nq": write("three", 3)})  # all of them are shown
    read_given({"nq": tmp_path / "eight"}, {})  # the first alone is


def test_too_few_examples_are_refused(files: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="examples: kilt_popqa shows 4, and there are 2 beside the question"):
        samples_of(files, "kilt_popqa", shots=4)


def test_the_same_seed_asks_the_same(files: dict[str, Path]) -> None:
    assert samples_of(files, "squad", number=3) == samples_of(files, "squad", number=3)
    given = read_given({"squad": files["squad"]}, {})
    asked = [make_samples(given, [5000], words, 3, None, seed)[5000] for seed in (1, 2)]
    assert asked[0] != asked[1]
