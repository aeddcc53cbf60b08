"""Texts to .bin/.idx and back, with Megatron's own reader and writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.data import preprocess as module
from megatron_ext.data.preprocess import PreprocessOptions, WriteCounts, preprocess
from megatron_ext.data.tokenizer import Tokenizer, train_bpe
from megatron_ext.engine.indexed_dataset import IndexedSource, write_indexed
from megatron_ext.errors import UserError

TEXTS = [f"{'word ' * (i % 7)}number {i}, naïve 😀 <|endoftext|>\n" for i in range(700)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("tokenizer")).file.parent


@pytest.fixture
def options(tmp_path: Path, tokenizer: Path) -> PreprocessOptions:
    """A folder with a .jsonl of 699 documents and a .txt of one."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:-1]))
    (corpus / "b.txt").write_text(TEXTS[-1])
    return PreprocessOptions([str(corpus)], str(tmp_path / "out" / "data"), str(tokenizer))


def contents(prefix: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(prefix).parent.glob("*")}


def decoded(prefix: str, tokenizer: Path) -> list[str]:
    source, reader = IndexedSource(prefix), Tokenizer(tokenizer)
    return [reader.decode(source.read(d, 0, int(n))) for d, n in enumerate(source.document_lengths)]


def test_round_trip(options: PreprocessOptions, tokenizer: Path) -> None:
    report = preprocess(options, write_indexed)
    assert decoded(options.output_prefix, tokenizer) == [text + "<|endoftext|>" for text in TEXTS]
    source = IndexedSource(options.output_prefix, vocab_size=300)
    ends = [int(source.read(d, int(n) - 1, 1)[0]) for d, n in enumerate(source.document_lengths)]
    assert set(ends) == {Tokenizer(tokenizer).eod_id}
    assert (report.documents, report.tokens) == (len(TEXTS), int(source.document_lengths.sum()))
    card = json.loads(Path(options.output_prefix + ".json").read_text())
    assert card == {
        "tokenizer": str(tokenizer),
        "tokenizer_fingerprint": Tokenizer(tokenizer).fingerprint,
        "vocab_size": 300,
        "eod_id": 0,
        "documents": len(TEXTS),
        "tokens": report.tokens,
        "skipped": 0,
        "sources": [f"{options.inputs[0]}/a.jsonl", f"{options.inputs[0]}/b.txt"],
    }


def test_end_tokens_are_optional(options: PreprocessOptions, tokenizer: Path) -> None:
    preprocess(replace(options, append_eod=False), write_indexed)
    assert decoded(options.output_prefix, tokenizer) == TEXTS
    assert json.loads(Path(options.output_prefix + ".json").read_text())["eod_id"] is None


def test_another_end_token(options: PreprocessOptions) -> None:
    preprocess(replace(options, eod_token="!"), write_indexed)
    source = IndexedSource(options.output_prefix)
    last = source.read(0, int(source.document_lengths[0]) - 1, 1)
    assert last.tolist() == [Tokenizer(options.tokenizer, eod_token="!").eod_id] != [0]


def test_two_workers_write_the_same_bytes(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_DOCUMENTS", 16)  # 44 chunks: reading waits for writing several times
    preprocess(options, write_indexed)
    alone = contents(options.output_prefix)
    preprocess(replace(options, workers=2, overwrite=True), write_indexed)
    assert contents(options.output_prefix) == alone
    assert sorted(alone) == ["data.bin", "data.idx", "data.json"]


def test_workers_import_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, megatron_ext.data.preprocess, megatron_ext.data.corpus, megatron_ext.data.dataset;"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_stops_and_leaves_nothing(options: PreprocessOptions, workers: int) -> None:
    with open(f"{options.inputs[0]}/a.jsonl", "a") as file:
        file.write('{"text": ""}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:700: the text is empty; .*--skip-bad-lines"):
        preprocess(replace(options, workers=workers), write_indexed)
    assert contents(options.output_prefix) == {}


def test_bad_lines_are_skipped_and_counted_when_asked(options: PreprocessOptions, tokenizer: Path) -> None:
    with open(f"{options.inputs[0]}/a.jsonl", "a") as file:
        file.write('{"text": ""}\nnonsense\n')
    report = preprocess(replace(options, skip_bad_lines=True), write_indexed)
    assert (report.documents, report.skipped) == (len(TEXTS), 2)
    assert [problem.split(": ")[0].rpartition("/")[2] for problem in report.problems] == [
        "a.jsonl:700",
        "a.jsonl:701",
    ]
    assert json.loads(Path(options.output_prefix + ".json").read_text())["skipped"] == 2
    assert len(decoded(options.output_prefix, tokenizer)) == len(TEXTS)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_existing_output_is_refused_before_any_work(options: PreprocessOptions, suffix: str) -> None:
    old = Path(options.output_prefix + suffix)
    old.parent.mkdir()
    old.write_text("old")
    unready = replace(options, tokenizer="nowhere", inputs=["nowhere"])
    with pytest.raises(UserError, match=rf"data\{suffix} exists; pass --overwrite"):
        preprocess(unready, write_indexed)
    assert contents(options.output_prefix) == {old.name: b"old"}


def test_overwriting_replaces_the_old_data_only_when_the_new_is_complete(options: PreprocessOptions) -> None:
    preprocess(options, write_indexed)
    old = contents(options.output_prefix)
    with open(f"{options.inputs[0]}/c.jsonl", "w") as file:
        file.write("nonsense\n")
    with pytest.raises(UserError, match=r"c\.jsonl:1: invalid JSON"):
        preprocess(replace(options, overwrite=True), write_indexed)
    assert contents(options.output_prefix) == old
    preprocess(replace(options, overwrite=True, skip_bad_lines=True, append_eod=False), write_indexed)
    assert contents(options.output_prefix).keys() == old.keys()
    assert contents(options.output_prefix)["data.bin"] != old["data.bin"]


def test_refused_options(options: PreprocessOptions) -> None:
    with pytest.raises(UserError, match="workers: got 0"):
        preprocess(replace(options, workers=0), write_indexed)
    with pytest.raises(UserError, match="'<no>' is not in the vocabulary"):
        preprocess(replace(options, eod_token="<no>"), write_indexed)


def kill_a_worker(prefix: str, documents: Iterable[np.ndarray], vocab_size: int, **_: Any) -> WriteCounts:
    """A writer that takes one document, kills a worker, and wants the rest."""
    remaining = iter(documents)
    next(remaining)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    workers = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    return WriteCounts(sum(1 for _ in remaining), 0)


def test_a_killed_worker_is_told(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_DOCUMENTS", 4)
    with pytest.raises(UserError, match="workers: one of 2 was killed"):
        preprocess(replace(options, workers=2), kill_a_worker)
