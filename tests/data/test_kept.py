"""Arrays that one process computes and all map: the same values in all cases, computed once where that is possible."""

import errno
import fcntl
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.kept import Arrays, kept_arrays

KEY = {"seed": 7, "epoch": 0}


def squares() -> Arrays:
    return {"squares": np.arange(1000) ** 2}


def not_needed() -> Arrays:
    raise AssertionError("the arrays are kept, but were computed again")


def compute_and_count(folder: Path) -> Arrays:
    (folder / f"computed by {os.getpid()}").touch()
    return squares()


def squares_in_process(folder: Path) -> int:
    return int(kept_arrays(folder / "kept", KEY, lambda: compute_and_count(folder))["squares"].sum())


def test_of_several_processes_one_computes(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        sums = pool.map(squares_in_process, [tmp_path] * 6, chunksize=1)
    assert sums == [int(squares()["squares"].sum())] * 6
    assert len(list(tmp_path.glob("computed by *"))) == 1


def test_kept_arrays_are_mapped_not_loaded(tmp_path: Path) -> None:
    kept_arrays(tmp_path, KEY, squares)
    array = kept_arrays(tmp_path, KEY, not_needed)["squares"]
    np.testing.assert_array_equal(array, squares()["squares"])
    assert isinstance(array.base, np.memmap)
    assert not array.flags.writeable


@pytest.mark.parametrize("damage", ["file truncated", "file missing", "no description", "description of another"])
def test_damaged_arrays_are_computed_again(tmp_path: Path, damage: str) -> None:
    kept_arrays(tmp_path, KEY, squares)
    (file,) = tmp_path.glob("*/squares.npy")
    about = file.with_name("about.json")
    if damage == "file truncated":
        os.truncate(file, file.stat().st_size - 8)
    elif damage == "file missing":
        file.unlink()
    elif damage == "no description":
        about.write_text("{")
    else:
        about.write_text(about.read_text().replace('"seed": 7', '"seed": 8'))
    for _ in range(2):
        np.testing.assert_array_equal(kept_arrays(tmp_path, KEY, squares)["squares"], squares()["squares"])
    kept_arrays(tmp_path, KEY, not_needed)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    kept_arrays(tmp_path, KEY, squares)
    (file,) = tmp_path.glob("*/squares.npy")
    left = file.parent.rename(f"{file.parent}.0123456789abcdef.partial")
    kept_arrays(tmp_path, KEY, squares)
    assert not left.exists()
    kept_arrays(tmp_path, KEY, not_needed)


def test_another_key_is_computed(tmp_path: Path) -> None:
    kept_arrays(tmp_path, KEY, squares)
    other_arrays = kept_arrays(tmp_path, KEY | {"epoch": 1}, lambda: {"squares": np.zeros(3)})
    assert other_arrays["squares"].tolist() == [0, 0, 0]
    kept_arrays(tmp_path, KEY, not_needed)


def test_a_folder_that_cannot_be_written_costs_only_the_sharing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    array = kept_arrays(tmp_path / "file" / "kept", KEY, squares)["squares"]
    np.testing.assert_array_equal(array, squares()["squares"])
    assert "cannot be used" in caplog.text


def test_without_locks_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of a thousand processes would write its copy to the shared file system."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    array = kept_arrays(tmp_path, KEY, squares)["squares"]
    np.testing.assert_array_equal(array, squares()["squares"])
    assert not list(tmp_path.glob("*/*.npy"))
