"""The valid files, made once, and the changes that a row makes to a copy of them."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.inputs.table import Change

MODEL = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "make_vocab_size_divisible_by": 1,
}
OPTIMIZER = {"lr_warmup_iters": 0}


Tool = Callable[..., None]


def make(world: Path, tool: Tool) -> None:
    """Make the valid files: a data set, a tokenizer, models of both kinds, a run, scores.

    Args:
        world: the folder to make.
        tool: runs a command, which must succeed: `tool(script, word, ...)`.
    """
    world.mkdir(parents=True)
    (world / "empty.txt").touch()
    (world / "text.txt").write_text("It was a bright cold day in April.\n" * 20)
    texts = [f"{number}: " + "the clocks were striking thirteen " * (number % 7 + 1) for number in range(60)]
    (world / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"model": MODEL, "optimizer": OPTIMIZER, "logging": {"tensorboard": False}}
    (world / "good.yaml").write_text(json.dumps(options))  # JSON is YAML
    corpus = ["--input", world / "corpus.jsonl"]
    tool("tools/preprocess_data.py", *corpus, "--output-prefix", world / "data", "--tokenizer-model", "bytes")
    tool("tools/train_tokenizer.py", *corpus, "--vocab-size", 300, "--output", world / "tokenizer")
    (world / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (world / "dataset").mkdir()
    for file in world.glob("data.*"):
        shutil.copy(file, world / "dataset")
    flags = ["--config", world / "good.yaml", "--tokenizer-model", "bytes", "--seq-length", 64]
    flags += ["--train-iters", 2, "--global-batch-size", 2]
    data = ["--data-path", world / "data"]
    tool("pretrain_skyladder.py", *flags, *data, "--save", world / "run")
    shutil.copytree(world / "run", world / "other")
    run = ["--input", world / "run", "--output", world / "hf"]
    tool("tools/convert_checkpoint.py", "megatron-to-hf", *run, "--tokenizer", "none")
    scores = ["--checkpoint", world / "hf", "--output", world / "scores", "--context", 16]
    tool("tools/score_tokens.py", *scores, *flags, *data)


def prepare(folder: Path, good: Path | None, changes: tuple[Change, ...]) -> None:
    if good is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(good, folder)
    for change in changes:
        change_file(folder / change.file, change)


def change_file(path: Path, change: Change) -> None:
    value: Any = change.value
    match change.what:
        case "write":
            path.write_bytes(value if isinstance(value, bytes) else value.encode())
        case "patch":  # None takes an entry out
            content = json.loads(path.read_text()) | value
            path.write_text(json.dumps({name: entry for name, entry in content.items() if entry is not None}))
        case "seal":
            content = json.loads(path.read_text()) | value
            content.pop("sha256")
            content = {name: entry for name, entry in content.items() if entry is not None}
            sealed = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
            path.write_text(json.dumps({"sha256": sealed} | content))
        case "rename":
            path.rename(path.with_name(value))
        case "cut":
            path.write_bytes(path.read_bytes()[:value])
