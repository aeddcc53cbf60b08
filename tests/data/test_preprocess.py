"""Preprocessing: every kind of input, number of workers and size of shards gives the same data set."""

import gzip
import hashlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.config import Config, DataConfig
from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.preprocess.encode import Encoder, Report, split_sentences
from megatron_ext.data.preprocess.pipeline import PreprocessOptions, preprocess
from megatron_ext.data.preprocess.shards import cut
from megatron_ext.data.text.documents import Fields, FileRange, find_files, stop
from megatron_ext.data.text.tokenizer import Tokenizer, train_bpe
from megatron_ext.run.identity import bos_of
from tests.conftest import ROOT, refused
from tests.data.text.test_documents import lines, put_parquet, zstd

TEXTS = [f"{'word ' * (i % 7)}number {i}, naïve 😀 <|endoftext|>\n" for i in range(300)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("tokenizer")).file.parent


@pytest.fixture
def options(tmp_path: Path, tokenizer: Path) -> PreprocessOptions:
    """A folder with a .jsonl of 299 documents and a .txt of one; about 8 shards."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.jsonl").write_bytes(lines(TEXTS[:-1]))
    (corpus / "b.txt").write_text(TEXTS[-1])
    return PreprocessOptions([str(corpus)], str(tmp_path / "out" / "data"), str(tokenizer), shard_bytes=3000)


def contents(prefix: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(prefix).parent.glob("*")}


def decoded(prefix: str, tokenizer: Path) -> list[str]:
    source, reader = IndexedSource(prefix), Tokenizer(tokenizer)
    return [reader.decode(source.read(d, 0, int(n))) for d, n in enumerate(source.document_lengths)]


def metadata(options: PreprocessOptions) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(options.output_prefix + ".json").read_text())
    return content


def test_round_trip(options: PreprocessOptions, tokenizer: Path) -> None:
    report = preprocess(options)
    assert decoded(options.output_prefix, tokenizer) == [text + "<|endoftext|>" for text in TEXTS]
    source = IndexedSource(options.output_prefix, vocab_size=300)
    ends = [int(source.read(d, int(n) - 1, 1)[0]) for d, n in enumerate(source.document_lengths)]
    assert set(ends) == {Tokenizer(tokenizer).eod_id}
    assert (report.documents, report.tokens) == (len(TEXTS), int(source.document_lengths.sum()))
    paths = [Path(options.inputs[0]) / name for name in ("a.jsonl", "b.txt")]
    about = metadata(options)
    assert sum(row["tokens"] for row in about["lengths"]) == report.tokens
    wanted = {"vocab_size": 300, "eod_id": 0, "documents": len(TEXTS), "tokens": report.tokens, "skipped": 0}
    wanted |= {"tokenizer_fingerprint": Tokenizer(tokenizer).fingerprint}
    times = [path.stat().st_mtime_ns for path in paths]
    sizes = [path.stat().st_size for path in paths]
    sources = zip(paths, sizes, times, strict=True)
    wanted |= {"sources": [{"path": str(path), "bytes": size, "mtime_ns": time} for path, size, time in sources]}
    assert wanted.items() <= about.items()


def test_neither_workers_nor_shards_change_a_byte(options: PreprocessOptions) -> None:
    preprocess(options)
    wanted = contents(options.output_prefix)
    assert sorted(wanted) == ["data.bin", "data.idx", "data.json"]
    for workers, shard_bytes in ((2, 3000), (1, 1 << 30), (2, 700)):
        preprocess(replace(options, workers=workers, shard_bytes=shard_bytes, overwrite=True))
        assert contents(options.output_prefix) == wanted


def test_every_kind_of_input_gives_the_same_tokens(options: PreprocessOptions, tmp_path: Path) -> None:
    """Inputs are two gzip members, two zstd frames, a dictionary-encoded column, and many files."""
    preprocess(options)
    wanted = Path(options.output_prefix + ".bin").read_bytes()
    halves = [lines(TEXTS)[:400], lines(TEXTS)[400:]]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(zstd(half) for half in halves))
    for name, column in (("a", pyarrow.array(TEXTS)), ("b", pyarrow.array(TEXTS).dictionary_encode())):
        put_parquet(tmp_path / f"{name}.parquet", {"text": column})
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(text)
    for name in ("a.jsonl.gz", "*.zst", "a.parquet", "b.parquet", "texts"):
        preprocess(replace(options, inputs=[str(tmp_path / name)], overwrite=True))
        assert Path(options.output_prefix + ".bin").read_bytes() == wanted, name


def test_documents_begin_with_a_bos_where_asked(options: PreprocessOptions, tokenizer: Path) -> None:
    preprocess(options)
    begun = replace(options, output_prefix=f"{options.output_prefix}-bos", prepend_bos=True, bos_token="!")
    preprocess(begun)
    plain, source = IndexedSource(options.output_prefix), IndexedSource(begun.output_prefix)
    bos = Tokenizer(tokenizer, bos_token="!").bos_id
    both_datasets = DataConfig(data_path=("1", options.output_prefix, "1", begun.output_prefix))
    assert metadata(begun)["bos_id"] == bos_of(Config(data=both_datasets)) == bos
    assert (source.document_lengths == plain.document_lengths + 1).all()
    for number, length in enumerate(plain.document_lengths.tolist()):
        assert source.read(number, 0, length + 1).tolist() == [bos, *plain.read(number, 0, length).tolist()]
    assert "; pass --bos-token" in refused(preprocess, replace(begun, bos_token=None, overwrite=True))
    assert "bos_token: got '!' without" in refused(preprocess, replace(options, bos_token="!", overwrite=True))


def test_documents_keep_their_source(options: PreprocessOptions, tmp_path: Path) -> None:
    """The source is a number in the metadata, whatever the shards."""
    corpus = str(tmp_path / "corpus" / "a.jsonl")
    kept = replace(options, inputs=[corpus], source_field="repo", min_tokens=4, overwrite=True)
    for shard_bytes in (2000, None):
        preprocess(replace(kept, shard_bytes=shard_bytes))
        names = metadata(kept)["document_sources"]
        source = IndexedSource(kept.output_prefix)
        assert [names[number] for number in source.document_sources] == [str(i % 5) for i in range(299)]
    preprocess(replace(kept, source_field=None))  # the new data does not have the old sources
    assert IndexedSource(kept.output_prefix).document_sources is None
    assert "source_field: is for texts" in refused(preprocess, replace(kept, messages_field="messages"))


def test_joined_texts_keep_their_source(options: PreprocessOptions, tmp_path: Path) -> None:
    """The chapters of a book are joined, its subject is its source."""
    subjects = {"acids": "chemistry", "atoms": "physics", "bases": "chemistry"}
    rows = [{"subject": subjects[book], "book": book, "text": f"{book} {n}"} for n in range(9) for book in subjects]
    path = tmp_path / "books.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    books = replace(options, inputs=[str(path)], tokenizer="bytes", concat_by="book", source_field="subject")
    assert preprocess(replace(books, shard_bytes=300)).documents == 3
    names = metadata(books)["document_sources"]
    source = IndexedSource(books.output_prefix)
    for number, book in enumerate(sorted(subjects, key=lambda book: hashlib.sha256(book.encode()).digest())):
        assert names[source.document_sources[number]] == subjects[book]
    by_subject = replace(books, concat_by="subject", source_field="book", overwrite=True)
    assert "subject = 'chemistry', 18 texts: are of sources 'acids' and 'bases'" in refused(preprocess, by_subject)


def test_documents_by_their_tokens(options: PreprocessOptions) -> None:
    preprocess(options)
    lengths = IndexedSource(options.output_prefix).document_lengths
    low, high = np.quantile(lengths, [0.3, 0.6]).astype(int).tolist()
    report = preprocess(replace(options, min_tokens=low, max_tokens=high, overwrite=True))
    kept = lengths[(lengths >= low) & (lengths <= high)]
    assert 0 < len(kept) < len(lengths)
    np.testing.assert_array_equal(IndexedSource(options.output_prefix).document_lengths, kept)
    counted = ((lengths < low).sum(), (lengths > high).sum())
    assert (metadata(options)["too_short"], metadata(options)["too_long"]) == counted
    assert (report.too_short, report.too_long) == counted
    assert "300 with too few" in refused(preprocess, replace(options, min_tokens=10**6, overwrite=True))


@pytest.mark.parametrize("concat_by", [None, "repo"])
def test_empty_documents_are_left_out(options: PreprocessOptions, tmp_path: Path, tokenizer: Path, concat_by) -> None:
    """They are counted for every kind of input; white space is text."""
    texts = ["", "one", "", " \n", ""]
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(texts))
    put_parquet(folder / "b.parquet", {"text": texts, "repo": range(5)})
    if concat_by is None:
        (folder / "c.txt").touch()
    folder_options = replace(options, inputs=[str(folder)], concat_by=concat_by, append_eod=False, shard_bytes=60)
    report = preprocess(folder_options)
    kept = ["one", " \n"] * 2 if concat_by is None else ["one\none", " \n\n \n"]  # repositories 1 and 3
    assert sorted(decoded(options.output_prefix, tokenizer)) == sorted(kept)
    assert (report.empty, report.skipped) == (6 if concat_by else 7, 0)
    assert metadata(options)["empty"] == report.empty


def test_concatenating_by_a_field(options: PreprocessOptions, tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    by_repo = replace(options, inputs=[str(tmp_path / "x.jsonl")], concat_by="repo", append_eod=False, workers=2)
    preprocess(by_repo)
    order = sorted(range(5), key=lambda repo: hashlib.sha256(str(repo).encode()).digest())
    assert decoded(options.output_prefix, tokenizer) == ["\n".join(TEXTS[repo::5]) for repo in order]
    first = contents(options.output_prefix)
    preprocess(replace(by_repo, shard_bytes=1 << 20, workers=1, overwrite=True))
    assert contents(options.output_prefix) == first
    again = replace(by_repo, output_prefix=f"{options.output_prefix}-again")
    too_long = refused(preprocess, replace(again, max_document_bytes=1000))
    assert "60 texts: longer than --max-document-bytes 1000; " in too_long
    assert preprocess(replace(again, resume=True)).reused > 1
    for suffix in (".bin", ".idx", ".json"):
        assert Path(again.output_prefix + suffix).read_bytes() == first[f"data{suffix}"]


def test_workers_import_neither_torch_nor_megatron() -> None:
    """The checks of a configuration import neither of them."""
    program = "import sys, megatron_ext.config.checks, megatron_ext.data.preprocess.pipeline;"
    program += "import megatron_ext.data.rows.dataset;"
    program += "assert not {'torch', 'megatron', 'pyarrow', 'nltk', 'sentencepiece', 'tiktoken'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (shard,) = cut([FileRange.of(tmp_path / "a.jsonl")], Fields(), 500)
    (tmp_path / "a.jsonl").write_text('{"text": "another"}\n')
    assert "a.jsonl changed while it was read" in refused(list, shard.read(Fields(), stop))


def test_a_finished_data_set_without_its_bad_lines_is_another(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnone\n{"text": "two"}\n')
    options = PreprocessOptions([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), "bytes", skip_bad_lines=True)
    preprocess(options)
    assert preprocess(replace(options, resume=True)).documents == 2
    assert "other skip_bad_lines" in refused(preprocess, replace(options, resume=True, skip_bad_lines=False))


def test_existing_output_is_refused(options: PreprocessOptions) -> None:
    Path(options.output_prefix).parent.mkdir()
    for suffix in (".bin", ".idx", ".json", ".mask.npy", ".sources.npy"):
        old = Path(options.output_prefix + suffix)
        old.write_text("old")
        assert f"data{suffix} exists; pass --overwrite" in refused(preprocess, options)
        old.unlink()


def test_what_others_made_is_not_replaced(options: PreprocessOptions, tmp_path: Path) -> None:
    """An input under the name of an output, and weights, which only their owner can make again."""
    corpus = tmp_path / "corpus.json"
    corpus.write_bytes(lines(TEXTS))
    own = replace(options, inputs=[str(corpus)], output_prefix=str(tmp_path / "corpus"), overwrite=True)
    assert "corpus.json; pass another one" in refused(preprocess, own)
    assert corpus.read_bytes() == lines(TEXTS)
    preprocess(options)
    weights = Path(options.output_prefix + ".weights.npy")
    weights.touch()
    assert preprocess(replace(options, resume=True)).documents == len(TEXTS)
    assert "has weights of other tokens" in refused(preprocess, replace(options, overwrite=True))


def test_a_text_that_the_tokenizer_refuses_is_a_bad_document(options: PreprocessOptions, tmp_path: Path) -> None:
    made = train_bpe(TEXTS, 300, tmp_path / "tokenizer").file
    library = tokenizers.Tokenizer.from_file(str(made))
    library.add_special_tokens(["4"])  # a piece of the vocabulary
    library.save(str(made))
    changed = replace(options, tokenizer=str(made.parent))
    assert "a.jsonl: text: 'number 14, " in refused(preprocess, changed)
    report = preprocess(replace(changed, skip_bad_lines=True, overwrite=True))
    assert 0 < report.skipped <= sum("4" in text for text in TEXTS)  # not where 4 is part of a longer piece
    assert report.documents == len(TEXTS) - report.skipped


PEAKS = """
import json, resource, sys
from megatron_ext.config import Config, DataConfig
from megatron_ext.data.preprocess.pipeline import PreprocessOptions, preprocess
if __name__ == "__main__":
    report = preprocess(PreprocessOptions(**json.loads(sys.argv[1]), tokenizer="bytes"))
    (peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(json.dumps([report.problems, int(peak), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


def measured(folder: Path, **options: object) -> tuple[list[str], int, int]:
    """Preprocess in another process; return the problems, and the peak kilobytes of it and of its largest worker."""
    (folder / "peaks.py").write_text(PEAKS)
    command = [sys.executable, str(folder / "peaks.py"), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    problems, own_peak, worker_peak = json.loads(done.stdout)
    return problems, own_peak, worker_peak


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_memory_does_not_grow_with_the_input(tmp_path: Path, ending: str) -> None:
    """The inputs are 2 and 12 MB of documents of 20 kB, which are some kB if compressed."""
    peaks = []
    for documents in (100, 600):
        rows = ({"text": "word " * 4000, "repo": i % (documents // 3)} for i in range(documents))
        raw = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        file = tmp_path / f"a.jsonl.{ending}"
        file.write_bytes(gzip.compress(raw, 1) if ending == "gz" else zstd(raw))
        output = str(tmp_path / str(documents))
        measurements = measured(
            tmp_path, inputs=[str(file)], output_prefix=output, shard_bytes=1 << 20, concat_by="repo"
        )
        peaks.append(measurements[1:])
    for small, large in zip(*peaks, strict=True):
        assert large < small + 8_000, peaks


def test_a_document_longer_than_memory_is_named_and_never_read_whole(tmp_path: Path) -> None:
    """A line and a file of 600 MB, which take no space on disk."""
    jsonl = tmp_path / "a.jsonl"
    text = tmp_path / "b.txt"
    prefix = str(tmp_path / "data")
    with jsonl.open("wb") as file:
        file.write(b'{"text": "first"}\n')
        file.truncate(600 * 10**6)
        file.seek(0, 2)
        file.write(b'\n{"text": "last"}\n')
    with text.open("wb") as file:
        file.truncate(600 * 10**6)
    options = {"inputs": [str(jsonl), str(text)], "max_document_bytes": 10**6, "skip_bad_lines": True}
    problems, *peaks = measured(tmp_path, output_prefix=prefix, **options)
    too_long = "longer than --max-document-bytes 1000000"
    assert problems == [f"{jsonl}:2: {too_long}", f"{text}: {too_long}"]
    assert max(peaks) < 300_000
    source = IndexedSource(prefix)
    read = [bytes(source.read(d, 0, n - 1).tolist()) for d, n in enumerate(source.document_lengths)]
    assert read == [b"first", b"last"]


@pytest.fixture(scope="module")
def punkt(tmp_path_factory: pytest.TempPathFactory):
    """Punkt data made here: nltk's folder with a language of one abbreviation, "Dr.", called english."""
    root = tmp_path_factory.mktemp("nltk_data")
    language = root / "tokenizers" / "punkt_tab" / "english"
    language.parent.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(root))
        import nltk.data
        from nltk.tokenize.punkt import PunktParameters, save_punkt_params

        parameters = PunktParameters()
        parameters.abbrev_types.add("dr")
        save_punkt_params(parameters, str(language))
        patch.setattr(nltk.data, "path", [str(root)])
        yield root


@given(text=st.lists(st.sampled_from(["Dr.", "Hi.", " ", "\n", "a", "!", "é", "?\n\n"]), max_size=30).map("".join))
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_between_sentences(punkt: Path, text: str) -> None:
    assert "".join(split_sentences(text, "english")) == text


def test_sentences_are_sequences(punkt: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello there.  I am Dr. Who.\nReally? ")
    (tmp_path / "b.txt").write_text("Four.")
    preprocess(PreprocessOptions([str(tmp_path)], str(tmp_path / "data"), "bytes", split_sentences=True))
    dataset = IndexedDataset(str(tmp_path / "data"))
    texts = [bytes(ids[ids < 256].tolist()).decode() for ids in dataset[0:4]]
    assert texts == ["Hello there.", "  I am Dr. Who.", "\nReally? ", "Four."]
    assert [ids[-1] == 256 for ids in dataset[0:4]] == [False, False, True, True]
    np.testing.assert_array_equal(dataset.document_indices, [0, 3, 4])


def test_both_encoders_write_the_same(options: PreprocessOptions) -> None:
    pytest.importorskip("gigatoken", reason="the extra fast is not installed")
    written = []
    for encoder in ("tokenizers", "gigatoken"):
        preprocess(replace(options, encoder=encoder, overwrite=True))
        assert metadata(options)["encoder"].startswith(encoder)
        written.append(contents(options.output_prefix))
    assert [name for name in written[0] if written[0][name] != written[1][name]] == ["data.json"]


def test_other_ids_of_gigatoken_end_the_run(options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken", reason="the extra fast is not installed")
    encoder = Encoder(options)
    shard = cut([FileRange.of(path) for path in find_files(options.inputs)], encoder.fields, 1 << 20)[0]
    encoder.write_tokens(shard.read(encoder.fields, stop), io.BytesIO(), Report())
    assert encoder.tokenizer.fast is not None
    wrong = MagicMock(return_value=np.array([7], np.uint32))
    monkeypatch.setattr(encoder.tokenizer, "fast", wrong)
    message = refused(encoder.write_tokens, shard.read(encoder.fields, stop), io.BytesIO(), Report())
    assert "a.jsonl; pass --encoder tokenizers" in message
