"""tools/generate.py as a user calls it: token by token what transformers writes, by any number of processes."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint.models import EACH, write_model
from evaluation.plain import greedy_texts
from launcher import Commands
from runs import refusal
from transformers import AutoModelForCausalLM

from megatron_ext.data.text.tokenizer import Tokenizer
from tests.chats import END, PLAIN, put_tokenizer

TOOL = "tools/generate.py"
PROMPTS = ["Once upon a time", "The", "Lily and Tom went to the park to see", "A dog", "One day, the sun"]
NEW = 24


def greedy(folder: Path, prompts: list[list[int]], new: int, stop: list[int]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return greedy_texts(model, prompts, new, stop)


def written(commands: Commands, model: Path, output: Path, *flags: object) -> list[list[int]]:
    commands.run(TOOL, model, "--output", output, "--overwrite", *flags)
    return [json.loads(line)["tokens"] for line in output.read_text().splitlines()]


@pytest.mark.parametrize("architecture", EACH)
def test_greedy_text_is_that_of_transformers(alone: Commands, tmp_path: Path, architecture: str) -> None:
    """Local layers, layers without angles, scaled angles: each over a cache, two texts at a time, slots refilled."""
    model = write_model(tmp_path / "model", architecture)
    tokenizer = Tokenizer("bytes")
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    flags = ["--tokenizer", "bytes", "--prompt", *PROMPTS, "--max-new-tokens", NEW, "--batch-size", 2]
    ours = written(alone, model, tmp_path / "out.jsonl", *flags)
    ends = AutoModelForCausalLM.from_pretrained(model).generation_config.eos_token_id
    stop = [tokenizer.eod_id, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])]
    assert ours == greedy(model, prompts, NEW, stop)
    assert len({tuple(answer) for answer in ours}) > 1


def test_two_processes_write_what_one_writes(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    options = [*("--prompt", *PROMPTS, "--max-new-tokens", 40), "--temperature", 1.5, "--top-k", 50, "--top-p", 0.95]
    one = written(alone, stories_model, tmp_path / "one.jsonl", *options, "--batch-size", 5)
    for layout in ([], ["--tensor-model-parallel-size", 2, "--sequence-parallel"], ["--context-parallel-size", 2]):
        assert written(Commands(2), stories_model, tmp_path / "two.jsonl", *options, "--batch-size", 2, *layout) == one


def test_two_processes_write_with_experts_what_one_writes(alone: Commands, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "mixtral", num_local_experts=4)
    options = ["--prompt", *PROMPTS, "--tokenizer", "bytes", "--max-new-tokens", 8]
    one = written(alone, model, tmp_path / "one.jsonl", *options)
    for layout in (
        ["--tensor-model-parallel-size", 2],
        ["--pipeline-model-parallel-size", 2],
        ["--context-parallel-size", 2, "--expert-model-parallel-size", 2],
    ):
        assert written(Commands(2), model, tmp_path / "two.jsonl", *options, *layout) == one


def test_one_text_is_shown_as_it_comes_and_several_in_turn(
    alone: Commands, stories_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": PROMPTS[0]}) + "\n")
    (done,) = alone.attempt(TOOL, stories_model, "--input", tmp_path / "prompts.jsonl", "--max-new-tokens", 30)
    assert done.status == 0, done.stderr
    (several,) = alone.attempt(TOOL, stories_model, "--prompt", *PROMPTS[:2], "--max-new-tokens", 30)
    assert done.stdout.startswith(PROMPTS[0] + ", there was a little girl named Lily.")
    assert several.stdout.startswith("[1] " + done.stdout)
    assert "\n[2] The" in several.stdout


def test_a_chat_goes_by_the_template(alone: Commands, tmp_path: Path) -> None:
    """Each reply is what transformers writes after the conversation so far."""
    model = write_model(tmp_path / "model", "llama", vocab_size=330)
    tokenizer = Tokenizer(put_tokenizer(tmp_path / "tokenizer", PLAIN))
    flags = [model, "--chat", "--tokenizer", tmp_path / "tokenizer", "--max-new-tokens", 6]
    (done,) = alone.attempt(TOOL, *flags, "--system", "rows", "--prompt", "the window grows", "and")
    assert done.status == 0, done.stderr
    (end,) = tokenizer.encode_spelled(END)[0]
    text, shown = "<|im_start|>system\nrows<|im_end|>\n", ""
    for turn in ("the window grows", "and"):
        text += f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
        ((*reply,),) = greedy(model, [tokenizer.encode_spelled(text)[0]], 6, [2, end])
        spoken = tokenizer.decode([token for token in reply if token not in (2, end)])
        text, shown = text + spoken + "<|im_end|>\n", shown + spoken + "\n"
    assert done.stdout == shown


def test_angles_that_follow_the_text_are_refused_beyond_their_length(alone: Commands, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama-dynamic", max_position_embeddings=32)
    options = [model, "--tokenizer", "bytes", "--prompt", "a" * 20, "--max-new-tokens"]
    assert "got up to 33 tokens" in refusal(alone.attempt(TOOL, *options, 13)[0])
    assert alone.attempt(TOOL, *options, 12)[0].status == 0
