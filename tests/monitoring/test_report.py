"""Reports: what is read of a run's files, figures, charts and pages, one of them in a real browser."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.checkpoint.history import note_history
from megatron_ext.errors import UserError
from megatron_ext.monitoring import report as pages
from megatron_ext.monitoring.metrics import stage_folders
from megatron_ext.monitoring.report import charts, load_run, load_runs, load_whole, stability, table, write_report
from megatron_ext.token_weighting.passage import Passage
from tests.launcher import Commands
from tests.monitoring.records import evaluation_record, step_record, write_passage_file, write_records, write_run
from tools import report


def _shown(path: Path) -> str:
    """A page's text outside of scripts."""
    page = path.read_text(encoding="utf-8")
    return html.unescape(re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", "", page, flags=re.DOTALL))


def _report(*folders: Path) -> Path:
    return write_report(load_runs(folders), folders[0] / "report.html")


def test_figures_of_the_table(tmp_path):
    """FLOPs are compared with steps at the last window; a step without trained tokens has no loss."""
    records = [step_record(s, window=64 if s < 20 else 1024, flops=3e9 if s < 20 else 4e9) for s in range(40)]
    records[3] |= {"spike": 1}
    records[7] |= {"lm_loss": None}
    records[9] |= {"grad_norm": None, "skipped": 1, "spike": 1}
    records[12] |= {"denominator": 0.0, "lm_loss": 0.0, "train_loss": 0.0, "grad_norm": 0.0, "skipped": 1}
    run = load_run(write_records(tmp_path, records))
    rows = table(run)
    assert rows["FLOPs saved against the last steps"] == "12.5%"  # 140 instead of 160
    assert (rows["Non-finite steps"], rows["Loss spikes"], rows["Steps that changed no weight"]) == ("2", "2", "2")
    losses = [record["lm_loss"] for step, record in enumerate(records) if step not in (7, 12)]
    assert run.curve("lm_loss").values.tolist() == losses


def test_of_two_records_of_a_step_the_later_counts(tmp_path):
    """Two trainers write into one file where the file system has no locks, for example after a requeue."""
    first = [step_record(step, lm_loss=9.0) for step in range(20)]
    second = [step_record(step, lm_loss=1.0) for step in range(15, 30)]
    run = load_run(write_records(tmp_path, first + second))
    assert run.steps == 30
    assert run.curve("lm_loss").steps.tolist() == list(range(30))
    assert run.curve("lm_loss").values.tolist() == [9.0] * 15 + [1.0] * 15


@pytest.mark.filterwarnings("error")
def test_short_runs_have_a_report_and_empty_ones_none(tmp_path):
    _report(write_run(tmp_path / "short", 1))
    (tmp_path / "short" / "metrics.jsonl").write_text('{"step": 0, "lm_loss": null}\n{"step": 1}\n')
    assert "This run folder has no config.yaml." in _report(tmp_path / "short").read_text()
    empty = write_records(tmp_path / "empty", [])
    with pytest.raises(UserError, match="holds no complete step"):
        _report(empty)
    assert [file.name for file in empty.iterdir()] == ["metrics.jsonl"]


def test_the_table_shows_where_a_run_ran_and_how_it_ended(tmp_path):
    folder = write_run(tmp_path, 30)
    facts = {"command": "train --lr <1>", "host": "node7", "devices": "8 x H200", "processes": 8, "layout": "TP 8"}
    note_history(folder, "start", 0, facts | {"parameters": 8_030_000_000})
    assert table(load_run(folder))["Status"] == "no end recorded: it is still training, or was killed"
    note_history(folder, "end", 30, {"how": "done"})
    rows = table(load_run(folder))
    assert [rows[name] for name in ("Status", "Host", "Layout")] == ["done", "node7", "8 processes: TP 8"]
    assert rows["Parameters"] == "8,030,000,000"
    assert "train --lr &lt;1&gt;" in _report(folder).read_text()


@pytest.mark.filterwarnings("error")
def test_any_name_and_configuration_is_shown_as_text(tmp_path):
    """A folder's name is neither HTML nor mathematics."""
    name = "a <b> & $\\a$ </script><script>alert(1)</script>"
    folders = [write_run(tmp_path / name.replace("/", "|"), 60, evaluate_every=20), write_run(tmp_path / "b", 60)]
    (folders[0] / "config.yaml").write_text('model:\n  name: "<script>alert(1)</script> & co"\n')
    text = _shown(_report(folders[0]))
    places = [text.index(title) for title in ("Validation loss", "Throughput", "Completed steps", "Learning rate")]
    assert places == sorted(places)  # the first charts are above the table
    for path in (folders[0] / "report.html", write_report(load_runs(folders), tmp_path / "new" / "compare.html")):
        assert folders[0].name in _shown(path)
        assert "<script>alert(1)</script> & co" in _shown(path)
        page = path.read_text(encoding="utf-8")
        assert "<script>alert" not in page
        assert not re.search(r"<(link|iframe|img)\b|<script[^>]* src=", page)  # one file, which loads nothing


@pytest.mark.parametrize(
    ("name", "record"),
    [
        *(("metrics", {"step": 0, "lm_loss": loss}) for loss in ("2.5", [2.5], {"a": 2.5}, float("nan"), 10**400)),
        *(("metrics", {"step": step, "lm_loss": 2.5}) for step in (10**400, "0", 0.0)),
        ("metrics", {"step": 0, "attention_entropy": [0.5, "0.5"]}),
        ("evaluation", {"step": 0, "by_length": {"long": 2.5}}),
        ("evaluation", {"step": 0, "valid_loss": "2.5"}),
        ("passage", {"step": 0}),
        ("passage", []),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_of_another_type_is_named(tmp_path, name, record):
    """Training does not write such values: a number that is not finite is null there."""
    run = write_run(tmp_path, 3, evaluate_every=1)
    file = next(run.glob(f"{name}.*"), run / f"{name}.json")
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match=rf"{name}\.jsonl?"):
        load_run(run)


def test_charts_show_what_was_recorded(tmp_path):
    measures = {f"attention_{name}": [0.5, 1.5, 2.5] for name in ("entropy", "sink_share")}
    records = [step_record(step, **(measures if step % 5 == 0 else {})) for step in range(60)]
    folder = write_records(tmp_path, records)
    positions = {str(2**power): 3 - 0.1 * power for power in range(6)}
    tasks = {"ruler/acc": 0.5, "ruler/acc/1024": 0.4, "a/b/acc": 0.3, "wiki/perplexity": 30.0}
    record = evaluation_record(3, 3.0, by_length={"1024": 2.5, "128": 3.0}, by_position=positions, lm_eval=tasks)
    (folder / "evaluation.jsonl").write_text(json.dumps(record))
    figures = charts([load_run(folder)])
    (window,) = figures["Context window"].data
    assert window.y.tolist() == [record["window"] for record in records]
    names = [trace.name for trace in figures["Validation loss"].data]
    assert names == [f"{folder.name}, 128 tokens", f"{folder.name}, 1,024 tokens"]
    assert list(figures["Validation loss by position"].data[0].x) == [1, 2, 4, 8, 16, 32]
    assert [len(figures[f"lm-eval: {metric}"].data) for metric in ("acc", "perplexity")] == [3, 1]
    assert [len(figures[f"Attention {name}"].data) for name in ("entropy", "sinks")] == [4, 4]
    records = [step_record(step, grad_norm=900.0 if step == 1234 else 1.0) for step in range(5000)]
    run = load_run(write_records(tmp_path, records))
    extremes, means = charts([run])["Gradient norm before clipping"].data
    assert len(extremes.y) == 2 * len(means.y) == 2 * pages.MOST_POINTS  # a long curve keeps its extremes
    assert (max(extremes.y), max(means.y)) == (900.0, 1 + 899.0 / 25)
    compared = charts([run, run])["Gradient norm before clipping"].data
    assert [max(trace.y) for trace in compared] == 2 * [900.0, 1 + 899.0 / 25]


def test_evaluations_of_a_run(tmp_path):
    """A second one of a step replaces the first, and a length may be evaluated later than others."""
    write_run(tmp_path, 3)
    later = evaluation_record(2, 3.0, by_length={"1024": 2.5, "128": 3.0})
    records = [evaluation_record(0, 5.0), evaluation_record(2, 4.0), later]
    run = load_run(write_records(tmp_path, records, "evaluation.jsonl"))
    assert run.validation["valid_loss"].values.tolist() == [5.0, 3.0]
    curves = pages.parts(run.validation, "by_length")
    assert [curve.tolist() for curve in curves["128"]] == [[2.0], [3.0]]
    assert [curve.tolist() for curve in curves["1024"]] == [[0.0, 2.0], [5.0, 2.5]]
    rows = [label for label in table(run) if label.startswith("Validation")]
    assert rows == ["Validation loss at 128 tokens", "Validation loss at 1,024 tokens"]


def test_the_training_loss_is_smoothed_and_the_doublings_of_the_window_are_shaded(tmp_path):
    steps = [(s, 64 << min(s // 40, 2), 6 - s / 100 + s % 2) for s in range(200)]
    records = [step_record(step, window=window, lm_loss=loss) for step, window, loss in steps]
    figures = charts([load_run(write_records(tmp_path, records))])
    assert list(figures)[:3] == ["Training loss", "Context window", "Throughput"]
    raw, smoothed = figures["Training loss"].data
    assert raw.opacity < 1
    assert np.abs(np.diff(smoothed.y[10:-10])).max() < 0.3 < np.abs(np.diff(raw.y)).min()
    assert smoothed.y[10:-10] == pytest.approx(6.5 - np.arange(10, 190) / 100, abs=0.1)
    assert [(shape.x0, shape.x1) for shape in figures["Throughput"].layout.shapes] == [(0, 40), (40, 80), (80, 200)]
    assert [note.text for note in figures["Throughput"].layout.annotations] == ["64", "128", "256"]


def test_a_constant_metric_is_drawn_without_the_rounding_of_its_means(tmp_path):
    records = [step_record(step, tokens_per_s=1_193_998.4) for step in range(4_999)]
    for trace in charts([load_run(write_records(tmp_path, records))])["Throughput"].data:
        assert set(trace.y) == {1_193_998.4}


def test_spans_too_narrow_to_be_seen_are_shaded_together(tmp_path):
    """A window that turns a thousand times has as many shapes as the page has room for, and none is added alone."""
    records = [step_record(step, window=64 << (step % 2), lm_loss=3.0) for step in range(2000)]
    shapes = charts([load_run(write_records(tmp_path, records))])["Throughput"].layout.shapes
    assert 1 <= len(shapes) <= pages.MOST_POINTS
    assert (shapes[0].x0, shapes[-1].x1) == (0, 2000)


def test_joined_stages_count_on_and_are_marked(tmp_path):
    runs = [load_run(write_run(tmp_path / name, steps, evaluate_every=10)) for name, steps in (("a", 30), ("<b>", 20))]
    run = pages.join_stages(runs, tmp_path)
    assert run.curve("lm_loss").steps.tolist() == list(range(50))
    assert run.validation["valid_loss"].steps.max() == 30 + runs[1].validation["valid_loss"].steps.max()
    marks = [note for note in charts([run])["Throughput"].layout.annotations if note.text in ("a", "&lt;b&gt;")]
    assert [mark.x for mark in marks] == [0, 30]


def test_a_comparison_has_a_trace_and_a_column_for_each_run(tmp_path):
    runs = [write_run(tmp_path / name, 60, evaluate_every=20, weighted=name == "b") for name in ("a", "b")]
    figures = charts(load_runs(runs))
    assert [trace.name for trace in figures["Throughput"].data] == ["a", "b"]
    assert [trace.name for trace in figures["Mean score"].data] == ["b"]
    text = _shown(write_report(load_runs(runs), tmp_path / "compare.html"))
    assert "mean +0.0000 nats, standard deviation over steps 0.0000. One seed each" in text
    with pytest.raises(UserError, match="/a twice"):
        load_runs([*runs, tmp_path / "b" / ".." / "a"])


def test_evaluations_of_the_run_and_given_ones_are_shown(tmp_path):
    run = write_run(tmp_path / "run", 3)
    for folder, name in ((run / "evaluations" / "books", "own"), (tmp_path / "given", "<script>other</script>")):
        folder.mkdir(parents=True)
        (folder / "perplexity.md").write_text(f"| model | loss |\n|---|---|\n| {name} | 2.5 |\n")
    text = write_report([load_run(run)], run / "report.html", [tmp_path / "given"]).read_text()
    assert "| own | 2.5 |" in text
    assert "| &lt;script&gt;other&lt;/script&gt; | 2.5 |" in text
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"evaluations: got .*, which holds no \.md"):
        write_report([load_run(run)], run / "report.html", [tmp_path / "empty"])


def test_a_passage_is_read_as_it_was_written(tmp_path: Path) -> None:
    passage = Passage(step=3, start=2, tokens=(104, 105), texts=("h", "i"), weights=(0.0, 1.5), scores=(None, 0.25))
    passage.write(tmp_path)
    assert Passage.read(tmp_path) == passage
    assert [path.name for path in tmp_path.iterdir()] == ["passage.json"]
    assert passage.html().count("<span") == 2
    assert Passage.read(write_passage_file(tmp_path, texts=None)).html().count("<span") == 4
    run = write_passage_file(write_run(tmp_path / "run", 3, weighted=True))
    assert "tokens 4,096 to 4,099 of a row" in _report(run).read_text(encoding="utf-8")


def test_the_command_reports_each_stage_by_recorded_time(tmp_path, capsys):
    """Copying a folder changes the times of files."""
    for number, name in enumerate(("short", "long")):
        write_records(tmp_path / name, [step_record(step, time=1000.0 * number + step) for step in range(2)])
        os.utime(tmp_path / name / "metrics.jsonl", (100.0 - number, 100.0 - number))
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1::2] == [str(tmp_path / name / "report.html") for name in ("short", "long", "")]
    assert out.startswith("training loss 5.5000 at the start, 5.3")
    assert stage_folders(tmp_path / "short") == []


def test_the_command_gives_stability_figures_of_a_span_of_steps(tmp_path, capsys):
    """A line for each run, as the paper's table has them."""
    runs = [str(write_run(tmp_path / name, 40)) for name in ("a", "b")]
    spans = [[step_record(step)[key] for step in range(20, 40)] for key in ("lm_loss", "grad_norm")]
    assert report.main([*runs, "--stability-steps", "20", "40"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("steps 20 to 39")
    assert [line.split()[0] for line in lines] == ["a", "b"]
    for line in lines:
        figures = [float(figure) for figure in line.split()[1:]]
        assert figures == pytest.approx(list(stability(*spans).values()), abs=1e-4)
    assert report.main([runs[0], "--stability-steps", "35", "60"]) == 2
    assert "has 5 finite steps, needs 10; its last step is 39" in capsys.readouterr().err


def test_differences_are_effect_sizes_with_their_spread_over_steps(tmp_path):
    noise = np.random.default_rng(0).normal(size=(2, 200))
    runs = []
    for name, shift in (("base", 0.0), ("better", -0.05)):
        common = 3.0 + 0.5 * noise[0]  # what the rows of a step have in common
        losses = common + shift + (0.02 * noise[1] if shift else 0.0)
        runs.append(write_records(tmp_path / name, [step_record(s, lm_loss=x) for s, x in enumerate(losses)]))
    last = noise[1, 180:]
    effect = pages.loss_difference(*load_runs(runs))
    assert effect == pytest.approx((-0.05 + 0.02 * last.mean(), 0.02 * last.std(ddof=1)))
    assert pages.loss_difference(*load_runs([runs[0], write_run(tmp_path / "short", 19)])) is None


def test_the_four_stability_figures():
    ratio = (5 * 3.0 + 4 * 1.0) / 9
    assert list(stability([1.0, 3.0] * 5, [0.5, 2.0]).values()) == [1.0, 2.0, ratio, 0.75]
    # t = 10: nine 0 and a 1 -> sqrt(0.1 * 0.9) = 0.3; t = 11: eight 0 and two 1 -> sqrt(0.2 * 0.8) = 0.4.
    assert stability([1.0] * 9 + [2.0, 2.0], [1.0])["volatility"] == pytest.approx((0.3 + 0.4) / 2)


SOURCES = {"books": {"share": 0.75, "row_tokens": 1000.0}, "code": {"share": 0.25, "row_tokens": 500.0}}


def test_the_shares_of_a_mixture_are_of_tokens_and_add_up_over_the_run(tmp_path):
    rows = [{"books": 3, "code": 1}] * 10 + [{"books": 1, "code": 3}] * 10
    write_records(tmp_path, [step_record(step, source_rows=drawn) for step, drawn in enumerate(rows)])
    facts = {"host": "h", "devices": "d", "processes": 1, "layout": "TP 1", "command": "c", "parameters": 1}
    note_history(tmp_path, "start", 0, facts | {"sources": SOURCES})
    books, requested, code, _ = charts([load_run(tmp_path)])[f"Mixture as drawn by {tmp_path.name}"].data
    assert [books.name, requested.name, code.name] == ["books", "books, requested", "code"]
    assert list(requested.y) == [0.75, 0.75]
    assert [books.y[0], code.y[0]] == pytest.approx([3000 / 3500, 500 / 3500])
    assert [books.y[-1], code.y[-1]] == pytest.approx([2 / 3, 1 / 3])


def test_each_stage_has_its_own_mixture(tmp_path: Path) -> None:
    """Tokens of a row and requested shares; a run without a history has no chart."""
    facts = {"host": "h", "devices": "d", "processes": 1, "layout": "TP 1", "command": "c", "parameters": 1}
    for name, of_books, of_code in (("a", (0.75, 3000.0), (0.25, 1000.0)), ("b", (0.25, 500.0), (0.75, 500.0))):
        write_records(tmp_path / name, [step_record(step, source_rows={"books": 1, "code": 1}) for step in range(10)])
        sources = {
            source: {"share": share, "row_tokens": tokens}
            for source, (share, tokens) in (("books", of_books), ("code", of_code))
        }
        note_history(tmp_path / name, "start", 0, facts | {"sources": sources})
    books, first, second, *_ = charts([load_whole(tmp_path)])[f"Mixture as drawn by {tmp_path.name}"].data
    assert [books.y[9], books.y[19]] == pytest.approx([0.75, 35 / 50])
    assert [(list(line.x), list(line.y)) for line in (first, second)] == [([0, 10], [0.75] * 2), ([10, 19], [0.25] * 2)]
    (tmp_path / "a" / "history.jsonl").unlink()
    assert f"Mixture as drawn by {tmp_path.name}" not in charts([load_whole(tmp_path)])


def test_stages_that_have_not_begun_are_left_out(alone: Commands, tmp_path: Path) -> None:
    """And the others are joined where runs are compared."""
    for name, stages in (("one", {"a": 30, "b": 0}), ("two", {"a": 20, "b": 20})):
        for stage, steps in stages.items():
            folder = tmp_path / name / stage
            if steps:
                write_run(folder, steps)
            else:
                write_records(folder, [])
    runs = [tmp_path / name for name in ("one", "two")]
    alone.run("tools/report.py", runs[0])
    alone.run("tools/report.py", *runs, "--output", tmp_path / "compare.html")
    (done,) = alone.run("tools/report.py", *runs, "--stability-steps", 0, 30)
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["one", "two"]
    assert [run.steps for run in load_runs(runs)] == [30, 40]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement;
  document.title = `${root.scrollWidth - root.clientWidth} ${document.querySelectorAll(".main-svg .scatter").length}`
    + ` ${getComputedStyle(document.querySelector(".modebar")).opacity}`;
}, 1000));</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_a_page_fits_its_window_and_draws_its_charts(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 120, evaluate_every=20) for name in ("a long name " * 12, "other")]
    page = write_report(load_runs(runs), tmp_path / "compare.html")
    page.write_text(page.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         "--window-size=500,900", f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=20000",
         page.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    wider, drawn, tool_bar = done.stdout.split("<title>")[1].split("</title>")[0].split()
    assert int(wider) == 0
    assert int(drawn) >= 14  # two runs in seven charts
    assert int(tool_bar) == 0  # without a pointer
