"""tests/walk.py: what it calls different and refused, what it takes, and its rows on real models."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import walk
from launcher import ROOT, Done
from walk import Model, Row, Walk, attempt, distance, model_of, refuses

ROWS = "convert,perplexity,generate,score,pretrain,replay,checkpoints"
CHEAP = "perplexity --stride,generate --chat,pretrain,checkpoints"


def run_walk(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/walk.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ({"a": [1.0, "x"]}, {"a": [1.5, "x"]}, 0.5),
        ([math.inf, 2.0], [math.inf, 2.0], 0),
        ([math.nan, 2.0], [math.nan, 2.0], math.inf),
        ([math.nan], [0.0], math.inf),
        ([[1, 2]], [[1, 3]], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ({"a": 1.0}, {"b": 1.0}, math.inf),
        ("text", "texts", math.inf),
    ],
)
def test_what_is_different(a: Any, b: Any, apart: float) -> None:
    assert distance(a, b) == apart


@pytest.mark.parametrize(
    ("status", "said", "refused"),
    [
        (2, "loading\nerror: size: got 2, needs 1; leave it out", True),
        (1, "error: size: got 2, needs 1", False),
        (None, "error: size: got 2, needs 1", False),
        (2, "Traceback (most recent call last):\nValueError: size: got 2, needs 1", False),
        (2, "error: rank 0: ValueError: size: got 2, needs 1; no fault of the input", False),
        (2, "error: size: got 2, needs 1\nerror: size: got 2, needs 1", False),
    ],
)
def test_what_is_refused(status: int | None, said: str, refused: bool) -> None:
    assert refuses(Done(status, "", said), "size: got 2, needs 1", 2) is refused


@pytest.mark.parametrize(("ends", "status"), [("3", 3), ("os.kill(os.getpid(), 9)", None)], ids=["failed", "killed"])
def test_the_worst_end_of_a_process_counts(tmp_path: Path, ends: str, status: int | None) -> None:
    script = tmp_path / "ends.py"
    script.write_text(f"import os\n\ndef main():\n    return {ends} if os.environ['RANK'] == '1' else 0\n")
    assert attempt(2, str(script)).status == status


def asked(folder: Path, ends: dict[int, Done], monkeypatch: pytest.MonkeyPatch) -> Walk:
    """Walk one row, whose answer is what was printed, in all layouts; `ends` by the number of processes."""
    monkeypatch.setattr(walk, "attempt", lambda processes, *_, **__: ends[processes])
    model: Model = model_of("demo", folder / "demo", Path())
    done = Walk(folder, ["CP2", "one"], torchrun=False)
    done.ask(model, Row("row", "tools/generate.py", [], lambda end, _: end.stdout))
    return done


def test_an_answer_is_compared_whatever_the_order_of_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = asked(tmp_path, {1: Done(0, "a", ""), 2: Done(0, "a", "")}, monkeypatch)
    assert (same.wrong, same.table) == ([], ["| row | demo | 0 s | - | - | equal, 0 s |"])
    other = asked(tmp_path, {1: Done(0, "a", ""), 2: Done(0, "b", "")}, monkeypatch)
    assert [line.split(", see")[0] for line in other.wrong] == ["demo, row, CP2: differs by inf"]


def test_without_an_answer_of_one_process_nothing_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = asked(tmp_path, {1: Done(None, "", ""), 2: Done(0, "a", "")}, monkeypatch)
    assert [line.split(", see")[0] for line in failed.wrong] == [
        "demo, row, one: exit status None",
        "demo, row, CP2: one process gave no answer to compare with",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layouts", "TP2"], "--layouts: got TP2, needs one too: others are compared with it"),
        (["--only", "typo"], "--only: got 'typo', no row begins so; the rows: convert_checkpoint megatron-to-hf; "),
        (["--only", "recall,"], "--only: got '', no row begins so; "),
        (["--models", "stories"], "--models: got stories, needs --stories FOLDER: a small Llama as a Hugging Face"),
        (["--stories", "nowhere"], "--stories: got nowhere, needs a Hugging Face folder: it has no config.json"),
        (["--steps", "0"], "--steps: got 0, needs a number from 1 on"),
    ],
)
def test_a_walk_that_would_compare_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["walk.py", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit, match="2"):
        walk.main()
    assert f"error: {told}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_walk_of_rows_that_cannot_be_asked_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["walk.py", str(tmp_path), "--only", "recall"])
    monkeypatch.setattr(walk, "prepare_demo", lambda *_: None)
    monkeypatch.setattr(walk, "write_inputs", lambda model: dict.fromkeys(walk.APPLIED, model.out))
    monkeypatch.setattr(walk, "find_spec", lambda _: None)
    assert walk.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "| recall | demo | wonderwords is not installed | - | - | - |",
        "not asked: demo, recall: wonderwords is not installed",
        "nothing was asked",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # trains the demo's model in two processes before it begins
def test_the_demo_through_some_commands(tmp_path: Path) -> None:
    done = run_walk(tmp_path, "--steps", 2, "--only", CHEAP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing differs"
    rows = (tmp_path / "walk.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0][2:] for row in rows] == [
        "perplexity --stride",
        "generate --chat",
        "pretrain_skyladder --init-from",
        *(f"checkpoints, of {layout}" for layout in walk.LAYOUTS),
    ]
    assert rows[1].endswith(" | refused |")


@pytest.mark.slow
def test_a_real_model_through_the_commands(stories_model: Path, tmp_path: Path) -> None:
    done = run_walk(tmp_path, "--stories", stories_model, "--models", "stories", "--only", ROWS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing differs"
    table = (tmp_path / "walk.md").read_text()
    for cells in ("| generate, greedy | stories |", "| score_tokens | stories |", "| replay_step | stories |"):
        assert cells in table
