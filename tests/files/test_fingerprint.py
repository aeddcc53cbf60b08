"""Fingerprints: what they tell apart, and what they do not."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.files.fingerprint import fingerprint


@given(st.lists(st.text() | st.binary(), max_size=4), st.lists(st.text() | st.binary(), max_size=4))
def test_fingerprints_tell_lists_of_parts_apart(one: list[str | bytes], other: list[str | bytes]) -> None:
    assert (fingerprint(*one) == fingerprint(*other)) == (one == other)


def test_a_file_counts_by_content_not_by_name(tmp_path: Path) -> None:
    for name, content in (("a", b"x" * 3_000_000), ("b", b"x" * 3_000_000), ("c", b"x" * 2_999_999 + b"y")):
        (tmp_path / name).write_bytes(content)
    prints = {name: fingerprint("data", tmp_path / name) for name in "abc"}
    assert prints["a"] == prints["b"] != prints["c"]
