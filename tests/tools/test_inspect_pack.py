"""tools/inspect_pack.py as a command: rows by hand, rows of a dataset, and errors of one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SmallData
from tools.inspect_pack import main

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "inspect_pack.py"
BY_HAND = ["--document-ends", "3", "10", "--seq-length", "12"]


def cells(text: str, name: str) -> list[str]:
    return [cell for line in text.splitlines() if line.startswith(name.ljust(9)) for cell in line[9:].split()]


def test_a_row_by_hand_needs_no_heavy_library() -> None:
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'megatron', 'torch', 'matplotlib', 'tokenizers'} & set(sys.modules)))"
    )
    flags = [str(TOOL), *BY_HAND, "--window", "4", "--context-parallel-size", "2"]
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n[]\n")
    assert cells(done.stdout, "segment") == list("000122223344")


def test_a_dataset_of_another_tokenizer_is_refused(small_data: SmallData, capsys: pytest.CaptureFixture[str]) -> None:
    row = ["--data-path", str(small_data.prefix), "--seq-length", "64", "--tokenizer-model"]
    assert main([*row, str(small_data.tokenizer)]) == 0
    assert main([*row, "bytes"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "corpus was made with another tokenizer" in error


def test_a_row_of_a_dataset(small_data: SmallData, capsys: pytest.CaptureFixture[str]) -> None:
    """The end token stands where a document ends and nowhere else; the sample and the seed choose the row."""

    def row(*flags: str) -> str:
        assert main([*small_data.flags, "--seq-length", "100", "--text", *flags]) == 0
        return capsys.readouterr().out

    ends = 0
    for sample in map(str, range(4)):
        text = row("--sample", sample)
        documents, texts = cells(text, "document"), cells(text, "text")
        ended = [number for number in range(99) if documents[number] != documents[number + 1]]
        assert [number for number in range(99) if texts[number] == "<|endofte…"] == ended
        assert row("--sample", sample) == text
        ends += len(ended)
    assert ends > 0
    assert row() == row("--sample", "0", "--seed", "1234", "--split", "98,2,0")
    assert len({row(), row("--sample", "1"), row("--seed", "1"), row("--split", "50,50,0")}) == 4


def test_policies_are_compared(small_data: SmallData, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data-path", str(small_data.prefix), "--seq-length", "256"]
    assert main([*flags, "--policies", "-"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:-1]}
    assert {"random", "best_fit", "whole_document", "carry_over", "drop_tail", "split_drop"} <= set(lines)
    assert [lines[name][0] for name in ("random", "best_fit", "carry_over")] == ["100.0%"] * 3
    assert float(lines["best_fit"][2].rstrip("%")) <= float(lines["random"][2].rstrip("%"))
    assert main([*flags, "--policies", "best"]) == 2
    assert "there is no policy 'best'" in capsys.readouterr().err
