"""The mixture as it was drawn, from a run's records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.monitoring.history import note_start
from megatron_ext.monitoring.mixture import drawn_mixture
from megatron_ext.monitoring.report import write_report
from megatron_ext.monitoring.runs import load_run

from .records import step_record, write_run

SOURCES = {"books": {"share": 0.75, "row_tokens": 1000.0}, "code": {"share": 0.25, "row_tokens": 500.0}}


def write_mixed(folder: Path, *, told: bool = True) -> Path:
    """Twenty steps: 3 rows of books and 1 of code, then 1 and 3."""
    write_run(folder, 1)
    records = [
        step_record(step, source_rows={"books": 3, "code": 1} if step < 10 else {"books": 1, "code": 3})
        for step in range(20)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if told:
        facts = {"host": "h", "devices": "d", "processes": 1, "layout": "TP 1", "command": "c", "parameters": 1}
        note_start(folder, 0, facts | {"sources": SOURCES})
    return folder


def test_shares_are_of_tokens_and_add_up_over_the_run(tmp_path: Path) -> None:
    drawn = drawn_mixture(load_run(write_mixed(tmp_path)))
    assert drawn is not None
    assert drawn.names == ("books", "code")
    assert drawn.asked.tolist() == [0.75, 0.25]
    assert drawn.rows.tolist() == [40, 40]
    assert drawn.tokens.tolist() == [40_000, 20_000]
    assert drawn.shares[0] == pytest.approx([3000 / 3500, 500 / 3500])
    assert drawn.shares[-1] == pytest.approx([2 / 3, 1 / 3])
    assert drawn.shares.sum(axis=1) == pytest.approx(np.ones(20))


def test_without_a_history_rows_are_held_to_be_equally_full(tmp_path: Path) -> None:
    drawn = drawn_mixture(load_run(write_mixed(tmp_path, told=False)))
    assert drawn is not None
    assert drawn.shares[-1].tolist() == [0.5, 0.5]
    assert np.isnan(drawn.asked).all()


def test_a_run_of_one_data_set_has_none(tmp_path: Path) -> None:
    run = write_run(tmp_path, 3)
    assert drawn_mixture(load_run(run)) is None
    assert "Mixture as drawn" not in write_report(run).read_text()


def test_the_report_has_a_table_and_a_chart(tmp_path: Path) -> None:
    text = write_report(write_mixed(tmp_path)).read_text()
    assert text.count("<h2>Mixture as drawn</h2>") == 2
    assert '<th scope="row">books</th><td>75.00%</td><td>66.67%</td><td>40</td>' in text
    assert '<th scope="row">code</th><td>25.00%</td><td>33.33%</td><td>40</td>' in text
