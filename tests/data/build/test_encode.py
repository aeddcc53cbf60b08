"""The part of a shard, and which tokens are the assistant's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.build.encode import Job, Task, assistant_mask
from megatron_ext.data.build.parts import Record, Settings
from megatron_ext.data.build.shards import cut
from megatron_ext.data.text.documents import Fields
from megatron_ext.data.text.sources import Source
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError


@pytest.mark.parametrize(
    ("spans", "mask"),
    [
        ([], [0, 0, 0, 0, 0]),
        ([(2, 5)], [0, 1, 1, 0, 0]),  # exactly two tokens
        ([(3, 4)], [0, 1, 0, 0, 0]),  # inside one: it counts whole
        ([(4, 5)], [0, 0, 1, 0, 0]),  # the end of a token is not its character
        ([(0, 1), (5, 9)], [1, 0, 0, 1, 1]),
        ([(1, 6)], [1, 1, 1, 1, 0]),  # from the first that touches to the last, the one without characters too
        ([(9, 12)], [0, 0, 0, 0, 0]),
    ],
)
def test_tokens_that_overlap_a_span_are_trained(spans: list[tuple[int, int]], mask: list[int]) -> None:
    offsets = np.array([[0, 2], [2, 4], [4, 5], [5, 8], [8, 9]])
    assert assistant_mask(offsets, spans).tolist() == mask


def job(folder: Path, texts: list[str], **settings: int | None) -> Job:
    """A shard of these texts; a token is a byte, and one more ends each document."""
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer("bytes")
    made = Settings(
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        text_field="text",
        concat_by=None,
        sentences=None,
        min_tokens=1,
        max_tokens=None,
    )
    parts = folder / "parts"
    parts.mkdir(exist_ok=True)
    task = Task(parts, replace(made, **settings), "bytes", Fields(), skip=False)  # type: ignore[arg-type]
    (shard,) = cut([Source.of(file)], Fields(), 1 << 20)
    return Job(task, shard)


def made(one: Job) -> tuple[list[int], list[int], Record]:
    """The ids, the documents' lengths, and the record of the part that a job leaves."""
    one()
    with np.load(one.part.with_suffix(".npz")) as arrays:
        assert arrays["counts"].tolist() == [1] * len(arrays["lengths"])
        lengths = arrays["lengths"].tolist()
    return np.fromfile(one.part.with_suffix(".bin"), one.task.settings.dtype).tolist(), lengths, Record.read(one.part)


def test_a_part_holds_ids_lengths_and_counts(tmp_path: Path) -> None:
    ids, lengths, record = made(job(tmp_path, ["ab", "c"]))
    assert ids == [*b"ab", 256, *b"c", 256]
    assert lengths == [3, 2]
    assert (record.documents, record.sequences, record.tokens, record.size) == (2, 2, 5, 3)


def test_a_tokenizer_that_has_changed_is_refused(tmp_path: Path) -> None:
    one = job(tmp_path, ["a"])
    other = replace(one, task=replace(one.task, settings=replace(one.task.settings, tokenizer_fingerprint="other")))
    with pytest.raises(UserError, match="tokenizer: bytes has changed since the work began; start again"):
        other()
    assert list(other.task.folder.iterdir()) == []
