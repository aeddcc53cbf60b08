"""tools/evaluate.py recall: answers are transformers' greedy ones, under every layout that generates text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.models import write_model
from launcher import Commands
from transformers import AutoModelForCausalLM

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.evaluation.recall.scoring import score
from megatron_ext.evaluation.recall.tasks import make_samples, read_material

pytest.importorskip("wonderwords", reason="needs wonderwords: pip install -e '.[eval]'")

TOOL = "tools/evaluate.py"
TASKS = ["niah_single_1", "niah_multikey_1", "vt", "fwe", "json_kv"]
LENGTHS = [1250, 1600]
SAMPLES = 2


@pytest.fixture(scope="module")
def pair() -> Commands:
    return Commands(2)


@pytest.fixture(scope="module")
def essay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("essay") / "essay.txt"
    file.write_text(" ".join(f"Lily saw {number} dogs in the park. They were happy!" for number in range(300)))
    return file


def asked(commands: Commands, output: Path, essay: Path, *flags: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    common = ["--haystack", essay, "--lengths", *LENGTHS, "--samples", SAMPLES, "--output", output, "--overwrite"]
    commands.run(TOOL, "recall", *flags, *common)
    items = [json.loads(line) for line in (output / "recall.items.jsonl").read_text().splitlines()]
    assert (output / "recall.png").stat().st_size > 10_000
    return json.loads((output / "recall.json").read_text()), items


@pytest.mark.slow
@torch.no_grad()
def test_answers_are_those_of_transformers(
    alone: Commands, pair: Commands, stories_model: Path, essay: Path, tmp_path: Path
) -> None:
    """Beyond its trained length a small model goes astray, and so must both, token by token, in any layout."""
    record, items = asked(alone, tmp_path / "one", essay, stories_model, "--tasks", *TASKS, "--batch-size", 3)
    tokenizer = Tokenizer(stories_model)
    material = read_material([str(essay)], "text", None, None, None)
    samples = make_samples(TASKS, LENGTHS, tokenizer.encode, material, SAMPLES, seed=42)
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32).eval()
    flat = [sample for length in LENGTHS for sample in samples[length]]
    assert [item["task"] for item in items] == [sample.task for sample in flat]
    for item, sample in zip(items, flat, strict=True):
        ids = torch.tensor([tokenizer.encode(sample.prompt)])
        said = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sample.new_tokens,
            do_sample=False,
            eos_token_id=[2, tokenizer.eod_id],
            pad_token_id=0,
        )[0, ids.shape[1] :].tolist()
        assert item["tokens"] == said
        assert item["prompt_tokens"] == ids.shape[1]
        assert item["score"] == score(sample.metric, item["text"], sample.answers)
    for length in LENGTHS:
        told = record["models"][stories_model.name]["lengths"][str(length)]["tasks"]
        for task in TASKS:
            scores = [item["score"] for item in items if (item["length"], item["task"]) == (length, task)]
            assert told[task] == {"score": sum(scores) / SAMPLES, "samples": SAMPLES}
    for flags in (["--tensor-model-parallel-size", 2], []):
        assert asked(pair, tmp_path / "two", essay, stories_model, "--tasks", *TASKS, *flags)[1] == items


def test_two_models_side_by_side(alone: Commands, stories_model: Path, essay: Path, tmp_path: Path) -> None:
    """The answers of each, compared sample by sample."""
    pytest.importorskip("scipy")
    other = write_model(tmp_path / "other", "llama", vocab_size=512)
    flags = [stories_model, other, "--tokenizer", stories_model, "--tasks", "fwe", "json_kv"]
    record, items = asked(alone, tmp_path / "out", essay, *flags)
    assert {item["model"] for item in items} == {stories_model.name, "other"}
    pairs = {(pair["length"], pair["task"]): pair for pair in record["comparisons"]}
    assert set(pairs) == {(length, task) for length in LENGTHS for task in ("all", "fwe", "json_kv")}
    means = [model["lengths"]["1250"]["tasks"]["fwe"]["score"] for model in record["models"].values()]
    assert pairs[1250, "fwe"]["score"]["value"] == pytest.approx(means[1] - means[0])
    assert "## Differences" in (tmp_path / "out/recall.md").read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "niah_single_2"], "tasks: got niah_single_2, which needs a file; give --haystack"),
        (["--tasks", "vt", "--samples", 0], "samples: got 0"),
        (["--tasks", "vt", "--lengths", 100], "lengths: got 100, the shortest sample of vt takes"),
        (["--tasks", "vt", "--context-parallel-size", 2], "context_parallel_size: got 2, text is generated with 1"),
    ],
)
def test_what_cannot_be_done_is_refused(alone: Commands, stories_model: Path, flags: list[object], said: str) -> None:
    (done,) = alone.attempt(TOOL, "recall", stories_model, *flags)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.status == 2
    assert said in line
