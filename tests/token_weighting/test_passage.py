"""passage.json is read as it was written, and damage is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monitoring.records import passage_record, write_passage_file

from megatron_ext.errors import UserError
from megatron_ext.token_weighting.passage import Passage

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def test_a_passage_is_read_as_it_was_written(tmp_path: Path) -> None:
    passage = Passage(step=3, start=2, tokens=(104, 105), texts=("h", "i"), weights=(0.0, 1.5), scores=(None, 0.25))
    passage.write(tmp_path)
    assert Passage.read(tmp_path) == passage
    assert [path.name for path in tmp_path.iterdir()] == ["passage.json"]
    assert Passage.read(write_passage_file(tmp_path, texts=None)).texts is None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(passage_record())), value=ANY_JSON)
def test_any_value_of_a_field_is_shown_or_refused_in_one_line(tmp_path: Path, key: str, value: Any) -> None:
    write_passage_file(tmp_path, **{key: value})
    refusal = ""
    try:
        spans = Passage.read(tmp_path).html().count("<span")
    except UserError as error:
        spans, refusal = 4, str(error)
    assert spans == 4
    assert not refusal or refusal.startswith(f"{tmp_path / 'passage.json'}: ")
    assert "\n" not in refusal


def test_damage_is_refused(tmp_path: Path) -> None:
    path = write_passage_file(tmp_path) / "passage.json"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"passage\.json: damaged: .*; delete the file"):
        Passage.read(tmp_path)
    with pytest.raises(UserError, match="lists differ in length"):
        Passage.read(write_passage_file(tmp_path, weights=[1.0, 2.0]))
