"""How the next token is chosen, against transformers' own processors and against counted draws."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_ext.inference.sampling import Sampling, choose, probabilities


@pytest.mark.parametrize("temperature", [0.3, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.6, 1.0])
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int | None, top_p: float | None) -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    processors += [TopKLogitsWarper(top_k)] if top_k is not None else []
    processors += [TopPLogitsWarper(top_p)] if top_p is not None else []
    expected = processors(torch.zeros(5, 1, dtype=torch.long), logits).softmax(dim=-1)
    actual, tokens = probabilities(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(actual, expected.gather(1, tokens))


def test_draws_come_as_often_as_they_are_likely() -> None:
    """The likeliest token is taken without a temperature."""
    logits = torch.tensor([[0.0, 1.0, -1.0, float("-inf")]])
    sampling = Sampling(1.0, seed=5)
    draws = [sampling.draws(0)]
    counts = torch.bincount(torch.cat([choose(logits, sampling, draws) for _ in range(4000)]), minlength=4)
    expected = logits.softmax(dim=-1)[0]
    assert counts[3] == 0
    assert torch.allclose(counts / 4000, expected, atol=0.03)  # four standard deviations
    assert choose(logits, Sampling(), []).tolist() == [1]


def test_a_text_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(1.0, seed=9)
    together = choose(logits, sampling, [sampling.draws(text) for text in range(3)])
    alone = [choose(logits[text : text + 1], sampling, [sampling.draws(text)]) for text in range(3)]
    assert together.tolist() == torch.cat(alone).tolist()
    drawn_tokens = [choose(logits[:1], sampling, [sampling.draws(text)]).item() for text in range(40)]
    assert len(set(drawn_tokens)) > 5
