"""docs/howto/from-megatron-lm.md: its commands, on a script, data and a checkpoint of Megatron-LM."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_megatron_lm import load, ours
from tests.checkpoint.test_megatron_lm_optimizer import PERIOD, train
from tests.config.megatron_lm import defaults
from tests.conftest import ROOT, SmallData
from tests.launcher import call, free_port
from tests.runs import read_jsonl
from tests.theirs import write_theirs
from tools.translate_megatron_lm import Arguments, words_of

PAGE = (ROOT / "docs/howto/from-megatron-lm.md").read_text(encoding="utf-8")
WALK = PAGE.partition("\n## The translation")[0]
COMMANDS = "".join(re.findall(r"^```bash\n(.*?)^```", WALK, re.M | re.S)).splitlines()
SCRIPT = """#!/bin/bash
CHECKPOINT_PATH=$1
TOKENIZER=$2
DATA_PATH=$3
SIZE=${SIZE:-small}
if [[ $SIZE == small ]]; then LAYERS=4; HIDDEN=32; else LAYERS=32; HIDDEN=4096; fi
MODEL_ARGS=(
    --num-layers $LAYERS --hidden-size $HIDDEN --ffn-hidden-size 48 --num-attention-heads 4
    --group-query-attention --num-query-groups 2
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
    --position-embedding-type rope --rotary-base 5000 --untie-embeddings-and-output-weights
)
torchrun --nproc_per_node 2 pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 \\
    --train-iters 6 --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 \\
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 0.5 --attention-dropout 0 --hidden-dropout 0 \\
    --data-path $DATA_PATH --split 1,0,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER \\
    --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["0.16.1", "0.19.0"])
def test_every_command_of_the_page_runs(
    version: str, tmp_path: Path, small_data: SmallData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on with the losses of Megatron-Core, and it reads what comes back."""
    monkeypatch.chdir(tmp_path)
    for name in ("pretrain_skyladder.py", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "TOKENIZER").symlink_to(small_data.tokenizer)
    (tmp_path / "train.sh").write_text(SCRIPT, encoding="utf-8")
    write_theirs(tmp_path / "DATA", [PERIOD.repeat(100).numpy()], 1024)
    arguments = Arguments(words_of([str(tmp_path / "train.sh"), "CHECKPOINTS", "TOKENIZER", "DATA"])[0])
    assert not arguments.missing
    args = defaults(version) | arguments.values
    args |= {"params_dtype": torch.float32, "padded_vocab_size": 1024, "consumed_train_samples": 6}
    checkpoints = tmp_path / "CHECKPOINTS"
    losses = call(train, 1, checkpoints, version, args, {}, None)[0]
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3")  # of six steps

    environment = os.environ | {"OMP_NUM_THREADS": "1", "PET_MASTER_PORT": str(free_port())}  # torchrun's own
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    outputs = {}
    for command in COMMANDS:
        here = ["bash", "-ec", re.sub("(--nproc-per-node|--world-size) 8", r"\1 2", command)]
        done = subprocess.run(here, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        outputs[command] = done.stdout
    first = read_jsonl(tmp_path / "runs" / "mine" / "metrics.jsonl")[0]
    assert (first["step"], first["train_loss"]) == (0, pytest.approx(losses[3], rel=1e-5))
    continued = read_jsonl(tmp_path / "runs" / "same" / "metrics.jsonl")
    assert [record["step"] for record in continued] == [3, 4, 5]
    assert [record["train_loss"] for record in continued] == pytest.approx(losses[3:], rel=1e-5)
    assert outputs[COMMANDS[-1]].startswith(
        "Megatron-LM loads it with --load back --finetune --use-checkpoint-args --norm-epsilon 1e-06\n"
    )
    back = call(load, 1, tmp_path / "back" / "iter_0000006", args, {})[0]
    assert back == pytest.approx(call(ours, 1, tmp_path / "runs" / "mine", group=False)[0], abs=1e-5)
