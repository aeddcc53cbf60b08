"""The manifest of a checkpoint: what was written reads back, and no byte of it can change unseen."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.checkpoint.manifest import MANIFEST, FileFacts, Manifest, code_identity, facts_of
from megatron_ext.config import Config
from megatron_ext.config.arguments import to_dict
from tests.conftest import refused


def manifest(files: dict[str, FileFacts]) -> Manifest:
    facts = {"step": 40, "consumed_samples": 320, "layout": {"tensor": 1, "device": "cpu"}, "optimizer": {"step": 39}}
    return Manifest(**facts, config=to_dict(Config()), code=code_identity(), files=files, seconds=0.25)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {"a": b"x" * 1000, "b": b"", "c": bytes(range(256))}.items():
        (tmp_path / name).write_bytes(content)
    manifest({path.name: facts_of(path) for path in list(tmp_path.iterdir())}).write(tmp_path)
    return tmp_path


def test_what_was_written_reads_back(folder: Path) -> None:
    read = Manifest.read(folder)
    assert read == manifest({name: facts_of(folder / name) for name in "abc"})
    read.check_files(folder, read.files, content=True)


@given(data=st.data())
def test_no_byte_of_it_can_change_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    manifest({"a": FileFacts(1, "0")}).write(folder)
    content = bytearray((folder / MANIFEST).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    changed = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
    before = json.loads(content)
    content[place] = changed
    (folder / MANIFEST).write_bytes(content)
    try:
        is_unchanged = json.loads(content) == before  # another kind of white space
    except ValueError:
        is_unchanged = False
    if is_unchanged:
        assert Manifest.read(folder).step == 40
    else:
        assert f"load: {folder / MANIFEST} is damaged: " in refused(Manifest.read, folder)


def test_another_format_is_refused(folder: Path) -> None:
    old = Manifest.read(folder)
    Manifest(**{name: getattr(old, name) for name in vars(old)} | {"format": 7}).write(folder)
    assert "has format 7, this version reads 2" in refused(Manifest.read, folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", ""])
def test_a_name_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    """A manifest with the right checksum, as anyone can write it."""
    replace(Manifest.read(folder), files={name: FileFacts(5, "0" * 64)}).write(folder)
    assert "which is outside its folder, needs files in " in refused(Manifest.read, folder)
