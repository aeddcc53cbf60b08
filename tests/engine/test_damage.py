"""Two processes look for damage and agree on the checkpoint that is taken; tests/faults/ damages real ones."""

import logging
from pathlib import Path

import pytest

from megatron_ext.checkpoint.folders import read_checkpoint
from megatron_ext.engine.state import agree, undamaged
from tests.checkpoint.test_folders import write
from tests.launcher import call


def looked_at(rank: int, folder: str) -> tuple[str, list[str]]:
    """The name of the checkpoint that is taken, and what is logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_ext.engine.state").addHandler(handler)
    return undamaged(read_checkpoint(Path(folder)), content=True, past_damaged=True).folder.name, lines


def found(rank: int, names: list[str | None]) -> str:
    """Return what a process is told that has found the checkpoint of its place in `names`."""
    name = names[rank]
    try:
        agree(None if name is None else read_checkpoint(Path(name)))
    except RuntimeError as error:
        return str(error)
    return "agreed"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, the newest with another content of the same size."""
    for step in (3, 6, 9):
        write(tmp_path, step)
    folder(tmp_path, 9).joinpath("file").write_bytes(b"TENSORS")
    return tmp_path


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"iter_{step:07d}"


def test_the_log_names_what_is_taken_instead(run: Path) -> None:
    folder(run, 6).joinpath("file").write_bytes(b"TENSORS")
    (first, lines), (second, silent) = call(looked_at, 2, str(folder(run, 9)))
    assert first == second == "iter_0000003"
    assert [line.rsplit("taking ", 1)[1] for line in lines] == [str(folder(run, 6)), str(folder(run, 3))]
    assert silent == []


def test_all_have_to_have_found_the_same(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An old view of the file system: another step, none yet, or what had this step before the run went back."""
    six = str(folder(run, 6))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    before = str(write(elsewhere, 6, b"of another future"))
    for names in ([six, six, six], [None, None, None]):
        assert call(found, 3, names) == ["agreed"] * 3
    new_digest, old_digest = (read_checkpoint(Path(name)).manifest.digest[:8] for name in (six, before))
    for names, listed in (
        ([None, six, six], f"none on rank 0, iter_0000006 (sha256 {new_digest}) on rank 1"),
        (
            [six, six, before],
            f"iter_0000006 (sha256 {new_digest}) on rank 0, iter_0000006 (sha256 {old_digest}) on rank 2",
        ),
    ):
        messages = call(found, 3, names)
        assert len(set(messages)) == 1
        assert messages[0].startswith(f"load: got {listed}, needs the same checkpoint for all; ")
