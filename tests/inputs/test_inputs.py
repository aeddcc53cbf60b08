"""The table of wrong inputs: each ends with one short error, and nothing is written."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
from launcher import ROOT, clean_environment

from inputs.table import Wrong, all_inputs

pytestmark = pytest.mark.timeout(3600)  # the first test waits for all rows; attempts.py limits each
TABLE = all_inputs()
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Run the rows that this session selected, one after another, in a process that imports the package once."""
    folder = tmp_path_factory.mktemp("inputs")
    selected = [wrong.name for item in request.session.items if (wrong := _row(item)) is not None]
    (folder / "names.json").write_text(json.dumps(selected))
    script = Path(__file__).with_name("attempts.py")
    files = [ROOT, folder / "world", folder / "answers.jsonl", folder / "names.json"]
    subprocess.run([sys.executable, script, *files], check=True, cwd=folder, env=clean_environment())
    results = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return {answer["name"]: answer for answer in results}


def _row(item: pytest.Item) -> Wrong | None:
    """Return the row of a test; None for tests of other files."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    wrong = params.get("wrong")
    return wrong if isinstance(wrong, Wrong) else None


def _marked(number: int, wrong: Wrong) -> Any:
    """Make a test case; two of three are slow, among rows of every kind."""
    return pytest.param(wrong, id=f"{number}: {wrong.name[:140]}", marks=[pytest.mark.slow] if number % 3 else [])


@pytest.mark.parametrize("wrong", starmap(_marked, enumerate(TABLE)))
def test_wrong_input_is_a_short_error(wrong: Wrong, answers: Answers) -> None:
    """Exit status 2, and from the one `error:` on at most three lines, with the row's fragment."""
    answer = answers[wrong.name]
    lines = answer["stderr"].splitlines()
    (begin,) = (number for number, line in enumerate(lines) if line.startswith("error: "))
    assert (answer["status"], answer["written"]) == (2, []), answer
    assert len(lines[begin:]) <= 3, answer
    assert max(map(len, lines[begin:])) <= 1000, answer
    assert wrong.fragment in " ".join(lines[begin:]), answer
