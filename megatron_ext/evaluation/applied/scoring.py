"""How an answer is scored: exact match, F1, ROUGE, NDCG; 0 to 1 each, as HELMET (arXiv 2410.02694) takes them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any

from megatron_ext.errors import missing_package
from megatron_ext.evaluation.recall.scoring import normalised

CUTOFF = 10  # ranks that NDCG counts
_RANKING = re.compile(r"\d+(?:\s*>\s*\d+)*")


class Metric(StrEnum):
    """Names a figure of an answer.

    EXACT_MATCH: it is one of the right ones, when both are normalised. SUBSTRING_MATCH: it holds one. F1: of the words
    that it shares with one. ROUGE_*: F1 of single words, pairs, and longest common subsequences, words stemmed, in the
    whole text (L) or summed over its lines (LSUM). NDCG: of the first ten ranks. ACCURACY: the right option is the
    likeliest. ACCURACY_PER_TOKEN: the same, by the mean over an option's tokens, that is, by its perplexity. PASS_AT_1:
    the greedy program passes.
    """

    EXACT_MATCH = "exact_match"
    SUBSTRING_MATCH = "substring_match"
    F1 = "f1"
    ROUGE_1 = "rouge_1"
    ROUGE_2 = "rouge_2"
    ROUGE_L = "rouge_l"
    ROUGE_LSUM = "rouge_lsum"
    NDCG = "ndcg@10"
    ACCURACY = "accuracy"
    ACCURACY_PER_TOKEN = "accuracy_per_token"
    PASS_AT_1 = "pass@1"


Scores = dict[str, float]


def check_rouge() -> None:
    """Raise a UserError where rouge-score is missing."""
    _rouge()


def answer_scores(text: str, answers: Sequence[str], heading: str, *, rouge: bool) -> Scores:
    """Score what a model wrote against all right answers; each figure is the best of them.

    Args:
        text: that the model wrote.
        answers: right ones.
        heading: what the prompt ends with, such as "Answer:". What stands behind it in a line, or else in the first
            line, is scored as well, and the better of both counts.
        rouge: compute ROUGE too.
    """
    best: Scores = {}
    for said in (text, headed(text, heading)):
        for answer in answers:
            found: Scores = {
                Metric.EXACT_MATCH: float(normalised(said) == normalised(answer)),
                Metric.SUBSTRING_MATCH: float(normalised(answer) in normalised(said)),
                Metric.F1: word_f1(said, answer),
            }
            if rouge:
                scored = _rouge().score(answer, said)
                found |= {f"rouge_{name.removeprefix('rouge').lower()}": own.fmeasure for name, own in scored.items()}
            for name, value in found.items():
                best[name] = max(best.get(name, 0.0), value)
    return best


def headed(text: str, heading: str) -> str:
    """Return what stands behind a heading in its line, in any case; without one the first line."""
    found = re.search(re.escape(heading) + "(.*)", text, re.IGNORECASE)
    line = found[1] if found else text.partition("\n")[0]
    return line.strip()


def word_f1(text: str, answer: str) -> float:
    """Compute the harmonic mean of precision and recall of normalised words; yes and no match none but themselves."""
    said, right = normalised(text), normalised(answer)
    if said != right and {said, right} & {"yes", "no", "noanswer"}:
        return 0.0
    said_words, right_words = Counter(said.split()), Counter(right.split())
    shared = (said_words & right_words).total()
    return 2 * shared / (said_words.total() + right_words.total()) if shared else 0.0


def parse_ranking(text: str) -> list[str]:
    """Find the longest "3 > 1 > 2" of a text, brackets and "ID:" left out; each number at its first place."""
    cleaned = re.sub(r"[\[\]:]|id", "", text, flags=re.IGNORECASE)
    longest = max(_RANKING.findall(cleaned), key=len, default="")
    return list(dict.fromkeys(number.strip() for number in longest.split(">") if number.strip()))


def ndcg(ranking: Sequence[str], gains: Mapping[str, int], cutoff: int = CUTOFF) -> float:
    """Compute the normalised discounted cumulative gain, as trec_eval does: sum of gain / log2(rank + 1).

    Args:
        ranking: names, the best first; one without a gain takes a rank and adds nothing.
        gains: of the documents; those below 0 count as 0.
        cutoff: ranks that count.
    """

    def discounted(values: Sequence[int]) -> float:
        return sum(max(value, 0) / math.log2(rank + 1) for rank, value in enumerate(values[:cutoff], start=1))

    ideal = discounted(sorted(gains.values(), reverse=True))
    return discounted([gains.get(name, 0) for name in ranking]) / ideal if ideal else 0.0


def choice_scores(likelihoods: Sequence[float], tokens: Sequence[int], gold: int) -> Scores:
    """Score a choice.

    Args:
        likelihoods: log-probability of each option, in nats.
        tokens: of each option.
        gold: the right one, from 0.
    """
    per_token = [value / count for value, count in zip(likelihoods, tokens, strict=True)]
    return {
        Metric.ACCURACY: float(likelihoods.index(max(likelihoods)) == gold),
        Metric.ACCURACY_PER_TOKEN: float(per_token.index(max(per_token)) == gold),
    }


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate how likely one of k programs passes (Chen et al. 2021, equation 1), without bias.

    1 - C(n - c, k) / C(n, k): the share of all choices of k among n samples, c of which passed, with one that did.

    Args:
        samples: n.
        passed: c.
        k: at most n.
    """
    assert 0 <= passed <= samples, (passed, samples)
    assert 1 <= k <= samples, (k, samples)
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


@cache
def _rouge() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise missing_package("ROUGE", "rouge-score") from None
    return rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
