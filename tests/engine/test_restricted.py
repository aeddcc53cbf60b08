"""common.pt, damaged in every way that torch.load meets with another error; tests/faults/ plants pickles in it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint.formats.metadata import COMMON
from megatron_ext.engine.restricted import read_common
from megatron_ext.errors import UserError


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


WHOLE = saved({"iteration": 3})


def test_plain_values_are_read(tmp_path: Path) -> None:
    (tmp_path / COMMON).write_bytes(WHOLE)
    assert read_common(tmp_path) == {"iteration": 3}


@pytest.mark.parametrize(
    "content",
    [b"", WHOLE[:2], WHOLE[:100], WHOLE[:-1], bytes(len(WHOLE)), b"\x80" * len(WHOLE), b"(" + WHOLE[1:]],
    ids=["empty", "two bytes", "cut off", "a byte short", "zeros", "no pickle", "no archive"],
)
def test_damage_is_a_line_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / COMMON).write_bytes(content)
    with pytest.raises(UserError, match=r"^load: .*/common\.pt is no plain data \(.+\); take another checkpoint$"):
        read_common(tmp_path)


def test_anything_but_a_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / COMMON).write_bytes(saved([3]))
    with pytest.raises(UserError, match=r"common\.pt holds list, needs a mapping; take another checkpoint"):
        read_common(tmp_path)
    (tmp_path / COMMON).unlink()
    with pytest.raises(UserError, match=r"common\.pt cannot be read \(No such file or directory\)"):
        read_common(tmp_path)
