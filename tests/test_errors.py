"""What an error of others says in a line of ours."""

from __future__ import annotations

import pytest

from megatron_ext.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("wrong"), "wrong"),
        (ValueError("wrong\nand more"), "wrong"),
        (ValueError("\n  wrong \nand more"), "wrong "),
        (EOFError(), "EOFError"),  # torch.load of a file that is cut off
        (ValueError(" \n"), "ValueError"),
    ],
)
def test_the_first_line_or_the_type(error: Exception, line: str) -> None:
    assert first_line(error) == line
