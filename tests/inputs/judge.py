"""What an answer to a wrong input is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from inputs.table import Wrong

Verdict = Literal["clear", "unclear", "traceback", "hang", "accepted"]
MOST_LINES = 3


def judge(wrong: Wrong, answer: Mapping[str, Any]) -> Verdict:
    """Say what came of a row.

    clear: exit status 2, at most three lines from the error on, the row's fragment among them, and nothing written;
    the lines of a log may stand before. An older version's error need not begin with `error:`.
    """
    stderr = str(answer["stderr"])
    if answer["status"] is None:
        return "hang"
    if "Traceback (most recent call last)" in stderr:
        return "traceback"
    if answer["status"] == 0:
        return "accepted"
    lines = stderr.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith("error:")), None)
    said = lines[begin:] if begin is not None else lines
    clear = answer["status"] == 2 and 0 < len(said) <= MOST_LINES and max(map(len, said)) <= 1000
    return "clear" if clear and wrong.fragment in " ".join(said) and not answer["written"] else "unclear"
