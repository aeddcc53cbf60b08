"""The table of wrong inputs: each ends with one short error, and nothing is written."""

import contextlib
import json
import shutil
from pathlib import Path

import psutil
import pytest

from tests.inputs.table import Wrong, all_inputs
from tests.launcher import Commands

MEMORY = 6 * 2**30  # bytes that a command may allocate
GOOD = """
model: {num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2, num_query_groups: 1,
        make_vocab_size_divisible_by: 1}
optimizer: {lr_warmup_iters: 0}
logging: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def world(alone: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The valid files: a data set, models of both kinds, two runs, scores."""
    world = tmp_path_factory.mktemp("inputs")
    (world / "empty.txt").touch()
    (world / "text.txt").write_text("It was a bright cold day in April.\n" * 20)
    texts = [f"{number}: " + "the clocks were striking thirteen " * (number % 7 + 1) for number in range(60)]
    (world / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (world / "good.yaml").write_text(GOOD)
    corpus = ["--input", world / "corpus.jsonl", "--output-prefix", world / "data", "--tokenizer-model", "bytes"]
    alone.run("tools/preprocess_data.py", *corpus)
    flags = ["--config", world / "good.yaml", "--tokenizer-model", "bytes", "--seq-length", 64]
    flags += ["--train-iters", 2, "--global-batch-size", 2]
    data = ["--data-path", world / "data"]
    alone.run("pretrain_skyladder.py", *flags, *data, "--save", world / "run")
    shutil.copytree(world / "run", world / "other")
    run = ["--input", world / "run", "--output", world / "hf"]
    alone.run("tools/convert_checkpoint.py", "megatron-to-hf", *run, "--tokenizer", "none")
    scores = ["--checkpoint", world / "hf", "--output", world / "scores", "--context", 16]
    alone.run("tools/score_tokens.py", *scores, *flags, *data)
    return world


@pytest.mark.parametrize("wrong", all_inputs(), ids=lambda wrong: wrong.name[:140])
def test_wrong_input_is_a_short_error(wrong: Wrong, world: Path, tmp_path: Path) -> None:
    """Exit status 2, and from the one `error:` on at most three lines, with the row's fragment."""
    (tmp_path / "out").mkdir()
    words = [word.replace("{w}", str(world)).replace("{out}", str(tmp_path / "out")) for word in wrong.words]
    running = Commands(folder=tmp_path).start(wrong.script, *words)  # none needs the repository's folder
    for process in filter(None, running.processes):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            limit = process.memory_info().vms + MEMORY
            process.rlimit(psutil.RLIMIT_AS, (limit, limit))
    (done,) = running.finish(timeout_s=60)
    lines = done.stderr.splitlines()
    (begin,) = (number for number, line in enumerate(lines) if line.startswith("error: "))
    assert done.status == 2, done
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(lines[begin:]) <= 3, done
    assert max(map(len, lines[begin:])) <= 1000, done
    assert wrong.fragment in " ".join(lines[begin:]), done
