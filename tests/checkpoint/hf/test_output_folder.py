"""A converted model's folder is complete or absent, and nothing else is removed for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.checkpoint.hf.output_folder import written_aside
from megatron_ext.errors import UserError


def write(output: Path, text: str, overwrite: bool = False) -> None:
    with written_aside(output, overwrite=overwrite) as folder:
        (folder / "config.json").write_text(text)
        old = output / "config.json"
        assert not old.exists() or old.read_text() != text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_appears_whole_and_is_replaced_whole(tmp_path: Path) -> None:
    output = tmp_path / "model"
    write(output, "one")
    with pytest.raises(UserError, match="exists; choose another folder or add --overwrite"):
        write(output, "two")
    write(output, "two", overwrite=True)
    assert (output / "config.json").read_text() == "two"
    assert names(tmp_path) == ["model"]


def test_a_failure_leaves_what_stood_there(tmp_path: Path) -> None:
    output = tmp_path / "model"
    write(output, "one")
    with pytest.raises(TypeError), written_aside(output, overwrite=True) as folder:
        (folder / "config.json").write_text(None)  # type: ignore[arg-type]
    assert (output / "config.json").read_text() == "one"
    assert names(tmp_path) == ["model"]


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    """The old model is back before the next conversion looks whether it may write."""
    output = tmp_path / "model"
    write(output, "one")
    output.rename(tmp_path / "model.replaced")
    (tmp_path / "model.incomplete").mkdir()
    with pytest.raises(UserError, match="exists; choose another folder or add --overwrite"):
        write(output, "two")
    assert (output / "config.json").read_text() == "one"
    write(output, "two", overwrite=True)
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("name", ["notes.txt", "optimizer.pt", "checkpoints/iter_0000500/x"])
def test_a_file_of_somebody_else_is_not_removed(tmp_path: Path, name: str) -> None:
    output = tmp_path / "model"
    write(output, "one")
    (output / name).parent.mkdir(parents=True, exist_ok=True)
    (output / name).write_text("work of weeks")
    with pytest.raises(UserError, match="is nothing that a conversion writes and will not be removed"):
        write(output, "two", overwrite=True)
    assert (output / name).read_text() == "work of weeks"


def test_neither_a_link_nor_a_folder_without_a_model_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "model", "one")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").touch()
    for name in ("link", "other"):
        with pytest.raises(UserError, match="is not a model's folder, --overwrite will not remove it"):
            write(tmp_path / name, "two", overwrite=True)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "two", overwrite=True)
    assert names(tmp_path / "empty") == ["config.json"]
