"""A damaged checkpoint is found and named, whichever file it is; the one before it is offered, and taken if asked."""

import contextlib
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.manifest import Manifest
from pretrain_skyladder import main
from tests.conftest import SmallData
from tests.launcher import Commands, call
from tests.runs import CONFIG, TRAINER, read_jsonl, refused_command, without_times

Spoil = Callable[[Path], None]
COMMON = ["--seq-length", "64", "--lr-decay-iters", "6", "--window-start", "7"]
NEWEST, BEFORE = "iter_0000004", "iter_0000002"
TENSORS = "tensors_00000.safetensors"
POINTER = "latest_checkpointed_iteration.txt"


def flags(data: SmallData, run: Path, steps: int, *more: object) -> list[object]:
    return [*CONFIG, *COMMON, *data.flags, "--train-iters", steps, "--save", run, *more]


@pytest.fixture(scope="module")
def saved(alone: Commands, small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after 2 and 4 steps."""
    run = tmp_path_factory.mktemp("damage") / "run"
    alone.run(TRAINER, *flags(small_data, run, 4, "--save-interval", 2))
    return run


@pytest.fixture(scope="module")
def whole(alone: Commands, small_data: SmallData, saved: Path) -> list[dict]:
    """The metrics of 6 steps without any damage."""
    run = saved.with_name("whole")
    alone.run(TRAINER, *flags(small_data, run, 6))
    return without_times(read_jsonl(run / "metrics.jsonl"))


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def going_on(rank: int, argv: list[str], steps: list[int]) -> tuple[int, str]:
    """Return how a process ends that finds the checkpoint of its place in `steps`."""
    folder = folders.folder_name(steps[rank])
    folders.locate = lambda run, **unused: folders.read_checkpoint(run / "checkpoints" / folder)  # type: ignore[assignment]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        return main(argv), errors.getvalue()


def test_processes_that_see_different_checkpoints(small_data: SmallData, run: Path) -> None:
    argv = [str(word) for word in flags(small_data, run, 6, "--load", run)]
    ends = call(going_on, 2, argv, [4, 2], group=False)
    assert [status for status, _ in ends] == [1, 1]  # a crash, which is tried again
    for _, message in ends:
        assert "load: got iter_0000004 (sha256 " in message
        assert ") on rank 0, iter_0000002 (sha256 " in message
    assert [status for status, _ in call(going_on, 2, argv, [4, 4], group=False)] == [0, 0]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped_at(share: float) -> Spoil:
    def flipped(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(share * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return flipped


@pytest.mark.parametrize(("name", "spoil"), [(TENSORS, Path.unlink), ("manifest.json", truncated)])
def test_the_file_at_fault_is_named(alone: Commands, small_data: SmallData, run: Path, name: str, spoil: Spoil) -> None:
    """The message offers the checkpoint before it."""
    path = run / "checkpoints" / NEWEST / name
    spoil(path)

    def files() -> list[tuple[Path, int]]:
        paths = [file for file in sorted(run.rglob("*")) if file.is_file() and file.name != "lock"]
        return [(file, file.stat().st_mtime_ns) for file in paths]

    before = files()
    line = refused_command(alone, TRAINER, *flags(small_data, run, 6, "--load", run))
    assert line.startswith(f"load: {path} ")
    assert line.endswith(f"{run / 'checkpoints' / BEFORE} is complete: name that folder instead")
    assert files() == before


def test_damaged_weights(alone: Commands, small_data: SmallData, run: Path, tmp_path: Path) -> None:
    """No flag takes the checkpoint before where weights alone are taken: it has to be named."""
    path = run / "checkpoints" / NEWEST / TENSORS
    flipped_at(0.5)(path)
    line = refused_command(alone, TRAINER, *flags(small_data, tmp_path / "new", 6, "--init-from", run))
    export = ("megatron-to-hf", "--input", run, "--output", tmp_path / "export", "--tokenizer", "none")
    for message in (line, refused_command(alone, "tools/convert_checkpoint.py", *export)):
        assert message.startswith(f"load: {path} ")
        assert message.endswith(f"{run / 'checkpoints' / BEFORE} is complete: name that folder instead")
    alone.run(TRAINER, *flags(small_data, tmp_path / "new", 1, "--init-from", run / "checkpoints" / BEFORE))


@pytest.mark.parametrize(("name", "spoil"), [(TENSORS, flipped_at(0.5)), ("manifest.json", Path.unlink)])
def test_the_checkpoint_before_is_taken_if_asked(
    alone: Commands, small_data: SmallData, run: Path, whole: list[dict], name: str, spoil: Spoil
) -> None:
    spoil(run / "checkpoints" / NEWEST / name)
    again = flags(small_data, run, 6, "--load", run, "--load-latest-complete", "--save-interval", 2)
    alone.run(TRAINER, *again)
    assert without_times(read_jsonl(run / "metrics.jsonl")) == whole
    alone.run(TRAINER, *flags(small_data, run, 6, "--load", run / "checkpoints" / NEWEST))  # whole again


def test_without_verification_sizes_are_still_checked(alone: Commands, small_data: SmallData, run: Path) -> None:
    path = run / "checkpoints" / NEWEST / TENSORS
    flipped_at(1)(path)
    argv = flags(small_data, run, 5, "--load", run, "--no-verify-load")
    alone.run(TRAINER, *argv)  # the last byte is one of the random states
    truncated(path)
    shutil.rmtree(run / "checkpoints" / "iter_0000005")
    (run / "checkpoints" / POINTER).write_text("4")
    assert refused_command(alone, TRAINER, *argv).startswith(f"load: {path} is damaged: ")


def test_a_vocabulary_of_another_size_is_seen_in_the_tensors(alone: Commands, small_data: SmallData, run: Path) -> None:
    """The tokenizer that decided it is gone; a number that says the same is no change."""
    folder = run / "checkpoints" / NEWEST
    manifest = Manifest.read(folder)
    data = manifest.config["data"] | {"tokenizer_model": "nowhere"}
    replace(manifest, config=manifest.config | {"data": data}).write(folder)
    again = flags(small_data, run, 5, "--load", run, "--override", "tokenizer_model", "--vocab-size")
    message = refused_command(alone, TRAINER, *again, 2048)
    assert f"weight: got (2048, 128), {folder} needs (1024, 128); use its config.yaml" in message
    alone.run(TRAINER, *again, 1024)
