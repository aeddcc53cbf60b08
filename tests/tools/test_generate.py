"""tools/generate.py as a user calls it: token by token what transformers writes, by any number of processes."""

import json
import subprocess
import sys
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
from tests.runs import read_jsonl, refusal, refused_command

TOOL = "tools/generate.py"
PROMPTS = ["Once upon a time", "The", "Lily and Tom went to the park to see", "A dog", "One day, the sun"]
NEW = 24


def written(commands: Commands, model: Path, output: Path, *flags: object) -> list[list[int]]:
    commands.run(TOOL, model, "--output", output, "--overwrite", *flags)
    return [record["tokens"] for record in read_jsonl(output)]


@pytest.mark.parametrize("architecture", EACH)
def test_greedy_text_is_that_of_transformers(alone: Commands, tmp_path: Path, architecture: str) -> None:
    """Local layers, layers without angles, scaled angles: each over a cache, two texts at a time, slots refilled."""
    model = write_model(tmp_path / "model", architecture)
    tokenizer = Tokenizer("bytes")
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    flags = ["--tokenizer", "bytes", "--prompt", *PROMPTS, "--max-new-tokens", NEW, "--batch-size", 2]
    answers = written(alone, model, tmp_path / "out.jsonl", *flags)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ends = plain.generation_config.eos_token_id
    stop = [tokenizer.eod_id, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])]
    assert answers == greedy_texts(plain, prompts, NEW, stop)
    assert len({tuple(answer) for answer in answers}) > 1


@pytest.mark.slow
def test_two_processes_write_what_one_writes(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    """Drawn texts in other batches; experts."""
    tensor, context = ["--tensor-model-parallel-size", 2], ["--context-parallel-size", 2]
    pipeline, expert = ["--pipeline-model-parallel-size", 2], ["--expert-model-parallel-size", 2]
    drawn = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.95, "--max-new-tokens", 40]
    experts = write_model(tmp_path / "model", "mixtral", num_local_experts=4)
    for model, options, layouts in (
        (stories_model, drawn, ([], [*tensor, "--sequence-parallel"], context)),
        (experts, ["--tokenizer", "bytes", "--max-new-tokens", 8], (tensor, pipeline, [*context, *expert])),
    ):
        flags = [*options, "--prompt", *PROMPTS]
        by_one_process = written(alone, model, tmp_path / "one.jsonl", *flags, "--batch-size", 5)
        for layout in layouts:
            by_two_processes = written(Commands(2), model, tmp_path / "two.jsonl", *flags, "--batch-size", 2, *layout)
            assert by_two_processes == by_one_process, layout


def test_an_answer_continues_the_text_of_its_prompt(alone: Commands, tmp_path: Path) -> None:
    """A decoder that leaves out the space before a text's first word leaves none out between prompt and answer."""
    words = {f"▁{word}": number for number, word in enumerate(("the", "window", "</s>", "grows", "rows", "wait"))}
    whole = tokenizers.Tokenizer(WordLevel(words, "▁the"))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    whole.save(str(tmp_path / "tokenizer.json"))
    model = write_model(tmp_path / "model", "llama", vocab_size=len(words))
    flags = ["--tokenizer", tmp_path, "--max-new-tokens", 5, "--prompt"]
    prompts = ["the window", "rows"]
    alone.run(TOOL, model, "--output", tmp_path / "out.jsonl", *flags, *prompts)
    records = read_jsonl(tmp_path / "out.jsonl")
    tokenizer = Tokenizer(tmp_path)
    texts = [tokenizer.decode(tokenizer.encode(record["prompt"]) + record["tokens"]) for record in records]
    assert [record["prompt"] + record["answer"] for record in records] == texts
    assert all(" " in record["answer"] for record in records)
    (of_two_prompts,) = alone.run(TOOL, model, *flags, *prompts)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": prompts[0]}) + "\n")
    (of_one_prompt,) = alone.run(TOOL, model, *flags[:-1], "--input", tmp_path / "prompts.jsonl")
    assert of_two_prompts.stdout == f"[1] {texts[0]}\n\n[2] {texts[1]}\n"
    assert of_one_prompt.stdout == f"{texts[0]}\n"


@pytest.mark.parametrize("tool", ["generate", "perplexity", "verify", "train"])
def test_ids_without_a_row_are_refused_only_in_a_text(alone: Commands, tmp_path: Path, tool: str) -> None:
    """The tokenizer has more ids than the model has rows; it is said once how many."""
    model = write_model(tmp_path / "model", "llama", vocab_size=257)
    tokenizer = put_wide_tokenizer(tmp_path / "wide")
    run = tmp_path / "run"
    file = tmp_path / "text.txt"
    alone.run("tools/convert_checkpoint.py", "hf-to-megatron", "--input", model, "--output", run)
    data = ["--output-prefix", tmp_path / "data", "--tokenizer-model", tokenizer, "--overwrite"]
    for text, wrong in (("the window grows " * 9, False), ("the <tool> window " * 9, True)):
        file.write_text(text)
        alone.run("tools/preprocess_data.py", "--input", file, *data)
        train = ["--seq-length", 16, "--train-iters", 1, "--split", "100,0,0", "--eval-interval", 0]
        train += ["--config", run / "config.yaml", "--data-path", tmp_path / "data"]
        command: list[object] = {
            "generate": [TOOL, model, "--prompt", text, "--max-new-tokens", 2],
            "perplexity": ["tools/evaluate.py", "perplexity", model, "--input", file, "--lengths", 8],
            "verify": ["tools/convert_checkpoint.py", "verify", "--input", model, "--output", run, "--text", file],
            "train": ["pretrain_skyladder.py", *train],
        }[tool]
        tokenizer_flag = "--tokenizer-model" if tool == "train" else "--tokenizer"
        (done,) = alone.attempt(*command, tokenizer_flag, tokenizer)
        if wrong:
            assert "token id 258" in refusal(done)
        else:
            assert done.status == 0, done.stderr
            assert done.stderr.count("2 of the 259 ids") == 1


def test_a_chat_goes_by_the_template(alone: Commands, tmp_path: Path) -> None:
    """Each reply is what transformers writes after the conversation so far."""
    model = write_model(tmp_path / "model", "llama", vocab_size=330)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = Tokenizer(put_tokenizer(tmp_path / "tokenizer", PLAIN))
    flags = [model, "--chat", "--tokenizer", tmp_path / "tokenizer", "--max-new-tokens", 6]
    (done,) = alone.run(TOOL, *flags, "--system", "rows", "--prompt", "the window grows", "and")
    (end,) = tokenizer.encode_spelled(END)[0]
    text, shown = "<|im_start|>system\nrows<|im_end|>\n", ""
    for turn in ("the window grows", "and"):
        text += f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
        (reply,) = greedy_texts(plain, [tokenizer.encode_spelled(text)[0]], 6, [2, end])
        spoken = tokenizer.decode([token for token in reply if token not in (2, end)])
        text, shown = text + spoken + "<|im_end|>\n", shown + spoken + "\n"
    assert done.stdout == shown
    typed = f"the {END} grows\nthe window grows\nand\n"  # a typed turn that is refused does not end the conversation
    command = [sys.executable, TOOL, *map(str, flags), "--system", "rows"]
    assert subprocess.run(command, input=typed, stdout=subprocess.PIPE, text=True, check=True).stdout == shown


def test_angles_that_follow_the_text_are_refused_beyond_their_length(alone: Commands, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama-dynamic", max_position_embeddings=32)
    options = [model, "--tokenizer", "bytes", "--prompt", "a" * 20, "--max-new-tokens"]
    assert "got up to 33 tokens" in refused_command(alone, TOOL, *options, 13)
    alone.run(TOOL, *options, 12)
