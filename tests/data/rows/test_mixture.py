"""Mixtures: files within files, sequences laid into rows, shares of the tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.config.arguments import dump_yaml, parse, parse_stages
from megatron_ext.config.checks import check_stages, mistakes
from megatron_ext.data.packing import PackedRows, build_plan
from megatron_ext.data.rows.blend import BlendedRows, LaidSequences
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.rows.mixture import MixturePart, parts_of_data_path, read_mixture
from megatron_ext.errors import UserError
from tests.data.packing.sources import PAD, ListedSource, seeds, some_lengths

ROOT = Path(__file__).resolve().parents[3]


def write(folder: Path, name: str, parts: object) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(parts))
    return path


def test_a_part_may_be_a_file_of_parts(tmp_path: Path) -> None:
    write(tmp_path, "deep/short.yaml", [{"prefix": "wiki", "weight": 1}, {"prefix": "web", "weight": 3}])
    outer = write(
        tmp_path, "all.yaml", [{"prefix": "books", "weight": 60}, {"weight": 40, "mixture": "deep/short.yaml"}]
    )
    assert read_mixture(outer) == [
        {"prefix": "books", "weight": 60},
        {"prefix": "wiki", "weight": 10.0},
        {"prefix": "web", "weight": 30.0},
    ]


def test_a_mixture_is_a_file_or_a_list_in_the_configuration(tmp_path: Path) -> None:
    parts = [{"prefix": "a", "weight": 0.5, "packing": "bm25", "packing_options": ["first_tokens=8"]}, {"prefix": "b"}]
    path = write(tmp_path, "mixture.yaml", parts)
    by_flag = parse(["--mixture", str(path)])
    inside, named = tmp_path / "inside.yaml", tmp_path / "named.yaml"
    inside.write_text(yaml.safe_dump({"data": {"mixture": parts}}))
    named.write_text(yaml.safe_dump({"data": {"mixture": str(path)}}))
    assert by_flag == parse(["--config", str(inside)]) == parse(["--config", str(named)])
    assert by_flag.data.mixture[0].options == {"first_tokens": 8}
    inside.write_text(dump_yaml(by_flag))
    assert parse(["--config", str(inside)]) == by_flag


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, "holds no parts"),
        ([{"prefix": "a", "weight": 0}], "part 0 has weight 0"),
        ([{"mixture": "mixture.yaml"}], "names itself"),
        ([{"mixture": "none.yaml"}], "none.yaml cannot be read"),
        ([{"mixture": "other.yaml", "packing": "bm25"}], "packing beside `mixture`"),
        ([{"weight": 1}], "mixture.0.prefix"),
        ([{"prefix": "a", "wieght": 1}], "mixture.0.wieght"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, parts: object, said: str) -> None:
    path = write(tmp_path, "mixture.yaml", parts)
    with pytest.raises(UserError) as caught:
        parse(["--mixture", str(path)])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_in_the_configuration_may_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "deep/short.yaml", [{"prefix": "wiki"}, {"prefix": "web", "weight": 3}])
    parts = [{"prefix": "books", "weight": 60}, {"weight": 40, "mixture": "deep/short.yaml"}]
    path = write(tmp_path, "run.yaml", {"data": {"mixture": parts}})
    monkeypatch.chdir(tmp_path)
    assert [part.weight for part in parse(["--config", str(path)]).data.mixture] == [60, 10, 30]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (MixturePart("d/a", length=48), "mixture: a: got length 48, needs a divisor of seq_length 64"),
        (MixturePart("d/a", weight=float("nan")), "mixture: a: got weight nan"),
        (MixturePart("a", packing="bm25", packing_options=("x",)), "packing_options: got 'x', needs NAME=NUMBER"),
        (MixturePart("a", packing_options=("x=1",)), "mixture: a: packing: random has no option 'x'; it takes none"),
        (
            MixturePart("a", packing="upsample_long", packing_options=("fctor=2",)),
            "upsample_long has no option 'fctor'",
        ),
        (MixturePart("a", packing="whole_document", packing_options=("below=64",)), "needs more than the 64 tokens"),
    ],
)
def test_mistakes_in_a_part(part: MixturePart, said: str) -> None:
    assert any(said in line for line in part.mistakes(64))


@given(lengths=some_lengths, length=st.sampled_from([1, 2, 4, 8]), count=st.sampled_from([1, 2, 4]), seed=seeds)
def test_sequences_fill_rows_as_separate_documents(lengths: list[int], length: int, count: int, seed: int) -> None:
    sequences = RowDataset(ListedSource(lengths), range(len(lengths)), length, seed)
    rows = LaidSequences(sequences, count * length)
    assert rows.row_tokens == rows.row_length == count * length
    for sample in range(3):
        row, parts = rows.row(sample), [sequences.row(sample * count + number) for number in range(count)]
        np.testing.assert_array_equal(row.tokens[:-1], np.concatenate([part.tokens[:-1] for part in parts]))
        assert (np.diff(row.document_ends) > 0).all()
        for number, part in enumerate(parts):
            first, last = number * length, (number + 1) * length
            inside = row.document_ends[(row.document_ends > first) & (row.document_ends < last)] - first
            np.testing.assert_array_equal(inside, part.document_ends[part.document_ends < length])
            assert last in row.document_ends or number == count - 1
            labels = row.tokens[1:][first:last]
            where = row.trained[first:last]
            np.testing.assert_array_equal(labels[where], part.tokens[1:][where])
            assert where.all() or (number < count - 1 and where[:-1].all() and not where[-1])


def test_shares_are_of_tokens_where_rows_have_padding() -> None:
    full = RowDataset(ListedSource([4096]), range(1), 8, 0)
    three_of_eight = ListedSource([3] * 64)
    padded = PackedRows(three_of_eight, build_plan("best_fit", three_of_eight, range(64), 4, 0), 0, pad_id=PAD)
    assert padded.row_tokens == 3
    blend = BlendedRows([full, LaidSequences(padded, 8)], [0.5, 0.5])
    found: Counter[str] = Counter()
    for sample in range(1400):
        tokens = blend.row(sample).tokens[:-1]
        source = "full" if blend.locate(sample).dataset == 0 else "padded"
        found[source] += int((tokens != PAD).sum())
    assert abs(found["full"] / found.total() - 0.5) < 1e-3


@pytest.mark.parametrize("name", ["shortmix", "prolong_64k", "prolong_512k"])
def test_ready_mixtures_are_the_papers(name: str) -> None:
    path = ROOT / "examples" / "mixtures" / f"{name}.yaml"
    config = parse(["--mixture", str(path), "--seq-length", "524288", "--vocab-size", "64"])
    parts = config.data.mixture
    assert not list(mistakes(config, 1))
    assert sum(part.weight for part in parts) == pytest.approx(100)
    if name != "shortmix":
        assert sum(part.weight for part in parts if "code" in part.label) == pytest.approx(30)
        assert sum(part.weight for part in parts if "books" in part.label and "text" not in part.label) == 30
        long = [part for part in parts if part.packing == "whole_document"]
        assert sum(part.weight for part in long) == pytest.approx(63)


def test_the_length_of_a_nested_mixture_is_that_of_its_parts(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.yaml", tmp_path / "outer.yaml"
    inner.write_text("[{prefix: a, weight: 1}, {prefix: b, weight: 3}]")
    outer.write_text("[{mixture: inner.yaml, weight: 8, length: 16}, {prefix: c, weight: 2}]")
    assert [(part.prefix, part.weight, part.length) for part in parse(["--mixture", str(outer)]).data.mixture] == [
        ("a", 2, 16),
        ("b", 6, 16),
        ("c", 2, None),
    ]


def test_the_ready_stages_are_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stages = parse_stages(["--config", "examples/configs/prolong/prolong_8b.yaml", "--save", "run"])
    check_stages(stages, 64)
    for stage, base, row, batch in zip(stages[:2], (8e6, 1.28e8), (2**16, 2**19), (2**22, 2**23), strict=True):
        data, rates, steps = stage.config.data, stage.config.learning_rate_schedule(), stage.config.training.train_iters
        assert (stage.config.model.rotary_base, data.seq_length) == (base, row)
        assert data.global_batch_size * row == batch
        assert steps * batch == 20 * 2**30
        assert (rates.warmup_steps, rates.style) == (steps // 10, "cosine")
        assert (rates.at(steps // 10), rates.at(steps)) == pytest.approx((1e-5, 1e-6))
        at_64k = {part.label: part.weight for part in data.mixture if part.length == 2**16}
        short = {"fineweb-edu": 27, "fineweb": 27, "wikipedia": 11, "stackexchange": 11}
        short |= {"tulu-v2": 8, "openwebmath": 8, "arxiv": 8}
        packed = {name: pytest.approx(weight * 0.37) for name, weight in short.items()}
        assert at_64k == ({} if row == 2**16 else {"code-64k": 15, "books-64k": 24.9} | packed)


def test_weights_and_prefixes_of_data_path() -> None:
    assert parts_of_data_path(["data/a"]) == (MixturePart("data/a", 1.0),)
    assert parts_of_data_path(["0.3", "A", "7e-1", "B"]) == (MixturePart("A", 0.3), MixturePart("B", 0.7))
    assert parts_of_data_path(["1", "A"]) == (MixturePart("A", 1.0),)
    packed = {"packing": "upsample_long", "packing_options": ("factor=2",)}
    assert parts_of_data_path(["A"], **packed) == (MixturePart("A", 1.0, **packed),)


@pytest.mark.parametrize("data_path", [[], ["A", "B"], ["1", "A", "B"], ["A", "1"]])
def test_a_bad_data_path_is_refused(data_path: list[str]) -> None:
    with pytest.raises(UserError, match=r"--data-path 0\.3 A 0\.7 B"):
        parts_of_data_path(data_path)
