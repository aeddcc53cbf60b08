"""Mixtures: files within files, parts of --data-path; documents divided by --split."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.utils import get_blend_from_list

from megatron_ext.config.arguments import dump_yaml, parse
from megatron_ext.config.checks import mistakes
from megatron_ext.config.mixture import MixturePart, parts_of_data_path, split_documents
from megatron_ext.errors import UserError
from tests.conftest import ROOT, refused
from tests.theirs import write_theirs


def write(folder: Path, name: str, parts: object) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(parts))
    return path


def test_a_mixture_and_a_part_of_it_may_be_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "deep/short.yaml", [{"prefix": "wiki", "weight": 1}, {"prefix": "web", "weight": 3}])
    parts: list[Any] = [{"prefix": "books", "weight": 60, "packing": "bm25", "packing_options": ["first_tokens=8"]}]
    parts += [{"weight": 40, "mixture": "deep/short.yaml", "length": 16}]
    path = write(tmp_path, "all.yaml", parts)
    monkeypatch.chdir(tmp_path)
    config = parse(["--mixture", str(path)])
    parsed = [(part.prefix, part.weight, part.length) for part in config.data.mixture]
    assert parsed == [("books", 60, None), ("wiki", 10, 16), ("web", 30, 16)]
    assert config.data.mixture[0].options == {"first_tokens": 8}
    for mixture in (parts, str(path)):
        assert parse(["--config", str(write(tmp_path, "run.yaml", {"data": {"mixture": mixture}}))]) == config
    (tmp_path / "dumped.yaml").write_text(dump_yaml(config))
    assert parse(["--config", str(tmp_path / "dumped.yaml")]) == config


def test_prefixes_without_weights_are_weighted_by_their_tokens(tmp_path: Path) -> None:
    """Megatron-LM uses such data sets whole; its parser says which words are prefixes."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    for prefix, tokens in ((a, 10), (b, 30), (c, 60)):
        write_theirs(prefix, [np.ones(tokens, dtype=np.int64)], 100)
    for words in ([a, b], [a, b, c], ["0.3", a, "0.7", b], [a]):
        prefixes, weights = get_blend_from_list(words)
        config = parse(["--data-path", *words])
        assert [part.prefix for part in config.data.parts] == prefixes
        expected = weights or [{a: 10, b: 30, c: 60}[prefix] for prefix in prefixes]
        assert [part.weight for part in config.data.parts] == (expected if len(words) > 1 else [1])
        assert parse(["--valid-data-path", *words]).data.valid_parts == config.data.parts
    for words in ([a, str(tmp_path / "gone")], ["0.3", a, b]):
        with pytest.raises(UserError, match="several that exist, or a weight before each"):
            _ = parse(["--data-path", *words]).data.parts


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "mixture: got {}, needs a valid list"),
        ([], "holds no parts"),
        (["a"], "mixture.0: got 'a', needs a valid dictionary"),
        ([{"prefix": "a", "weight": 0}], "mixture.0.weight: got 0, needs more than 0"),
        ([{"mixture": "none.yaml"}], "none.yaml, needs a readable YAML file"),
        ([{"mixture": "other.yaml", "packing": "bm25"}], "packing beside `mixture`"),
        ([{"mixture": "mixture.yaml"}], "includes itself"),
        ([{"weight": 1}], "mixture.0.prefix"),
        ([{"prefix": "a", "wieght": 1}], "mixture.0.wieght"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, parts: object, message: str) -> None:
    path = write(tmp_path, "mixture.yaml", parts)
    assert message in refused(parse, ["--mixture", str(path)])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (MixturePart("d/a", length=48), "mixture: a: got length 48, needs a divisor of seq_length 64"),
        (MixturePart("d/a", weight=float("nan")), "mixture: a: got weight nan"),
        (MixturePart("a", packing="bm25", packing_options=("x",)), "packing_options: got 'x', needs NAME=NUMBER"),
        (MixturePart("a", packing_options=("x=1",)), "mixture: a: packing: random has no option 'x'; it takes none"),
        (MixturePart("a", packing="whole_document", packing_options=("below=64",)), "needs more than the 64 tokens"),
    ],
)
def test_mistakes_in_a_part(part: MixturePart, message: str) -> None:
    assert any(message in line for line in part.mistakes(64))


def test_the_ready_mixtures_are_complete() -> None:
    for path in (ROOT / "examples" / "mixtures").glob("*.yaml"):
        config = parse(["--mixture", str(path), "--seq-length", "524288", "--vocab-size", "64"])
        assert not list(mistakes(config, 1))
        assert sum(part.weight for part in config.data.mixture) == pytest.approx(100)


def test_weights_and_prefixes_of_data_path() -> None:
    assert parts_of_data_path(["data/a"]) == (MixturePart("data/a", 1.0),)
    assert parts_of_data_path(["0.3", "A", "7e-1", "B"]) == (MixturePart("A", 0.3), MixturePart("B", 0.7))
    assert parts_of_data_path(["1", "A"]) == (MixturePart("A", 1.0),)
    packed = {"packing": "upsample_long", "packing_options": ("factor=2",)}
    assert parts_of_data_path(["A"], **packed) == (MixturePart("A", 1.0, **packed),)
    for wrong in ([], ["A", "B"], ["1", "A", "B"], ["A", "1"]):
        assert "--data-path 0.3 A 0.7 B" in refused(parts_of_data_path, wrong)


@given(
    documents=st.integers(3, 500),
    shares=st.lists(st.sampled_from([0, 0.001, 0.5, 1, 2, 98, 969]), min_size=1, max_size=3).filter(any),
)
def test_splits_are_contiguous_and_proportional(documents: int, shares: list[float]) -> None:
    parts = split_documents(documents, ",".join(map(str, shares)))
    assert [i for part in parts for i in part] == list(range(documents))
    for part, share in itertools.zip_longest(parts, shares, fillvalue=0):
        assert isinstance(part, range)
        assert bool(part) == (share > 0)
        assert abs(len(part) - documents * share / sum(shares)) <= 2


def test_split_examples_and_bad_splits() -> None:
    assert split_documents(100, "98,2,0") == (range(98), range(98, 100), range(100, 100))
    assert split_documents(5, "99,1") == (range(4), range(4, 5), range(5, 5))
    assert split_documents(3, "1,1000,1") == (range(1), range(1, 2), range(2, 3))
    for split in ("", "a,b", "0,0,0", "1,-1", "nan", "inf,1", "1,1,1,1", "1e999999999,1"):
        assert "one to three shares" in refused(split_documents, 10, split)
    assert "asks for 2 parts, but the data set has 1 documents" in refused(split_documents, 1, "98,2,0")
