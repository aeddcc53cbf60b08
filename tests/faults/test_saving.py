"""When checkpoints are written, which stay, and what metrics.jsonl says of the time that they took."""

import shutil
from pathlib import Path

from megatron_ext.checkpoint.folders import saved_steps
from tests.conftest import SmallData
from tests.faults.test_kills import assert_complete
from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER, refused_command, series

COMMON = [*CONFIG, "--seq-length", 64, "--train-iters", 8, "--window-start", 7]


def test_intervals_and_what_stays(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    keeping = ["--save-interval", 3, "--keep-last", 1, "--keep-every", 6]
    alone.run(TRAINER, *COMMON, *small_data.flags, *keeping, "--save", tmp_path)
    assert saved_steps(tmp_path) == [6, 8]
    assert_complete(tmp_path)
    stalls = series(tmp_path, "save_stall_s")
    assert [stall > 0 for stall in stalls] == [step in (3, 6) for step in range(8)]
    # by the clock
    for seconds, saved in ((1e-3, [1, 2, 3]), (1e6, [3])):
        run = tmp_path / str(seconds)
        flags = ["--train-iters", 3, "--lr-decay-iters", 8, "--save-seconds", seconds, "--save", run]
        alone.run(TRAINER, *COMMON, *small_data.flags, *flags)
        assert saved_steps(run) == saved


def test_asynchronous_checkpoints(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """Each is written while the next steps change the tensors; going on from each gives the same losses."""
    saving = ["--async-save", "--save-interval", 2]
    alone.run(TRAINER, *COMMON, *small_data.flags, *saving, "--save", tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [2, 4, 6, 8]
    for step in (2, 6):
        source = tmp_path / "run" / "checkpoints" / f"iter_{step:07d}"
        alone.run(TRAINER, *COMMON, *small_data.flags, "--load", source, "--save", tmp_path / str(step))
        assert series(tmp_path / str(step), "lm_loss") == series(tmp_path / "run", "lm_loss")[step:]


def test_going_back_by_the_pointer(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """docs/health.md goes back like this under Slurm, where --load names the run; a later start goes on."""
    flags = [*COMMON, *small_data.flags, "--save-interval", 2, "--save", tmp_path, "--load", tmp_path]
    flags += ["--load-if-present"]
    alone.run(TRAINER, *flags)
    whole = series(tmp_path, "lm_loss")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4\n")
    for _ in range(2):
        alone.run(TRAINER, *flags, "--lr", 1e-4, "--override", "lr")
        is_equal = [lowered == before for lowered, before in zip(series(tmp_path, "lm_loss"), whole, strict=True)]
        assert is_equal == [True] * 5 + [False] * 3
        assert saved_steps(tmp_path) == [2, 4, 6, 8]
        left_folders = sorted(path.name.split(".")[0] for path in (tmp_path / "checkpoints").glob("*.left"))
        assert left_folders == ["iter_0000006", "iter_0000008"]


def test_other_contents_under_the_same_name(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    for ending in (".bin", ".idx", ".json"):
        shutil.copy(f"{small_data.prefix}{ending}", tmp_path / f"data{ending}")
    data = ["--data-path", tmp_path / "data", "--tokenizer-model", small_data.tokenizer]
    flags = [*COMMON, *data, "--save", tmp_path / "run", "--window-schedule", "constant", "--lr-decay-iters", 9]
    alone.run(TRAINER, *flags, "--train-iters", 6)
    on = [*flags, "--load", tmp_path / "run"]
    alone.run(TRAINER, *on, "--train-iters", 7)
    tokens = bytearray((tmp_path / "data.bin").read_bytes())
    tokens[:2], tokens[2:4] = tokens[2:4], tokens[:2]
    (tmp_path / "data.bin").write_bytes(tokens)
    message = refused_command(alone, TRAINER, *on, "--train-iters", 8)
    assert f"load: {tmp_path}/data is not the data that {tmp_path}/run/checkpoints/iter_0000007" in message
    assert saved_steps(tmp_path / "run") == [6, 7]
    alone.run(TRAINER, *on, "--train-iters", 8, "--override", "data_path")
    assert saved_steps(tmp_path / "run") == [6, 7, 8]
