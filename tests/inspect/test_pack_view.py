"""tools/inspect_pack.py: the text of a row, compared with a dense mask, its picture, and rows of a dataset."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.inspect import pack_view
from megatron_ext.inspect.pack_view import PackView, describe, view_row
from tests.conftest import ROOT, SmallData
from tools.inspect_pack import main


@st.composite
def views(draw: Any) -> PackView:
    ranks = draw(st.integers(1, 5))
    length = ranks * draw(st.integers(1, 128 // ranks))
    return view_row(
        length,
        draw(st.lists(st.integers(0, length), max_size=12)),
        window=draw(st.none() | st.integers(1, length + 1)),
        document_mask=draw(st.booleans()),
        cp_size=ranks,
        policy=draw(st.sampled_from(["auto", "contiguous", "zigzag", "balanced"])),
    )


def dense(view: PackView) -> npt.NDArray[np.bool_]:
    """bool [T, T]: query i sees key j, straight from the definition."""
    i = np.arange(view.tokens)[:, None]
    j = np.arange(view.tokens)[None, :]
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
def test_the_cells_of_a_short_row_are_the_row(view: PackView) -> None:
    text = describe(view)
    documents = np.searchsorted(view.documents, np.arange(view.tokens), side="right") - 1
    segments = np.searchsorted(view.layout.cu_seqlens, np.arange(view.tokens), side="right") - 1
    assert drawn(text, "token") == [str(token) for token in range(view.tokens)]
    assert drawn(text, "document") == [pack_view.document_name(number) for number in documents]
    assert drawn(text, "segment") == [str(number) for number in segments]
    assert drawn(text, "keys") == [str(count) for count in dense(view).sum(axis=1)]
    assert max(len(line) for line in text.splitlines() if line.startswith("token ")) <= pack_view.WIDTH
    row = text.split("\n\nrank 0 ")[0]
    assert drawn(row, "rank") == ([str(rank) for rank in owners(view)] if view.ranks > 1 else [])


def test_texts_are_printable_and_short() -> None:
    text = describe(view_row(3, []), texts=[" a", "\n", "<|endoftext|>"])
    assert drawn(text, "text") == ["·a", "\\n", "<|endofte…"]
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
def test_a_cell_has_the_color_of_the_querys_rank_pale_where_the_key_is_fetched(view: PackView) -> None:
    image = pack_view.mask_image(view)
    owner = owners(view)
    colors = np.broadcast_to(pack_view.rank_colors(view.ranks)[owner][:, None], image.shape)
    fetched = (owner[:, None] != owner)[..., None]
    expected = np.where(fetched, 1 - (1 - colors) * pack_view.PALE, colors)
    np.testing.assert_allclose(image, np.where(dense(view)[..., None], expected, 1.0))


def test_the_picture_is_written_atomically(tmp_path: Path) -> None:
    view = view_row(12, [3], cp_size=2)
    path = tmp_path / "new" / "row.png"
    assert pack_view.write_pack(view, path) == path
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OSError, match=r"taken\.png"):
        pack_view.write_pack(view, tmp_path / "taken.png")
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["new", "row.png", "taken.png"]


def test_a_row_by_hand_needs_no_heavy_library() -> None:
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'megatron', 'torch', 'matplotlib', 'tokenizers'} & set(sys.modules)))"
    )
    row = "--document-ends 3 10 --seq-length 12 --window 4 --context-parallel-size 2"
    command = [sys.executable, "-c", code, "tools/inspect_pack.py", *row.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n[]\n")
    assert drawn(done.stdout, "segment") == list("000122223344")


def test_a_row_of_a_dataset(small_data: SmallData, capsys: pytest.CaptureFixture[str]) -> None:
    """The end token stands where a document ends and nowhere else; the sample and the seed choose the row."""

    def row(*flags: str) -> str:
        assert main([*small_data.flags, "--seq-length", "100", "--text", *flags]) == 0
        return capsys.readouterr().out

    ends = 0
    for sample in map(str, range(4)):
        text = row("--sample", sample)
        documents, texts = drawn(text, "document"), drawn(text, "text")
        ended = [number for number in range(99) if documents[number] != documents[number + 1]]
        assert [number for number in range(99) if texts[number] == "<|endofte…"] == ended
        assert row("--sample", sample) == text
        ends += len(ended)
    assert ends > 0
    assert row() == row("--sample", "0", "--seed", "1234", "--split", "98,2,0")
    assert len({row(), row("--sample", "1"), row("--seed", "1"), row("--split", "50,50,0")}) == 4
    assert main([*small_data.flags, "--seq-length", "64", "--tokenizer-model", "bytes"]) == 2
    assert "corpus was made with another tokenizer" in capsys.readouterr().err


def test_policies_are_compared(small_data: SmallData, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data-path", str(small_data.prefix), "--seq-length", "256"]
    assert main([*flags, "--policies", "-"]) == 0
    kept = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:-1])
    assert {"random", "best_fit", "whole_document", "carry_over", "drop_tail", "split_drop"} <= set(kept)
    assert [kept[name] for name in ("random", "best_fit", "carry_over")] == ["100.0%"] * 3
    assert main([*flags, "--policies", "best"]) == 2
    assert "there is no policy 'best'" in capsys.readouterr().err


def test_policies_need_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--document-ends", "3", "10", "--seq-length", "12", "--policies", "-"]) == 2
    assert "--policies: needs --data-path PREFIX" in capsys.readouterr().err
