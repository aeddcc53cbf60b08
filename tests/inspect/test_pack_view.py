"""The text of a row, read back and compared with a dense mask, and its picture."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.inspect.pack_view import (
    PALE,
    WIDTH,
    PackView,
    describe,
    document_name,
    mask_image,
    rank_colors,
    view_row,
    write_pack,
)  # fmt: skip

POLICIES = ["auto", "contiguous", "zigzag", "balanced"]


@st.composite
def views(draw: Any, longest: int = 160) -> PackView:
    ranks = draw(st.integers(1, 5))
    length = ranks * draw(st.integers(1, longest // ranks))
    return view_row(
        length,
        draw(st.lists(st.integers(0, length), max_size=12)),
        window=draw(st.none() | st.integers(1, length + 1)),
        document_mask=draw(st.booleans()),
        cp_size=ranks,
        policy=draw(st.sampled_from(POLICIES)),
    )


def dense(view: PackView) -> npt.NDArray[np.bool_]:
    """bool [T, T]: query i sees key j, straight from the definition."""
    i, j = np.arange(view.tokens)[:, None], np.arange(view.tokens)[None, :]
    sees = (j <= i) & (i // view.window == j // view.window)
    if view.document_mask:
        document = np.searchsorted(view.documents, np.arange(view.tokens), side="right")
        sees &= document[i] == document[j]
    return sees


def owners(view: PackView) -> npt.NDArray[np.int64]:
    """int64 [T], from the rows of each rank."""
    owner = np.full(view.tokens, -1)
    for rank in range(view.ranks):
        owner[view.plan.rows[rank]] = rank
    return owner


def drawn(text: str, name: str) -> list[str]:
    """The cells of a line, over all its folds."""
    return [cell for line in text.splitlines() if line.startswith(name.ljust(9)) for cell in line[9:].split()]


@given(views())
def test_the_view_against_a_dense_mask(view: PackView) -> None:
    seen = dense(view).sum(axis=1)
    np.testing.assert_array_equal(view.keys, seen)
    np.testing.assert_array_equal(view.owner, owners(view))


@given(views(longest=128))
def test_the_cells_of_a_short_row_are_the_row(view: PackView) -> None:
    text = describe(view)
    documents = np.searchsorted(view.documents, np.arange(view.tokens), side="right") - 1
    segments = np.searchsorted(view.layout.cu_seqlens, np.arange(view.tokens), side="right") - 1
    assert drawn(text, "token") == [str(token) for token in range(view.tokens)]
    assert drawn(text, "document") == [document_name(number) for number in documents]
    assert drawn(text, "segment") == [str(number) for number in segments]
    assert drawn(text, "keys") == [str(count) for count in dense(view).sum(axis=1)]
    assert max(len(line) for line in text.splitlines() if line.startswith("token ")) <= WIDTH
    row = text.split("\n\nrank 0 ")[0]
    assert drawn(row, "rank") == ([str(rank) for rank in owners(view)] if view.ranks > 1 else [])


def test_texts_are_printable_and_short() -> None:
    text = describe(view_row(3, []), texts=[" a", "\n", "<|endoftext|>"])
    assert drawn(text, "text") == ["·a", "\\n", "<|endofte…"]


def test_refusals_and_their_accepted_neighbours() -> None:
    view = view_row(129, [])
    with pytest.raises(UserError, match=r"text: got a row of 129 tokens, needs one of up to 128"):
        describe(view, texts=["a"] * 129)
    assert describe(view_row(128, []), texts=["a"] * 128)
    with pytest.raises(UserError, match=r"document_ends: got values from 3 to 13, needs 0\.\.12"):
        view_row(12, [3, 13], document_mask=False)
    assert len(view_row(12, [3, 12], document_mask=False).documents) == 3
    with pytest.raises(UserError, match="row_length: got 0"):
        view_row(0, [])


@given(views())
def test_a_cell_has_the_color_of_the_querys_rank_and_is_pale_where_the_key_is_fetched(view: PackView) -> None:
    image, owner = mask_image(view), owners(view)
    colors = np.broadcast_to(rank_colors(view.ranks)[owner][:, None], image.shape)
    fetched = (owner[:, None] != owner)[..., None]
    expected = np.where(fetched, 1 - (1 - colors) * PALE, colors)
    np.testing.assert_allclose(image, np.where(dense(view)[..., None], expected, 1.0))


def test_the_picture_is_written_atomically(tmp_path: Path) -> None:
    view = view_row(12, [3], cp_size=2)
    path = tmp_path / "new" / "row.png"
    assert write_pack(view, path) == path
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OSError, match=r"taken\.png"):
        write_pack(view, tmp_path / "taken.png")
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["new", "row.png", "taken.png"]
    with pytest.raises(UserError, match=r"output: got 'row.jpg', needs a file name that ends in .png"):
        write_pack(view, Path("row.jpg"))
