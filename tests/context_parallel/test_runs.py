"""Context parallelism through the trainer's own command line: `cp_bytes` are those of the plan."""

import json
from pathlib import Path

import numpy as np

from megatron_ext.context_parallel import plan
from megatron_ext.layout import build_layout, concatenate
from tests.conftest import SmallData
from tests.runs import RunResult, launch

STEPS, LENGTH, MICRO_BATCH = 3, 64, 2
FLAGS = f"""--seq-length {LENGTH} --micro-batch-size {MICRO_BATCH} --train-iters {STEPS} --lr-warmup-iters 1
    --window-start 7 --window-rate 30 --document-mask
    --context-parallel-size 2 --cp-policy zigzag --cp-scheme exchange""".split()


def rows_moved(run: RunResult, step: int) -> int:
    """Rows that the plans of a step's micro-batches move, from the trajectory alone."""
    dumped = np.load(run.trajectory / f"step_{step:06d}.npz")
    ends = np.split(dumped["document_ends"], dumped["document_ends_offsets"][1:-1])
    layouts = [build_layout(LENGTH, own, int(dumped["window"])) for own in ends[: len(dumped["tokens"])]]
    batches = [concatenate(layouts[first : first + MICRO_BATCH]) for first in range(0, len(layouts), MICRO_BATCH)]
    return sum(int(plan(batch, 2, "zigzag").rows_moved.sum()) for batch in batches)


def test_cp_bytes_are_the_plans(small_data: SmallData, tmp_path: Path) -> None:
    run = launch([*small_data.flags, *FLAGS], 2, tmp_path)
    model = json.loads((run.trajectory / "config.json").read_text())
    head = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    row = 2 * model["num_key_value_heads"] * head * 4
    forward_and_backward = 2 * model["num_hidden_layers"]
    wanted = [rows_moved(run, step) * row * forward_and_backward for step in range(STEPS)]
    assert run.series("cp_bytes") == wanted
    assert wanted[-1] > wanted[0] > 0
