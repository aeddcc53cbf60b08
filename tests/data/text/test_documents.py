"""Files of folders and patterns, documents of files of every kind, and descriptions of bad ones."""

import gzip
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd as zstd_library
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.text.documents import Fields, FileRange, find_files, read_documents, read_range
from tests.conftest import refused


def zstd(raw: bytes) -> bytes:
    return pyarrow.compress(raw, "zstd", asbytes=True)  # type: ignore[no-any-return]


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_texts_are_not_changed(tmp_path: Path) -> None:
    texts = ["one\nline\u2028two ", "  \t", "", "naïve 😀 \x00", "{}"]
    lines = [json.dumps({"text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
    file = put(tmp_path / "a.jsonl", "\ufeff" + "\n\n".join(lines))
    assert [(document.text, document.source) for document in read_documents([file])] == [(text, file) for text in texts]
    book = put(tmp_path / "book.txt", "\ufeffa\r\nb\n\n")
    assert [document.text for document in read_documents([book])] == ["a\r\nb\n\n"]


BAD_LINES = [
    (b'{"text": "half', "invalid JSON .* at column"),
    (b'{"text": "\xff"}', r"invalid UTF-8 \(0xff\) at byte 11"),
    (b'{"body": "x"}', "no field 'text' .*'body'.*--json-key"),
    (b'{"text": 3}', "field 'text' is a int"),
    (b'["text"]', "JSON list"),
    (b'{"text": "\\ud800"}', "half a surrogate pair"),
    (b"[" * 100_000, "invalid JSON"),
    (b'{"text": "' + b"x" * 200_000 + b'"}', "longer than --max-document-bytes 200000"),
]


def items(files: list[FileRange], fields: Fields) -> list[str]:
    """The texts and the descriptions of bad documents, in order."""
    texts: list[str] = []
    for file in files:
        for document in read_range(file, fields, texts.append):
            texts.append(document.text)
    return texts


def test_bad_lines_are_named(tmp_path: Path) -> None:
    lines = [b'{"text": "good"}\n' + bad + b"\n" for bad, _ in BAD_LINES]
    texts = items([FileRange.of(put(tmp_path / "a.jsonl", b"".join(lines)))], Fields(limit=200_000))
    assert texts[::2] == ["good"] * len(BAD_LINES)
    for number, (problem, (_, text)) in enumerate(zip(texts[1::2], BAD_LINES, strict=True), start=1):
        assert re.match(rf".*a\.jsonl:{2 * number}: .*{text}", problem)
    assert refused(list, read_documents([tmp_path / "a.jsonl"])).endswith("; correct it")


def test_bad_text_files_are_named(tmp_path: Path) -> None:
    latin = put(tmp_path / "a.txt", b"one\ncaf\xe9")
    assert "a.txt: invalid UTF-8 (0xe9) at byte 8" in refused(list, read_documents([latin]))
    for name, content, item in (
        ("b.txt", "x" * 81, f"{tmp_path}/b.txt: longer than --max-document-bytes 80"),
        ("b.txt", "x" * 80, "x" * 80),
        ("b.txt", "\ufeff" + "x" * 81, f"{tmp_path}/b.txt: longer than --max-document-bytes 80"),
        ("b.txt", "\ufeff" + "x" * 80, "x" * 80),
        ("a.jsonl", '\ufeff{"text": "%s"}' % ("x" * 68), "x" * 68),
        ("a.jsonl", '\ufeff{"text": "%s"}' % ("x" * 69), f"{tmp_path}/a.jsonl:1: longer than --max-document-bytes 80"),
        ("a.jsonl", "", f"{tmp_path}/a.jsonl: the file is empty"),
    ):
        assert items([FileRange.of(put(tmp_path / name, content))], Fields(limit=80)) == [item]


TEXTS = ["naïve 😀\n", "two", " three ", "4" * 5000]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "repo": i % 5}) + "\n" for i, text in enumerate(texts)).encode()


def put_parquet(path: Path, columns: dict[str, object]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


DICTIONARY = zstd_library.train_dict([b"naive %d two " % i * 20 for i in range(1000)], 500)


def test_what_cannot_be_decompressed_is_named_with_its_reason(tmp_path: Path) -> None:
    raw = lines(TEXTS * 100)
    for name, whole in (("a.jsonl.gz", gzip.compress(raw)), ("a.jsonl.zst", zstd(raw))):
        assert len(list(read_documents([put(tmp_path / name, whole)]))) == 400
        for damaged in (whole[:-9], b"nonsense", whole + b"nonsense"):
            message = refused(list, read_documents([put(tmp_path / name, damaged)]))
            assert re.search(rf"{name}: cannot be decompressed \(.*\w.*\); make it again", message)
    for content, reason in (
        (whole[:-9], "ended before"),
        (raw, "Unknown frame"),
        (zstd_library.compress(raw, zstd_dict=DICTIONARY), "Dictionary"),
        (bytes.fromhex("28b52ffd00d0010000"), "too much memory"),  # a window of 64 GiB
    ):
        assert reason in refused(list, read_documents([put(tmp_path / "a.jsonl.zst", content)]))


def test_a_window_of_any_size_is_read(tmp_path: Path) -> None:
    """The command `zstd --long=31` writes 2 GiB for a stream, whose size it does not know."""
    sizes = zstd_library.CompressionParameter
    options = {sizes.window_log: 31, sizes.hash_log: 10, sizes.chain_log: 10}
    compressor = zstd_library.ZstdCompressor(options=options)
    file = put(tmp_path / "a.jsonl.zst", compressor.compress(lines(TEXTS)) + compressor.flush())
    with pytest.raises(zstd_library.ZstdError, match="too much memory"):
        zstd_library.decompress(file.read_bytes())
    assert [document.text for document in read_documents([file])] == TEXTS


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    latin = pyarrow.array([b"ok", b"caf\xe9"]).view(pyarrow.string())
    for columns, problem in (
        ({"text": ["a", "b", "c", None]}, "a.parquet:4: field 'text' is a NoneType, needs a string"),
        ({"text": latin}, "a.parquet:2: invalid UTF-8 (0xe9) at byte 4; correct it"),
        ({"text": pyarrow.array([], pyarrow.string())}, "a.parquet: the file is empty; correct it"),
        ({"body": ["x"], "n": [1]}, "a.parquet: has no column 'text' (it has 'body', 'n'; see --json-key)"),
    ):
        file = put_parquet(tmp_path / "a.parquet", columns)
        assert problem in refused(list, read_documents([file]))
    for damaged in (file.read_bytes()[:-10], b""):
        assert "a.parquet: cannot be read as .parquet (" in refused(list, read_documents([put(file, damaged)]))


def test_a_bad_row_of_a_table_is_left_out_alone(tmp_path: Path) -> None:
    texts = pyarrow.array([b"a", b"caf\xe9", b"b"]).view(pyarrow.string())
    file = FileRange.of(put_parquet(tmp_path / "a.parquet", {"text": texts}))
    assert items([file], Fields()) == ["a", f"{file.path}:2: invalid UTF-8 (0xe9) at byte 4", "b"]


@given(
    texts=st.lists(st.one_of(st.text(max_size=20), st.none()), min_size=1, max_size=12),
    cuts=st.sets(st.integers(0, 400), max_size=6),
    end=st.sampled_from([b"", b"\n"]),
)
def test_ranges_hold_each_line_once(tmp_path_factory: pytest.TempPathFactory, texts, cuts, end) -> None:
    """However a file is cut into byte ranges, its documents and its problems, also long lines, stay the same."""
    raw = b"\n".join(b"" if text is None else json.dumps({"text": text}).encode() for text in texts) + end
    file = put(tmp_path_factory.getbasetemp() / "ranges.jsonl", raw or b"{}")
    whole = FileRange.of(file)
    borders = [0, *sorted(cut for cut in cuts if 0 < cut < whole.size), whole.size]
    parts = [replace(whole, start=a, end=b) for a, b in pairwise(borders)]
    assert items(parts, Fields(limit=25)) == items([whole], Fields(limit=25))


def test_groups_have_keys(tmp_path: Path) -> None:
    def keys(path: Path) -> list[str | None]:
        document_keys: list[str | None] = []
        for document in read_range(FileRange.of(path), Fields(key="repo"), document_keys.append):
            document_keys.append(document.key)
        return document_keys

    assert keys(put(tmp_path / "a.jsonl", lines(TEXTS))) == ["0", "1", "2", "3"]
    assert keys(put_parquet(tmp_path / "a.parquet", {"text": TEXTS, "repo": [7, 8, 7, 8]})) == ["7", "8", "7", "8"]
    assert "c.jsonl:1: has no field 'repo'" in str(keys(put(tmp_path / "c.jsonl", '{"text": "x"}')))
    assert "d.txt: has no field 'repo'" in str(keys(put(tmp_path / "d.txt", "x")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.jsonl", "a/b/c.txt", "notes.md", "a.txt", "c.jsonl.gz", "d.jsonl.zst", "e.parquet"):
        put(tmp_path / name, "x")
    return tmp_path


def names(folder: Path, *paths: str) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in find_files([str(folder / path) for path in paths])]


def test_folders_and_patterns_are_read_in_order_of_paths(folder: Path) -> None:
    all_files = ["a/b/c.txt", "a/z.jsonl", "a.txt", "b.txt", "c.jsonl.gz", "d.jsonl.zst", "e.parquet"]
    assert names(folder, ".") == all_files
    assert names(folder, "b.txt", "a") == ["b.txt", "a/b/c.txt", "a/z.jsonl"]
    assert names(folder, "*.txt") == ["a.txt", "b.txt"]
    assert names(folder, "**/*.txt") == ["a/b/c.txt", "a.txt", "b.txt"]
    assert names(folder, "?.jsonl.*") == ["c.jsonl.gz", "d.jsonl.zst"]
    assert names(folder, "*") == names(folder, ".")
    (folder / "a[1].txt").write_text("x")  # a name that looks like a pattern is a name
    assert names(folder, "a[1].txt") == ["a[1].txt"]


def test_json_that_holds_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = '{"text": "x"}\n'
    raw = {"a.json": "\ufeff" + line * 2, "b.json": '{"text": "' + "y" * (2 << 20) + '"}', "c.jsonl": line}
    packed = {"d.json.gz": gzip.compress(line.encode()), "e.json.zst": zstd(line.encode())}
    for name, content in (raw | packed).items():
        put(tmp_path / name, content)
    assert len(list(read_documents([tmp_path]))) == 6
    assert not caplog.records
    whole = FileRange.of(tmp_path / "a.json")
    halves = [replace(whole, end=9), replace(whole, start=9)]  # as .jsonl it is cut into parts
    assert items(halves, Fields()) == ["x", "x"]
    values = {"f.json": f"[{line}]", "g.json": json.dumps({"text": "x"}, indent=1), "h.json": "", "i.csv": "x"}
    for name, content in values.items():
        put(tmp_path / "more" / name, content)
        assert f"{name}, needs a " in refused(find_files, [tmp_path / "more" / name])
    assert not caplog.records
    for path in (tmp_path, tmp_path / "**"):
        assert len(list(read_documents([path]))) == 6
        (record,) = caplog.records
        assert record.getMessage() == "input: files of other kinds are not read: 4 (f.json, g.json, h.json)"
        caplog.clear()


def test_links_are_followed_and_each_file_is_taken_once(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = names(folder, ".")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "x.jsonl").write_text("x")
    for name, target in (("z.txt", "a.txt"), ("l1", elsewhere), ("l2", elsewhere)):
        (folder / name).symlink_to(target)
    assert names(folder, "**/*.jsonl") == ["a/z.jsonl", "l1/x.jsonl"]
    (folder / "loop").symlink_to(".")
    assert sorted(names(folder, ".")) == sorted([*before, "l1/x.jsonl"])


def test_bad_paths_are_named(folder: Path) -> None:
    (folder / "empty").mkdir()
    assert "missing.jsonl does not exist" in refused(find_files, [folder / "missing.jsonl"])
    for path in ("empty", "*.csv", "notes.md"):
        assert f"{path}, needs a .jsonl" in refused(find_files, [folder / path])
    assert "b.txt twice" in refused(find_files, [folder / "b.txt", "a", folder / "a/../b.txt"])
