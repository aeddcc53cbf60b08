"""The tables of evaluations in the pages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.monitoring.evaluations import evaluation_texts, evaluations_of
from megatron_ext.monitoring.report import write_comparison, write_report

from .records import perplexity_record, recall_record, write_evaluation, write_run


class Tables(HTMLParser):
    """The rows of the tables of a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self._inside = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._inside &= tag not in ("td", "th")

    def handle_data(self, data):
        if self._inside:
            self.rows[-1][-1] += data


def test_a_run_shows_what_is_kept_beside_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5)
    assert "evaluation" not in write_report(run).read_text().split("<main>")[1].replace("evaluation loss", "")
    write_evaluation(run / "evaluations" / "books", "perplexity", perplexity_record({"run": 2.0}))
    rows = Tables(write_report(run).read_text()).rows
    assert ["run", "256", "128", "900", "2.0312", "7.624"] in rows
    assert ["run", "1024 *", "512", "900", "2.0078", "7.447"] in rows


def test_models_of_one_command_stand_side_by_side_with_interval_and_test(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 3) for name in "ab"]
    given = write_evaluation(tmp_path / "given", "recall", recall_record({"a": 0.25, "b": 0.75}))
    write_evaluation(given, "perplexity", perplexity_record({"a": 2.0, "b": 1.9}))
    text = write_comparison(runs, tmp_path / "compare.html", [given]).read_text()
    rows = Tables(text).rows
    assert ["task", "a, 512", "b, 512"] in rows
    assert ["niah_single_1", "25.0", "75.0"] in rows
    assert ["b - a", "512", "all", "+50.0", "+25.0 to +75.0", "1 / 6", "0.125"] in rows
    assert ["b - a", "1024", "-0.1000", "-0.1500 to -0.0500"] in rows
    assert "Of several evaluations" not in text


def test_models_of_several_commands_stand_side_by_side_without(tmp_path: Path) -> None:
    runs = []
    for name, score in (("a", 0.25), ("b", 0.75)):
        runs.append(write_run(tmp_path / name, 3))
        write_evaluation(runs[-1] / "evaluations", "recall", recall_record({name: score}))
        write_evaluation(runs[-1] / "evaluations", "perplexity", perplexity_record({name: score}, tokens=len(name)))
    text = write_comparison(runs, tmp_path / "compare.html").read_text()
    rows = Tables(text).rows
    assert ["niah_single_1", "25.0", "75.0"] in rows
    assert text.count("Of several evaluations: a difference has an interval where one command") == 2
    assert not any("b - a" in row for row in rows)


def test_what_was_asked_otherwise_has_a_table_of_its_own(tmp_path: Path) -> None:
    one = write_evaluation(tmp_path / "one", "perplexity", perplexity_record({"a": 2.0}))
    two = write_evaluation(tmp_path / "two", "perplexity", perplexity_record({"b": 2.0}, tokens=901))
    texts = evaluation_texts(evaluations_of([], [one, two]))
    assert [re.findall(r"<td>([ab])</td>", text) for text in texts] == [["a"] * 4, ["b"] * 4]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("recall", "contents", {"haystack": "ab"}),
        ("recall", "seed", 1),
        ("perplexity", "document_mask", False),
    ],
)
def test_what_was_asked_in_another_way_has_a_table_of_its_own(
    tmp_path: Path, kind: str, field: str, value: object
) -> None:
    makes = {"recall": recall_record, "perplexity": perplexity_record}
    for name in "abc":
        record = makes[kind]({name: 0.5})
        write_evaluation(tmp_path / name, kind, {**record, field: value} if name == "c" else record)
    texts = evaluation_texts(evaluations_of([], [tmp_path / name for name in "abc"]))
    assert ["Of several evaluations" in text for text in texts] == [True, False]


def test_other_tasks_of_a_length_have_a_table_of_their_own(tmp_path: Path) -> None:
    for name, task in (("a", "niah_single_1"), ("b", "vt")):
        record = json.dumps(recall_record({name: 0.5})).replace("niah_single_1", task)
        write_evaluation(tmp_path / name, "recall", json.loads(record))
    assert len(evaluation_texts(evaluations_of([], [tmp_path / "a", tmp_path / "b"]))) == 2


def test_every_model_of_a_record_takes_part_in_its_terms(tmp_path: Path) -> None:
    """One that was asked otherwise than the first is not passed over."""
    record = perplexity_record({"a": 2.0, "b": 2.0})
    write_evaluation(tmp_path / "one", "perplexity", record)
    record["models"]["b"]["lengths"]["256"]["tokens"] = 1
    write_evaluation(tmp_path / "two", "perplexity", record)
    assert len(evaluation_texts(evaluations_of([], [tmp_path / "one", tmp_path / "two"]))) == 2


@pytest.mark.parametrize("lacks", ["seed", "samples", "models"])
def test_a_record_that_does_not_say_how_is_refused(tmp_path: Path, lacks: str) -> None:
    record = recall_record({"a": 0.5})
    folder = write_evaluation(
        tmp_path / "one",
        "recall",
        record | {"models": {}, "comparisons": []}
        if lacks == "models"
        else {k: v for k, v in record.items() if k != lacks},
    )
    with pytest.raises(UserError, match=r"recall\.json is no record of tools/evaluate\.py recall \("):
        evaluations_of([], [folder])


def test_models_of_the_same_name_are_told_apart_and_the_same_model_is_one(tmp_path: Path) -> None:
    base = {"base": 2.0}
    folders = [
        write_evaluation(tmp_path / name, "perplexity", perplexity_record(models))
        for name, models in (("one", base | {"a": 1.5}), ("two", base | {"b": 1.6}), ("three", {"a": 1.7}))
    ]
    (text,) = evaluation_texts(evaluations_of([], folders))
    rows = Tables(text).rows
    names = list(dict.fromkeys(row[0] for row in rows if row[1:2] == ["256"] and len(row) == 6))
    assert names == ["base", "a", f"a ({folders[2]})", "b"]
    assert [row[0] for row in rows if row[0].endswith(" - base")] == ["a - base", "b - base"]


def test_names_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)</script> [x](javascript:y) | z"
    folder = write_evaluation(tmp_path / "one", "perplexity", perplexity_record({name: 2.0}))
    (text,) = evaluation_texts(evaluations_of([], [folder, folder]))
    assert "<script>" not in text
    assert "<a" not in text
    assert any(row[0] == name for row in Tables(text).rows)


def test_what_is_no_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluations: got .*, which holds no perplexity\.json, recall\.json, "):
        evaluations_of([], [tmp_path])
    broken = write_evaluation(tmp_path / "one", "recall", {"models": {}})
    with pytest.raises(UserError, match=r"evaluations: .*recall\.json is no record of tools/evaluate\.py recall \(Key"):
        evaluations_of([], [broken])
    (broken / "recall.json").write_text(json.dumps(recall_record({"a": 1.0}))[:-5])
    with pytest.raises(UserError, match=r"evaluations: .*recall\.json is no record .*JSONDecodeError"):
        evaluations_of([], [broken])
    evaluations_of([tmp_path / "none"], [])  # a run without any
