"""tools/evaluate.py recall: a sample fills its length, and answers are transformers' greedy ones."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError
from megatron_ext.evaluation.probe import NEW_TOKENS, make_samples
from tests.evaluation.plain import greedy_texts
from tests.launcher import Commands

TOOL = "tools/evaluate.py"
LENGTHS = [600, 1500]


@pytest.mark.parametrize("task", ["needle", "json_kv"])
def test_samples_fill_their_length_and_hide_at_every_depth(task: str) -> None:
    essay = " ".join(f"Lily saw {number} dogs in the park. They were happy!" for number in range(50))
    samples = list(make_samples([task], [8000], str.encode, 6, 42, essay))
    places = []
    for sample in samples:
        tokens = len(sample.prompt.encode()) + NEW_TOKENS
        assert 7600 <= tokens <= 8000
        assert sample.prompt.count(sample.answer) == 1
        key = sample.prompt.rsplit("magic number for " if task == "needle" else "Key: ", 1)[1][:36]
        hidden = f"{key} is: {sample.answer}." if task == "needle" else f'"{key}": "{sample.answer}"'
        places.append(sample.prompt.index(hidden) / len(sample.prompt))
        assert re.search(r"Lily saw \d+ dogs", sample.prompt) is None or task == "needle"
    assert places == sorted(places)
    assert places[0] < 0.1
    assert places[-1] > 0.8
    assert samples == list(make_samples([task], [8000], str.encode, 6, 42, essay))
    with pytest.raises(UserError, match=f"lengths: got 100, {task} needs at least"):
        list(make_samples([task], [100], str.encode, 1, 42))


def test_answers_are_those_of_transformers_in_any_layout(stories_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(stories_model)
    samples = list(make_samples(["needle", "json_kv"], LENGTHS, tokenizer.encode, 1, 42))
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32).eval()
    prompts = [tokenizer.encode(sample.prompt) for sample in samples]
    texts = greedy_texts(model, prompts, NEW_TOKENS, [2, tokenizer.eod_id])
    flags = [stories_model, "--lengths", *LENGTHS, "--samples", 1, "--batch-size", 3]
    for name, processes, layout in (("one", 1, []), ("tp2", 2, ["--tensor-model-parallel-size", 2])):
        Commands(processes).run(TOOL, "recall", *flags, "--output", tmp_path / name, *layout)
        record = json.loads((tmp_path / name / "recall.json").read_text())
        items = [json.loads(line) for line in (tmp_path / name / "recall.items.jsonl").read_text().splitlines()]
        assert [item["tokens"] for item in items] == texts
        assert len(record["results"]) == len(items)
