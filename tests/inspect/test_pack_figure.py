"""The picture of a row: its cells against a dense mask, its colours, and how it is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_pack_view import dense, owners, views

from megatron_ext.errors import UserError
from megatron_ext.inspect.pack_figure import PALE, draw_pack, mask_cells, rank_colours, write_pack
from megatron_ext.inspect.pack_view import PackView, view_row

PNG = b"\x89PNG\r\n\x1a\n"


@given(views(), st.integers(1, 40))
def test_the_pairs_of_each_cell_against_a_dense_mask(view: PackView, cells: int) -> None:
    cells = min(cells, view.tokens)
    sees, owner = dense(view), owners(view)
    starts = np.arange(cells) * view.tokens // cells

    def summed(mask: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.add.reduceat(mask.astype(np.int64), starts, axis=0), starts, axis=1)

    found = mask_cells(view, cells)
    np.testing.assert_array_equal(found.seen, summed(sees))
    np.testing.assert_array_equal(found.own, summed(sees & (owner[:, None] == owner)))
    by_rank = np.stack([summed(sees & (owner[:, None] == rank)) for rank in range(view.ranks)])
    np.testing.assert_array_equal(np.take_along_axis(by_rank, found.owner[None], axis=0)[0], by_rank.max(axis=0))


def test_half_a_million_tokens_on_64_ranks() -> None:
    view = view_row(2**19, [5000, 2**18], window=2**17, cp_size=64)
    found = mask_cells(view, 512)
    assert found.seen.sum() == view.layout.attention_pairs()
    by_owner = np.bincount(view.owner, view.keys, minlength=64)
    np.testing.assert_array_equal(by_owner, view.plan.pairs)


def test_a_cell_has_the_colour_of_the_querys_rank_and_is_pale_where_the_key_is_fetched() -> None:
    view = view_row(24, [5, 17], window=12, cp_size=4, policy="zigzag")
    image = np.asarray(draw_pack(view).axes[0].images[0].get_array())
    owner = owners(view)
    colours = np.broadcast_to(rank_colours(4)[owner][:, None], image.shape)
    fetched = (owner[:, None] != owner)[..., None]
    expected = np.where(fetched, 1 - (1 - colours) * PALE, colours)
    np.testing.assert_allclose(image, np.where(dense(view)[..., None], expected, 1.0))
    assert (fetched[..., 0] & dense(view)).any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("length", "ranks"), [(1, 1), (2, 2), (130, 1), (1300, 13), (5000, 2)])
def test_rows_of_any_length_are_drawn_without_a_warning(length: int, ranks: int) -> None:
    figure = draw_pack(view_row(length, [length // 2, length // 3], window=max(1, length // 5), cp_size=ranks))
    figure.canvas.draw()
    assert figure.axes[0].get_xlim() == (0, length)


def test_the_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    view = view_row(12, [3], cp_size=2)
    path = tmp_path / "new" / "row.png"
    assert write_pack(view, path) == path
    first = path.read_bytes()
    assert first.startswith(PNG)
    write_pack(view, path)
    assert path.read_bytes() == first
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OSError, match=r"taken\.png"):
        write_pack(view, tmp_path / "taken.png")
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["new", "row.png", "taken.png"]
    with pytest.raises(UserError, match=r"output: got 'row.jpg', needs a file name that ends in .png"):
        write_pack(view, "row.jpg")
