"""Figures against values worked out by hand, against libraries, and against plain counting."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from megatron_ext.evaluation.applied.results import Item, by_length, cut, program_scores, written_scores
from megatron_ext.evaluation.applied.scoring import (
    Metric,
    answer_scores,
    choice_scores,
    headed,
    ndcg,
    parse_ranking,
    pass_at_k,
    word_f1,
)
from megatron_ext.evaluation.applied.tasks import TASKS, Sample
from megatron_ext.evaluation.recall.results import differences


def test_f1_is_of_normalised_words() -> None:
    # {cat, sat} of 3 said and 2 right words: precision 2/3, recall 1
    assert word_f1("The cat sat down.", "A cat sat") == pytest.approx(0.8)
    assert word_f1("cat cat", "the cat") == pytest.approx(2 / 3)  # a word is shared as often as both have it
    assert word_f1("dog", "cat") == 0


@pytest.mark.parametrize(("said", "right", "wanted"), [("yes", "yes", 1), ("yes it is", "yes", 0), ("no", "no way", 0)])
def test_yes_and_no_match_themselves_alone(said: str, right: str, wanted: float) -> None:
    assert word_f1(said, right) == wanted


def test_the_best_answer_and_the_better_of_text_and_line_count() -> None:
    scores = answer_scores(
        "I think so.\nanswer: The Eiffel Tower!\nBye", ["Paris", "Eiffel tower"], "Answer:", rouge=False
    )
    assert scores == {"exact_match": 1.0, "substring_match": 1.0, "f1": 1.0}
    scores = answer_scores("It is in old Paris", ["Paris"], "Answer:", rouge=False)
    assert scores == {
        "exact_match": 0.0,
        "substring_match": 1.0,
        "f1": pytest.approx(1 / 3),
    }  # 1 of 5 said, 1 of 1 right


def test_a_headless_answer_is_its_first_line() -> None:
    assert headed(" 17\nand more", "label:") == "17"
    assert headed("LABEL: 3\nlabel: 4", "label:") == "3"
    assert headed("", "label:") == ""


def test_rouge_is_the_librarys_and_that_worked_out_by_hand() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="needs rouge-score: pip install -e '.[eval]'")
    text, answer = "the cats were found under a bed", "a cat was found under the bed"
    scores = answer_scores(text, [answer], "Summary:", rouge=True)
    # stemmed: the cat were found under a bed | a cat was found under the bed: 6 of 7 words shared, 1 of 6 pairs
    # (found under); the longest common subsequence has cat found under bed
    assert scores["rouge_1"] == pytest.approx(6 / 7)
    assert scores["rouge_2"] == pytest.approx(1 / 6)
    assert scores["rouge_l"] == pytest.approx(4 / 7)
    own = scorer.RougeScorer(["rougeLsum"], use_stemmer=True)
    text, answer = "one cat\ntwo dogs", "two dogs\none cat"
    scores = answer_scores(text, [answer], "Summary:", rouge=True)
    assert scores["rouge_lsum"] == own.score(answer, text)["rougeLsum"].fmeasure == 1
    assert scores["rouge_l"] == pytest.approx(2 / 3)  # the first line alone: 2 of 2 said, 2 of 4 right words


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3 > 1 > 2", ["3", "1", "2"]),
        ("Here: [ID: 30] > ID7 > [12]\nBecause 4 > 3", ["30", "7", "12"]),
        ("5 > 5 > 6", ["5", "6"]),
        ("41", ["41"]),
        ("none", []),
    ],
)
def test_rankings_are_found(text: str, wanted: list[str]) -> None:
    assert parse_ranking(text) == wanted


def test_ndcg_is_trec_evals() -> None:
    gains = {"a": 3, "b": 2, "c": 0, "d": 1}
    ideal = 3 + 2 / math.log2(3) + 1 / 2
    assert ndcg(["a", "b", "d", "c"], gains) == 1
    assert ndcg(["c", "a", "x", "b"], gains) == pytest.approx((3 / math.log2(3) + 2 / math.log2(5)) / ideal)
    assert ndcg([], gains) == 0
    assert ndcg(["c", "a"], gains, cutoff=1) == 0
    assert ndcg(["a"], {"a": 0}) == 0


def test_ndcg_counts_ten_ranks() -> None:
    gains = {str(number): int(number == 10) for number in range(20)}
    order = [str(number) for number in range(20)]
    assert ndcg(order, gains) == 0
    assert ndcg(order[1:], gains) == pytest.approx(1 / math.log2(11))


def test_choices_are_scored_by_sum_and_by_token() -> None:
    """The second option is longer: less likely, but less surprising per token."""
    assert choice_scores([-3.0, -4.0], [1, 2], gold=0) == {"accuracy": 1, "accuracy_per_token": 0}
    assert choice_scores([-3.0, -4.0], [1, 2], gold=1) == {"accuracy": 0, "accuracy_per_token": 1}


def test_pass_at_k_is_the_share_of_choices_with_one_that_passed() -> None:
    for samples in range(1, 8):
        for passed in range(samples + 1):
            for k in range(1, samples + 1):
                chosen = list(itertools.combinations([number < passed for number in range(samples)], k))
                share = sum(map(any, chosen)) / len(chosen)
                assert pass_at_k(samples, passed, k) == pytest.approx(share), (samples, passed, k)


def test_greedy_and_drawn_programs_have_figures_of_their_own() -> None:
    assert program_scores(False, [True, False, False, True], [1, 2]) == {
        "pass@1": 0.0,
        "pass@1 of 4": pytest.approx(0.5),
        "pass@2 of 4": pytest.approx(5 / 6),
    }


def test_text_ends_before_the_first_stop() -> None:
    assert cut("    return 1\n\ndef f():\n    print(2)\n", ("\nprint", "\ndef")) == "    return 1\n"
    assert cut("a\nb", ()) == "a\nb"


def test_each_family_has_its_figures() -> None:
    ranking = Sample("msmarco", "", "", 200, 2, 2, gains=(("7", 0), ("8", 2)))
    assert written_scores(ranking, " 8 > 7") == {"ndcg@10": 1}
    assert written_scores(ranking, "7 > 8") == {"ndcg@10": pytest.approx(1 / math.log2(3))}
    assert written_scores(Sample("icl_nlu", "", "", 20, 1, 1, ("3",)), " 3") == {"exact_match": 1}
    assert set(written_scores(Sample("squad", "", "", 32, 4, 4, ("x",)), "y")) == {
        "exact_match",
        "substring_match",
        "f1",
    }


def test_means_of_several_lengths_are_of_the_same_tasks() -> None:
    """squad stands at the greatest length alone, where it does not move the mean."""

    def item(length: int, task: str, score: float, prompt_tokens: int) -> Item:
        metric = TASKS[task].metric
        return Item(length, Sample(task, "", "", 20, 3, 5), prompt_tokens, (), "", {metric: score, "f1": score / 2})

    items = [
        item(64, "kilt_nq", 0, 30),
        item(64, "kilt_nq", 1, 50),
        item(128, "kilt_nq", 1, 90),
        item(128, "squad", 0, 9),
    ]
    told = by_length(items)
    assert [told[length]["mean"] for length in ("64", "128")] == [0.5, 1]
    assert told["64"]["tasks"]["kilt_nq"] == {
        "score": 0.5,
        "samples": 2,
        "metric": "substring_match",
        "metrics": {"substring_match": 0.5, "f1": 0.25},
        "kept": 3,
        "prompt_tokens": 40,
    }
    assert told["128"]["tasks"]["squad"]["score"] == 0
    assert by_length(items[3:])["128"]["mean"] == 0


def test_rows_of_a_question_are_compared_together() -> None:
    """Six rows of each of four questions tell as much as four samples: the second model has two of them whole."""
    pytest.importorskip("scipy")

    def items(scores: list[float], rows: int) -> list[Item]:
        return [
            Item(64, Sample("kilt_nq", f"q{number}", "", 20, 3, 5), 9, (), "", {Metric.SUBSTRING_MATCH: score})
            for _ in range(rows)
            for number, score in enumerate(scores)
        ]

    def compared(rows: int) -> dict[str, Any]:
        models = {"first": items([0, 0, 1, 0], rows), "second": items([1, 1, 1, 0], rows)}
        return {pair["task"]: pair for pair in differences(models)}["kilt_nq"]

    once, again = compared(1), compared(6)
    assert again["score"] == once["score"]
    assert again["mcnemar"] == once["mcnemar"] == {"only_first": 0, "only_second": 2, "p_value": pytest.approx(0.5)}
    partly = {"first": items([0, 0], 2), "second": [*items([1, 1], 1), *items([1, 0], 1)]}
    told = {pair["task"]: pair for pair in differences(partly)}["kilt_nq"]
    assert told["score"]["value"] == pytest.approx(0.75)
    assert told["mcnemar"]["only_second"] == 1
