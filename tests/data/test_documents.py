"""Documents out of files, and bad ones by their name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.data.documents import Document, ReadProgress, find_files, read_documents
from megatron_ext.errors import UserError


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_folders_are_read_in_order_of_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.jsonl", "a/b/c.txt", "notes.md", "a.txt"):
        put(tmp_path / name, '{"text": "x"}\n')
    found = [file.relative_to(tmp_path).as_posix() for file in find_files([tmp_path])]
    assert found == ["a/b/c.txt", "a/z.jsonl", "a.txt", "b.txt"]
    assert find_files([tmp_path / "b.txt", tmp_path / "a"])[0] == tmp_path / "b.txt"


def test_texts_arrive_untouched(tmp_path: Path) -> None:
    texts = ["one\nline\u2028two ", "  \t", "naïve 😀 \x00", "{}"]
    lines = [json.dumps({"text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
    file = put(tmp_path / "a.jsonl", "\ufeff" + "\n\n".join(lines))
    assert list(read_documents([file])) == [
        Document(text, file, line) for text, line in zip(texts, (1, 3, 5, 7), strict=True)
    ]
    book = put(tmp_path / "book.txt", "\ufeffa\r\nb\n\n")
    assert list(read_documents([book])) == [Document("a\r\nb\n\n", book, None)]


def test_another_field(tmp_path: Path) -> None:
    file = put(tmp_path / "a.jsonl", '{"text": 1, "content": "yes"}')
    assert [document.text for document in read_documents([file], "content")] == ["yes"]


BAD_LINES = [
    (b'{"text": "half', "invalid JSON .* at column"),
    (b'{"text": "\xff"}', r"invalid UTF-8 \(0xff\) at byte 11"),
    (b'{"body": "x"}', "no field 'text' .*'body'.*--json-key"),
    (b'{"text": 3}', "field 'text' is a int"),
    (b'{"text": null}', "field 'text' is a NoneType"),
    (b'{"text": ""}', "the text is empty"),
    (b'["text"]', "JSON list"),
    (b'{"text": "\\ud800"}', "half a surrogate pair"),
    (b"[" * 100_000, "invalid JSON"),
]


@pytest.mark.parametrize(("bad", "text"), BAD_LINES)
def test_bad_lines_are_named(tmp_path: Path, bad: bytes, text: str) -> None:
    file = put(tmp_path / "a.jsonl", b'{"text": "first"}\n' + bad + b'\n{"text": "third"}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{text}") as caught:
        list(read_documents([file]))
    assert "\n" not in str(caught.value)


def test_skipping_counts_and_keeps_the_rest(tmp_path: Path) -> None:
    lines = [b'{"text": "good"}\n' + bad + b"\n" for bad, _ in BAD_LINES]
    file = put(tmp_path / "a.jsonl", b"".join(lines))
    empty = put(tmp_path / "b.txt", "")
    progress = ReadProgress()
    documents = list(read_documents([tmp_path], on_bad="skip", progress=progress))
    assert [document.line for document in documents] == list(range(1, 2 * len(BAD_LINES), 2))
    assert progress.skipped == len(BAD_LINES) + 1
    assert progress.problems[0].startswith(f"{file}:2: invalid JSON")
    assert progress.problems[-1].startswith(f"{empty}: ")
    assert progress.bytes_read == file.stat().st_size


def test_bad_text_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.txt: invalid UTF-8 \(0xe9\) at line 3"):
        list(read_documents([put(tmp_path / "a.txt", b"one\ntwo\ncaf\xe9")]))
    with pytest.raises(UserError, match=r"b\.txt: the text is empty"):
        list(read_documents([put(tmp_path / "b.txt", "")]))


def test_bad_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, text in (
        (tmp_path / "missing.jsonl", r"missing\.jsonl does not exist"),
        (tmp_path / "empty", "empty holds no .jsonl or .txt"),
        (put(tmp_path / "a.csv", "x"), r"a\.csv is neither"),
    ):
        with pytest.raises(UserError, match=text):
            find_files([path])
    with pytest.raises(UserError, match="got no path"):
        find_files([])
