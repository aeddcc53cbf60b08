"""The picture of a row: its mask against a dense one, and how it is written."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from test_pack_view import dense, owners, views

from megatron_ext.errors import UserError
from megatron_ext.inspect.pack_figure import PALE, mask_image, rank_colors, write_pack
from megatron_ext.inspect.pack_view import PackView, view_row


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
