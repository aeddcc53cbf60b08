"""A run's checkpoint folders: the pointer, what is complete, what may go."""

import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.folders import POINTER
from megatron_ext.checkpoint.manifest import facts_of
from tests.checkpoint.test_manifest import manifest
from tests.conftest import refused
from tests.launcher import ROOT


def write(run: Path, step: int, content: bytes = b"tensors") -> Path:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    aside = folders.begin(run, step)
    (aside / "file").write_bytes(content)
    replace(manifest({"file": facts_of(aside / "file")}), step=step).write(aside)
    return folders.publish(aside)


def located(path: Path, **more: bool) -> Path | None:
    checkpoint = folders.locate(path, **more)
    return None if checkpoint is None else checkpoint.folder


def test_a_published_checkpoint_is_the_latest(tmp_path: Path) -> None:
    assert located(tmp_path) is None
    for step in (3, 12):
        assert write(tmp_path, step) == located(tmp_path)
    latest = located(tmp_path)
    aside = folders.begin(tmp_path, 16)
    (aside / "file").write_bytes(b"half")
    assert located(tmp_path) == latest
    assert folders.saved_steps(tmp_path) == [3, 12]
    assert folders.begin(tmp_path, 18).exists()
    assert not aside.exists()  # the next one clears it away
    (tmp_path / "checkpoints" / POINTER).unlink()  # as after a kill between the first rename and the first pointer
    assert located(tmp_path) == latest


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff4", f"{POINTER} holds "),
        (b"-4", f"{POINTER} holds '-4', needs the number of a step"),
        (b"5", "iter_0000005/manifest.json "),
    ],
)
def test_a_pointer_that_leads_nowhere_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    write(tmp_path, 3)
    pointer = tmp_path / "checkpoints" / POINTER
    pointer.write_bytes(content)
    assert refused(located, tmp_path).startswith(f"load: {pointer.parent}/{text}")


def test_a_run_that_goes_back_forgets_the_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointer goes back first: after a kill, whoever begins again from it puts the rest away."""
    back = write(tmp_path, 3)
    later = write(tmp_path, 6, b"of the other future")

    def killed(folder: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            folders.rewind(back)
    assert located(tmp_path) == back
    (put_away,) = folders.rewind(back)
    assert located(tmp_path) == back
    assert (put_away / "file").read_bytes() == b"of the other future"
    assert not later.exists()
    assert folders.rewind(back) == []
    # what is saved after it falls between the steps that were left, which are neither counted nor offered
    fifth_step, seventh_step = write(tmp_path, 5), write(tmp_path, 7)
    folders.delete_superfluous(tmp_path, 7, 2, 0)
    assert folders.saved_steps(tmp_path) == [5, 7]
    (seventh_step / "manifest.json").unlink()
    assert located(tmp_path, past_damaged=True) == fifth_step


def test_a_name_of_another_step_is_refused(tmp_path: Path) -> None:
    older = write(tmp_path, 3)
    misnamed = tmp_path / "checkpoints" / "iter_0000009"
    shutil.copytree(older, misnamed)
    assert f"{misnamed} holds the checkpoint of step 3; give it that name; {older} is" in refused(located, misnamed)


def test_past_the_damaged_to_the_newest_complete(tmp_path: Path) -> None:
    complete, damaged, newest = (write(tmp_path, step) for step in (3, 6, 9))
    (newest / "manifest.json").unlink()
    (damaged / "file").write_bytes(b"")
    assert f"{complete} is complete: name" in refused(located, tmp_path)
    assert located(tmp_path, past_damaged=True) == complete
    assert located(newest, past_damaged=True) == complete
    (complete / "manifest.json").unlink()
    assert refused(located, tmp_path, past_damaged=True).endswith("take another checkpoint")


@pytest.mark.parametrize(
    ("last", "every", "stay"),
    [(0, 0, [1, 2, 3, 4, 5, 6, 7]), (3, 0, [5, 6, 7]), (9, 0, [1, 2, 3, 4, 5, 6, 7]), (1, 3, [3, 6, 7])],
)
def test_what_stays(tmp_path: Path, last: int, every: int, stay: list[int]) -> None:
    for step in range(1, 8):
        write(tmp_path, step)
    folders.delete_superfluous(tmp_path, 7, last, every)
    assert folders.saved_steps(tmp_path) == stay
    assert located(tmp_path) == tmp_path / "checkpoints" / "iter_0000007"


def test_the_tool_lists_checkpoints_and_finds_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, 2, bytes(2000))
    folders.begin(tmp_path, 4)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "lm_loss": 5.7}\n{"step": 1, "lm_loss": 5.5658}\n')
    main = runpy.run_path(str(ROOT / "tools" / "checkpoints.py"))["main"]
    assert main([str(tmp_path), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:2] == ["2", "320"]
    assert "5.5658" in lines[2]
    assert lines[3] == f"--load {tmp_path} takes step 2"
    assert lines[4].startswith("iter_0000004.")
    (folder / "file").write_bytes(bytes(1999) + b"x")
    assert main([str(tmp_path)]) == 0  # sizes alone
    assert main([str(tmp_path), "--verify"]) == 1
    assert "file is damaged: its checksum differs" in capsys.readouterr().out
    (folder / "file").unlink()
    assert main([str(tmp_path)]) == 1
