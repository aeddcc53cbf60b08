"""The data tools as commands: a corpus, a tokenizer, a data set, and errors of one line."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(tool: str, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"tools/{tool}.py", *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def assert_one_line(result: subprocess.CompletedProcess[str], text: str) -> None:
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert text in result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """corpus.jsonl and tokenizer/, made by the tools."""
    path = tmp_path_factory.mktemp("tools")
    gathered = run("gather_corpus", "--output", path / "corpus.jsonl", "--max-bytes", 300_000)
    assert gathered.returncode == 0, gathered.stderr
    flags = ("--input", path / "corpus.jsonl", "--vocab-size", 400, "--output", path / "tokenizer")
    trained = run("train_tokenizer", *flags)
    assert trained.returncode == 0, trained.stderr
    assert "400 tokens, end token 0" in trained.stdout
    return path


def test_preprocess(folder: Path) -> None:
    corpus = (folder / "corpus.jsonl").read_text().splitlines()
    flags = ("--output-prefix", folder / "data", "--tokenizer-model", folder / "tokenizer")
    made = run("preprocess_data", "--input", folder / "corpus.jsonl", *flags, "--workers", 2)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines()[0].split() == ["tokens", "documents", "share", "tokens", "share"]
    assert f"{len(corpus):,} documents, " in made.stdout
    assert made.stdout.endswith(" tokens, 0 skipped\n")
    assert {file.name for file in folder.glob("data.*")} == {"data.bin", "data.idx", "data.json"}
    refused = run("preprocess_data", "--input", folder / "corpus.jsonl", *flags)
    assert_one_line(refused, "data.bin exists; pass --overwrite")
    again = run("preprocess_data", "--input", folder / "corpus.jsonl", *flags, "--resume")
    assert (again.returncode, again.stderr) == (0, "")
    assert f"{folder / 'data'} was complete already" in again.stdout


def test_every_flag_reaches_the_work(folder: Path, tmp_path: Path) -> None:
    rows = [{"name": "r1" if i % 2 else "r2", "body": f"Text {i}. " * (i + 1)} for i in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "nonsense\n")
    command = [sys.executable, "tools/preprocess_data.py", "--input", "-", "--output-prefix", tmp_path / "out"]
    flags = "--tokenizer-model bytes --json-key body --concat-by name --skip-bad-lines --no-append-eod --workers 2"
    more = "--min-tokens 40 --max-tokens 61 --max-document-bytes 80 --shard-bytes 100 --overwrite"
    with (tmp_path / "in.jsonl").open() as lines:
        done = subprocess.run(
            [*map(str, command), *flags.split(), *more.split()],
            cwd=ROOT, stdin=lines, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "skipped standard input:5: invalid JSON" in done.stdout
    assert "left out: 1 documents with too few tokens, 0 with too many" in done.stdout
    assert done.stdout.endswith("out: 1 documents, 49 tokens, 1 skipped\n")
    metadata = json.loads((tmp_path / "out.json").read_text())
    wanted = {"eod_id": None, "text_field": "body", "concat_by": "name", "min_tokens": 40, "max_tokens": 61}
    assert wanted.items() <= metadata.items()
    content = (tmp_path / "in.jsonl").read_bytes()
    about = {"path": "standard input", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert metadata["sources"] == [about]
