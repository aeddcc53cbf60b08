"""Generation and scoring with a cache of keys and values: what a forward pass holds, and likelihoods in any layout."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.decoders import ByteFallback
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.data.text.tokenizer import TextStream, Tokenizer
from megatron_ext.inference import generate
from megatron_ext.inference.cache import KeyValueCache
from megatron_ext.inference.generate import Choice, Generator, Likelihood, Prompt, open_generator
from tests.checkpoint.models import write_model
from tests.conftest import slow_but
from tests.evaluation.plain import greedy_texts
from tests.launcher import call

PASS = 7


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, 200), k=count)


PROMPTS = [Prompt(tokens(count, count), 5) for count in (20, 1, 3, 16, 2)]
CHOICES = [
    Choice(tokens(30, 1), [tokens(1, 2), tokens(9, 3), tokens(20, 4)]),
    Choice(tokens(1, 5), [tokens(2, 6)]),
    Choice(tokens(4, 7), [tokens(3, 8), tokens(1, 9)]),
]


def asked(rank: int, model: Path, layout: ParallelConfig) -> tuple[list[list[int]], list[list[Likelihood]], int]:
    """Answers, likelihoods, and the most tokens of a forward pass."""
    largest = 0
    plain = KeyValueCache.append

    def append(self: KeyValueCache, slots: list[int], counts: list[int]) -> object:
        nonlocal largest
        largest = max(largest, sum(counts))
        return plain(self, slots, counts)

    KeyValueCache.append = append  # type: ignore[assignment, method-assign]
    generate.PASS_TOKENS = PASS
    generate.PASS_LOGITS = PASS * 300
    text = SimpleNamespace(pretrained=Pretrained.find(model), stop=[], tokenizer=None)
    with open_generator(text, layout, 64, dtype="auto", slots=4) as generator:
        return generator.answer(PROMPTS), generator.likelihoods(CHOICES), largest


def test_a_stop_text_ends_generation_where_each_token_is_a_byte(tmp_path: Path) -> None:
    """It ends as soon as the last byte is there, even if the tokens before begin inside a character."""
    pieces = {f"<0x{value:02X}>": value for value in range(256)}
    tokenizer = tokenizers.Tokenizer(BPE(pieces, [], byte_fallback=True))
    tokenizer.decoder = ByteFallback()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = Tokenizer(tmp_path)
    prompt = Prompt(opened.encode("漢"), 20, ("止ま",))
    text = generate._Text(0, prompt, np.random.default_rng(), [], TextStream(opened, prompt.tokens))
    stops = []
    for token in opened.encode("字を止まる"):
        text.answer.append(token)
        stops.append(Generator._stops(SimpleNamespace(text=None), text))  # type: ignore[arg-type]
    assert stops.index(True) == len("字を止ま".encode()) - 1


@torch.no_grad()
def plain_likelihoods(model: Path, choice: Choice) -> list[tuple[float, bool]]:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    likelihoods = []
    for option in choice.options:
        logits = plain(torch.tensor([[*choice.tokens, *option[:-1]]])).logits[0, len(choice.tokens) - 1 :]
        labels = torch.tensor(option)
        score = logits.log_softmax(-1).gather(1, labels[:, None]).sum().item()
        likelihoods.append((score, bool((logits.argmax(-1) == labels).all())))
    return likelihoods


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CASES = {
    "one": ("gemma3", {}),
    "vpp": ("llama", PP2 | {"num_layers_per_virtual_pipeline_stage": 1}),
    "uneven": ("llama", PP2 | {"pipeline_model_parallel_layout": "E|tt|t|tL"}),
    "olmo3-tp2": ("olmo3", TP2),
    "deepseek_v3": ("deepseek_v3", {}),
    "tp2-pp2": ("llama", TP2 | PP2),
}


@pytest.mark.parametrize("case", slow_but(["one", "vpp"], CASES))
def test_texts_and_likelihoods_are_those_of_transformers_in_small_passes(tmp_path: Path, case: str) -> None:
    architecture, layout = CASES[case]
    model = write_model(tmp_path / "model", architecture)
    config = ParallelConfig(**layout)
    answers = call(asked, config.model_parallel_size, model, config, group=False)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = greedy_texts(plain, [prompt.tokens for prompt in PROMPTS], 5, [])
    for texts_here, likelihoods, largest in answers:
        assert texts_here == texts
        assert largest <= PASS
        for choice, choice_likelihoods in zip(CHOICES, likelihoods, strict=True):
            for likelihood, (score, greedy) in zip(choice_likelihoods, plain_likelihoods(model, choice), strict=True):
                assert likelihood == (pytest.approx(score, abs=1e-3), greedy)


LONGEST = Choice(tokens(30, 1), [tokens(3, 2)])  # the model reads 32 tokens


def scored_up_to_the_original_length(rank: int, model: Path, length: int) -> list[list[Likelihood]]:
    text = SimpleNamespace(pretrained=Pretrained.find(model))
    with open_generator(text, ParallelConfig(), length, dtype="auto", slots=1) as generator:
        return generator.likelihoods([LONGEST])


@pytest.mark.parametrize("length", [32, 64])
def test_angles_that_follow_the_text_score_texts_up_to_their_length(tmp_path: Path, length: int) -> None:
    """Also if the command allows longer ones."""
    model = write_model(tmp_path / "model", "llama-dynamic", max_position_embeddings=32)
    (((likelihood,),),) = call(scored_up_to_the_original_length, 1, model, length, group=False)
    ((score, greedy),) = plain_likelihoods(model, LONGEST)
    assert likelihood == (pytest.approx(score, abs=1e-3), greedy)
