"""Context parallelism through the trainer's own command line: same run, same checkpoints, `cp_bytes` of the plan."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import SmallData
from runs import RunResult, launch, relative, weight_error

from megatron_ext.context_parallel import plan
from megatron_ext.layout import build_layout, concatenate

STEPS, LENGTH, MICRO_BATCH = 6, 64, 2
TOLERANCE = 1e-5
COMMON = f"""--lr 1e-4 --min-lr 1e-5
    --seq-length {LENGTH} --micro-batch-size {MICRO_BATCH} --lr-warmup-iters 2 --lr-decay-iters {STEPS}
    --window-start 7 --window-rate 15 --document-mask --eod-mask-loss
    --eval-interval 3 --eval-iters 1 --eval-lengths 7 {LENGTH}""".split()
CP2 = ("--context-parallel-size", 2, "--cp-policy", "zigzag", "--cp-scheme", "exchange")


class Runs:
    """Runs of one data set, each made once."""

    def __init__(self, data: SmallData, factory: pytest.TempPathFactory) -> None:
        self.data, self.folder = data, factory.mktemp("runs")
        self._made: dict[str, RunResult] = {}

    def __call__(self, name: str, processes: int, steps: int, *flags: object) -> RunResult:
        if name not in self._made:
            every = [*self.data.flags, *COMMON, "--train-iters", steps, *flags]
            self._made[name] = launch(every, processes, self.folder / name)
        return self._made[name]


@pytest.fixture(scope="module")
def runs(small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(small_data, tmp_path_factory)


def assert_same_run(run: RunResult, whole: RunResult) -> None:
    """The run's steps and its final weights are those of the whole run, to 1e-5."""
    wanted = {record["step"]: record for record in whole.metrics}
    assert run.series("step")[-1] == STEPS - 1
    errors = {}
    for key in ("lm_loss", "train_loss", "grad_norm"):
        errors[key] = relative(run.series(key), [wanted[step][key] for step in run.series("step")])
    for key in ("window", "segments", "effective_context", "denominator", "learning_rate", "consumed_samples"):
        assert run.series(key) == [wanted[step][key] for step in run.series("step")], key
    evaluations = {record["step"]: record["by_length"] for record in whole.evaluations}
    errors["validation"] = max(
        relative(list(record["by_length"].values()), list(evaluations[record["step"]].values()))
        for record in run.evaluations
    )
    errors["weights"] = weight_error(run.weights("final"), whole.weights("final"))[0]
    print(", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert max(errors.values()) <= TOLERANCE, errors


def test_two_context_parallel_ranks_train_the_same_model(runs: Runs) -> None:
    assert_same_run(runs("cp2", 2, STEPS, *CP2), runs("whole", 1, STEPS))


def rows_moved(run: RunResult, step: int) -> int:
    """Rows that the plans of a step's micro-batches move, from the trajectory alone."""
    dumped = np.load(run.trajectory / f"step_{step:06d}.npz")
    ends = np.split(dumped["document_ends"], dumped["document_ends_offsets"][1:-1])
    layouts = [build_layout(LENGTH, own, int(dumped["window"])) for own in ends[: len(dumped["tokens"])]]
    batches = [concatenate(layouts[first : first + MICRO_BATCH]) for first in range(0, len(layouts), MICRO_BATCH)]
    return sum(int(plan(batch, 2, "zigzag").rows_moved.sum()) for batch in batches)


def test_cp_bytes_are_the_plans(runs: Runs) -> None:
    run = runs("cp2", 2, STEPS, *CP2)
    model = json.loads((run.trajectory / "config.json").read_text())
    head = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    row = 2 * model["num_key_value_heads"] * head * 4
    forward_and_backward = 2 * model["num_hidden_layers"]
    wanted = [rows_moved(run, step) * row * forward_and_backward for step in range(STEPS)]
    assert run.series("cp_bytes") == wanted
    assert wanted[-1] > wanted[0] > 0
    assert set(runs("whole", 1, STEPS).series("cp_bytes")) == {0}


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_continues_on_one(runs: Runs) -> None:
    saved = runs("cp2 half", 2, STEPS // 2, *CP2)
    continued = runs("continued on one", 1, STEPS, "--load", saved.folder)
    assert continued.series("step") == [3, 4, 5]
    assert_same_run(continued, runs("whole", 1, STEPS))


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_continues_on_two(runs: Runs) -> None:
    saved = runs("half", 1, STEPS // 2)
    continued = runs("continued on two", 2, STEPS, "--load", saved.folder, *CP2)
    assert continued.series("step") == [3, 4, 5]
    assert_same_run(continued, runs("whole", 1, STEPS))


@pytest.mark.slow
def test_a_distributed_optimizer_over_context_ranks_is_saved_whole(runs: Runs) -> None:
    distributed = "--use-distributed-optimizer"
    saved = runs("cp2 distributed half", 2, STEPS // 2, *CP2, distributed)
    continued = runs("distributed continued on one", 1, STEPS, "--load", saved.folder, distributed)
    assert continued.series("step") == [3, 4, 5]
    assert_same_run(continued, runs("whole", 1, STEPS))


@pytest.mark.slow
def test_ulysses_on_four_ranks_with_two_per_matrix(runs: Runs) -> None:
    flags = ("--context-parallel-size", 2, "--cp-scheme", "ulysses", "--num-query-groups", 4)
    tensor = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
    run = runs("ulysses", 4, STEPS, *flags, *tensor)
    assert_same_run(run, runs("whole with 4 groups", 1, STEPS, "--num-query-groups", 4))
