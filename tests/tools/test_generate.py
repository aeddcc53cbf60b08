"""tools/generate.py as a user calls it: token by token what transformers writes, by any number of processes."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from megatron_ext.data.text.tokenizer import Tokenizer
from tests.chats import END, PLAIN, put_tokenizer, put_wide_tokenizer
from tests.checkpoint.models import EACH, write_model
from tests.evaluation.plain import greedy_texts
from tests.launcher import Commands
from tests.runs import refusal

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


def test_an_answer_continues_the_text_of_its_prompt(alone: Commands, tmp_path: Path) -> None:
    """A decoder that leaves out the space before a text's first word leaves none out between prompt and answer."""
    words = {f"▁{word}": number for number, word in enumerate(("the", "window", "</s>", "grows", "rows", "wait"))}
    whole = tokenizers.Tokenizer(WordLevel(words, "▁the"))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    whole.save(str(tmp_path / "tokenizer.json"))
    model = write_model(tmp_path / "model", "llama", vocab_size=len(words))
    flags, prompts = ["--tokenizer", tmp_path, "--max-new-tokens", 5, "--prompt"], ["the window", "rows"]
    alone.run(TOOL, model, "--output", tmp_path / "out.jsonl", *flags, *prompts)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer(tmp_path)
    texts = [tokenizer.decode(tokenizer.encode(one["prompt"]) + one["tokens"]) for one in records]
    assert [one["prompt"] + one["answer"] for one in records] == texts
    assert all(" " in one["answer"] for one in records)
    (several,) = alone.attempt(TOOL, model, *flags, *prompts)
    (shown,) = alone.attempt(TOOL, model, *flags, prompts[0])
    assert several.stdout == f"[1] {texts[0]}\n\n[2] {texts[1]}\n"
    assert shown.stdout == f"{texts[0]}\n"


@pytest.mark.parametrize("tool", ["generate", "perplexity", "verify", "train"])
def test_ids_without_a_row_are_refused_only_in_a_text(alone: Commands, tmp_path: Path, tool: str) -> None:
    """Of a tokenizer with more ids than the model has rows; it is said once how many."""
    model = write_model(tmp_path / "model", "llama", vocab_size=257)
    tokenizer, run = put_wide_tokenizer(tmp_path / "wide"), tmp_path / "run"
    if tool in ("verify", "train"):
        alone.run("tools/convert_checkpoint.py", "hf-to-megatron", "--input", model, "--output", run)
    for text, refused in (("the window grows " * 9, False), ("the <tool> window " * 9, True)):
        (tmp_path / "text.txt").write_text(text)
        flags: list[object] = ["--tokenizer", tokenizer]
        if tool == "generate":
            script, flags = TOOL, [model, *flags, "--prompt", text, "--max-new-tokens", 2]
        elif tool == "perplexity":
            script = "tools/evaluate.py"
            flags = ["perplexity", model, *flags, "--input", tmp_path / "text.txt", "--lengths", 8]
        elif tool == "verify":
            script = "tools/convert_checkpoint.py"
            flags = ["verify", "--input", model, "--output", run, *flags, "--text", tmp_path / "text.txt"]
        else:
            data = ["--output-prefix", tmp_path / "data", "--tokenizer-model", tokenizer, "--overwrite"]
            alone.run("tools/preprocess_data.py", "--input", tmp_path / "text.txt", *data)
            script = "pretrain_skyladder.py"
            flags = ["--config", run / "config.yaml", "--data-path", tmp_path / "data", "--tokenizer-model", tokenizer]
            flags += ["--seq-length", 16, "--train-iters", 1, "--split", "100,0,0", "--eval-interval", 0]
        (done,) = alone.attempt(script, *flags)
        if refused:
            assert "token id 258" in refusal(done)
        else:
            assert done.status == 0, done.stderr
            assert done.stderr.count("2 of the 259 ids") == 1


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
