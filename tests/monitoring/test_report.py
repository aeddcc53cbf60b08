from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.errors import UserError
from megatron_ext.inspect.passage import read_passage, view_passage
from megatron_ext.monitoring.history import note_end, note_start
from megatron_ext.monitoring.report import NONE, write_comparison, write_report
from megatron_ext.monitoring.runs import load_runs, paired_differences
from megatron_ext.monitoring.stability import stability

from .records import evaluation_record, passage_record, step_record, write_passage_file, write_run

TOOL = Path(__file__).parents[2] / "tools" / "report.py"
PNG = b"\x89PNG\r\n\x1a\n"


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, str] = {}
        self.pre = ""
        self._inside = self._header = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "th":
            self._header = data
        elif self._inside == "td":
            self.rows[self._header] = data
        elif self._inside == "pre":
            self.pre += data


class _Passage(HTMLParser):
    """The tokens of the passage: what is read, and the attributes of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.classes: list[str] = []
        self.tokens: list[dict[str, str | None]] = []
        self.marks: list[str] = []
        self.text = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "div" and "passage" in (attributes.get("class") or ""):
            self._inside, self.classes = True, attributes["class"].split()
        elif self._inside and tag == "span":
            self.tokens.append(attributes)
        elif self._inside:
            assert tag == "i"
            self.marks += [attributes["data-mark"]] if "data-mark" in attributes else []

    def handle_endtag(self, tag):
        self._inside &= tag != "div"

    def handle_data(self, data):
        self.text += data if self._inside else ""


def _page(folder: Path) -> _Page:
    return _Page(write_report(folder).read_text(encoding="utf-8"))


def test_the_page_holds_its_charts_and_nothing_from_the_network(tmp_path):
    folder = write_run(tmp_path, 30, evaluate_every=10)
    page = _page(folder)
    drawn = [tag for tag, _ in page.tags].count("svg")
    assert drawn == [tag for tag, _ in page.tags].count("figure") >= 8
    assert (folder / "report.png").read_bytes().startswith(PNG)
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in page.tags}
    text = (folder / "report.html").read_text()
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert not re.search(r"(?:fill|stroke|color): #[0-9a-f]{6}", text.split("<main>")[1])  # dark mode has its own


def test_every_reference_of_a_chart_is_inside_it_and_no_name_stands_twice(tmp_path):
    text = write_report(write_run(tmp_path, 60, evaluate_every=10, weighted=True)).read_text()
    names: list[str] = []
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        own = re.findall(r' id="([^"]+)"', svg)
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) == set(own)
        names += own
    assert len(names) == len(set(names)) > 0


def test_attention_is_drawn_layer_by_layer(tmp_path):
    measures = {f"attention_{name}": [0.5, 1.5, None] for name in ("entropy", "sink_share", "s_max_scaled", "distance")}
    records = [step_record(step, **(measures if step % 5 == 0 else {})) for step in range(20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = write_report(tmp_path).read_text()
    for title in ("Attention entropy", "Attention sinks", "Largest attention score", "Attended distance"):
        assert f"{title} by layer" in text
    assert text.count("mean of 3 layers") == 4


def test_a_run_says_where_when_and_how_it_ended(tmp_path):
    folder = write_run(tmp_path, 30)
    facts = {"command": "train --lr <1>", "host": "node7", "devices": "8 x H200", "processes": 8, "layout": "TP 8"}
    note_start(folder, 0, facts | {"parameters": 8_030_000_000})
    assert _page(folder).rows["Status"] == "no end noted: it still trains, or was killed"
    note_end(folder, 30, "done")
    rows = _page(folder).rows
    assert [rows[name] for name in ("Status", "Host", "Layout")] == ["done", "node7", "8 processes: TP 8"]
    assert rows["Parameters"] == "8.03B"
    assert "train --lr &lt;1&gt;" in (folder / "report.html").read_text()


def test_time_saved_is_held_against_the_steps_at_the_last_window(tmp_path):
    records = [
        step_record(step, window=64 if step < 20 else 1024, step_time_s=1.0 if step < 20 else 2.0) for step in range(40)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert _page(tmp_path).rows["Time saved against the last window"] == "25.0%"  # 60 s instead of 80


def test_flops_saved_are_told_beside_it(tmp_path):
    records = [
        step_record(step, window=64 if step < 20 else 1024, flops=3e9 if step < 20 else 4e9) for step in range(40)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert _page(tmp_path).rows["FLOPs saved against the last window"] == "12.5%"  # 140 instead of 160


def test_a_logarithmic_axis_says_so(tmp_path):
    """The gradient norm and the window range over more than a factor of 8; the throughput does not."""
    text = write_report(write_run(tmp_path, 60)).read_text()
    labels = {title: set(re.findall(r"<text[^>]*>([^<]*)</text>", svg)) for title, svg in _charts(text).items()}
    assert "tokens, log scale" in labels["Context window"]
    assert "L2 norm, log scale" in labels["Gradient norm before clipping"]
    assert "tokens / s" in labels["Throughput"]
    compared = write_comparison([tmp_path, write_run(tmp_path / "b", 60)], tmp_path / "compare.html").read_text()
    assert "L2 norm, log scale" in _charts(compared)["Gradient norm before clipping"]


def _charts(page: str) -> dict[str, str]:
    figures = re.findall(r"<figure.*?<h2>(.*?)</h2>.*?(<svg.*?</svg>)", page, flags=re.DOTALL)
    return dict(figures)


def test_a_comparison_has_losses_by_length_and_position_and_attention(tmp_path):
    runs = []
    for name, loss in (("a", 3.0), ("b", 2.5)):
        runs.append(write_run(tmp_path / name, 1))
        measures = {f"attention_{key}": [loss, loss + 1] for key in ("entropy", "sink_share", "distance")}
        records = [step_record(step, **(measures if step % 5 == 0 else {})) for step in range(25)]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        positions = {str(2**power): loss - 0.1 * power for power in range(6)}
        by_length = {"128": loss + 0.25, "512": loss}
        evaluation = evaluation_record(25, loss, by_length=by_length, by_position=positions)
        (runs[-1] / "evaluation.jsonl").write_text(json.dumps(evaluation) + "\n")
    text = write_comparison(runs, tmp_path / "compare.html").read_text()
    rows = dict(re.findall(r'<th scope="row">([^<]*)</th>((?:<td>[^<]*</td>)+)', text))
    assert rows["Final validation loss at 128"] == "<td>3.2500</td><td>2.7500</td>"
    assert rows["Final validation loss at 512"] == "<td>3.0000</td><td>2.5000</td>"
    names = list(rows)
    assert names[1:4] == ["Final validation loss", "Final validation loss at 128", "Final validation loss at 512"]
    titles = _charts(text)
    assert "Loss by position, last evaluation" in titles
    assert {"Attention entropy, mean of layers", "Attention sinks, mean of layers"} <= titles.keys()
    assert "filled where the interval leaves 0 out" in text


def test_spikes_and_skipped_steps_are_counted(tmp_path):
    records = [step_record(step, spike=int(step in (3, 9)), skipped=int(step == 9)) for step in range(20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = _page(tmp_path).rows
    assert (rows["Loss spikes"], rows["Steps that changed no weight"]) == ("2", "1")


def test_the_tables_hold_the_runs_numbers(tmp_path):
    folder = write_run(tmp_path, 30)
    evaluations = [evaluation_record(0, 5.5), evaluation_record(20, 3.0), evaluation_record(30, 3.125)]
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(record) + "\n" for record in evaluations))
    rows = _page(folder).rows
    assert rows["Initial validation loss"] == "5.5000 at step 0"
    assert rows["Best validation loss"] == "3.0000 at step 20"
    assert rows["Final validation loss"] == "3.1250 at step 30"
    assert rows["Final validation perplexity"] == "22.76"
    assert rows["Completed steps"] == "30"
    assert rows["Tokens consumed"] == "122,880"
    assert rows["Time in training steps"] == "15.0 s"
    assert rows["Median throughput"] == "8,192 tokens/s"
    assert rows["Window, start → end"] == "32 → 496 tokens"
    assert rows["Peak memory"] == "3.00 GiB"
    assert "First recorded step" not in rows
    assert rows["python"] == ".".join(map(str, sys.version_info[:3]))


def test_names_and_configuration_are_escaped(tmp_path):
    config = 'model:\n  name: "<script>alert(1)</script> & co"\n'
    folder = write_run(tmp_path / "a <b> & c", 2)
    (folder / "config.yaml").write_text(config)
    page = _page(folder)
    assert page.pre == config
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert "a &lt;b&gt; &amp; c" in (folder / "report.html").read_text()


def test_a_run_of_one_step_without_evaluation_or_configuration_has_a_report(tmp_path):
    rows = _page(write_run(tmp_path, 1)).rows
    assert rows["Final validation loss"] == NONE
    assert rows["Volatility: mean std of loss over 10 steps"] == NONE
    assert rows["Completed steps"] == "1"
    assert "This run folder has no config.yaml." in (tmp_path / "report.html").read_text()


def test_a_resumed_run_has_a_report_as_if_it_had_not_stopped(tmp_path):
    whole, resumed = write_run(tmp_path / "whole", 40), write_run(tmp_path / "resumed", 25)
    write_run(resumed, 40, first=20)
    assert _page(resumed).rows == _page(whole).rows


def test_missing_steps_and_non_finite_ones_are_told(tmp_path):
    records = [step_record(5), step_record(8, lm_loss=None), step_record(9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = _page(tmp_path).rows
    assert rows["First recorded step"] == "5"
    assert rows["Steps without a record"] == "2"
    assert rows["Non-finite steps, left out above"] == "1"


def test_an_empty_run_leaves_no_report_behind(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no complete step"):
        write_report(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_comparison_is_a_page_or_a_png(tmp_path):
    runs = [write_run(tmp_path / name, 3) for name in "ab"]
    output = write_comparison(runs, tmp_path / "new folder" / "compare.png")
    assert output.read_bytes().startswith(PNG)
    assert "fewer than 20 steps in common" in write_comparison(runs, tmp_path / "compare.html").read_text()
    with pytest.raises(UserError, match=r"output: got .*compare\.pdf.*ends in \.html or \.png"):
        write_comparison(runs, tmp_path / "compare.pdf")


def test_a_comparison_says_which_differences_are_significant(tmp_path):
    noise = np.random.default_rng(0).normal(size=(3, 200))
    runs = []
    for name, shift, other in (("base", 0.0, 0), ("better", -0.05, 1), ("same", 0.0, 2)):
        runs.append(write_run(tmp_path / name, 200))
        common = [3.0 + 0.5 * noise[0, step] for step in range(200)]  # what the rows of a step have in common
        records = [step_record(s, lm_loss=common[s] + shift + 0.02 * noise[other, s]) for s in range(200)]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = write_comparison(runs, tmp_path / "compare.html").read_text()
    found = dict(re.findall(r"Training loss of (\w+) less that .*? nats .*?: (significant|not significant)\.", text))
    assert found == {"better": "significant", "same": "not significant"}
    difference = paired_differences(*load_runs(runs[:2]))
    assert difference.significant.mean() > 0.9
    assert paired_differences(*load_runs([runs[0], runs[2]])).significant.mean() < 0.3
    assert abs(difference.last_tenth[0] + 0.05) < difference.last_tenth[1] < 0.02
    assert len(difference.means) == 30


def test_the_passage_is_text_with_a_ground_and_a_hint_for_each_token(tmp_path):
    folder = write_passage_file(write_run(tmp_path, 3, weighted=True))
    html = write_report(folder).read_text(encoding="utf-8")
    passage, view = _Passage(html), view_passage(read_passage(folder))
    assert passage.text == "".join(passage_record()["texts"])
    assert passage.marks == ["\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"]
    assert passage.classes == ["passage"]
    grounds = [token.ground for token in view.tokens]
    assert [token.get("style") for token in passage.tokens] == [f"background:{g}" if g else None for g in grounds]
    assert [token.get("class") for token in passage.tokens] == [None, "zero", None, None]
    assert passage.tokens[3]["title"] == "token 4,099, id 14: weight 3.00, score 0.400"
    assert "step 7, tokens 4,096 to 4,099 of a row; 1 of 4 weigh 0" in html
    for label, ground in view.legend:
        assert (f'style="background:{ground}">{label}<' if ground else f'class="zero">{label}<') in html
    assert "&lt;b&gt;" in html
    assert not {"script", "b"} & {tag for tag, _ in _Page(html).tags}


def test_a_run_without_a_tokenizer_shows_ids_apart(tmp_path):
    folder = write_passage_file(write_run(tmp_path, 3, weighted=True), texts=None)
    passage = _Passage(write_report(folder).read_text(encoding="utf-8"))
    assert passage.text == "11 12 13 14"
    assert passage.classes == ["passage", "apart"]


def test_a_damaged_passage_is_left_out_with_its_reason(tmp_path):
    folder = write_passage_file(write_run(tmp_path, 3, weighted=True), weights=[1.0])
    html = write_report(folder).read_text(encoding="utf-8")
    assert not _Passage(html).tokens
    assert "Left out:" in html
    assert "passage.json: `weights` has 1 entries, needs 4 as `tokens`" in html


def test_the_numbers_of_token_weighting_have_their_table(tmp_path):
    rows = _page(write_run(tmp_path / "weighted", 4, weighted=True)).rows
    assert rows["Last standard deviation of the weights"] == "0.5810"
    assert rows["Last share of tokens of weight 0"] == "25.0%"
    assert rows["Time in scoring"] == "0.5 s"
    folder = write_run(tmp_path / "plain", 4)
    assert "Time in scoring" not in _page(folder).rows
    assert "Token weight" not in (folder / "report.html").read_text()


class TestCommandLine:
    def _run(self, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def test_one_folder_gets_a_report(self, tmp_path):
        done = self._run(write_run(tmp_path, 5, evaluate_every=2))
        assert (done.returncode, done.stderr) == (0, "")
        headline, path = done.stdout.splitlines()
        assert headline == "validation loss 6.0000 after 0 steps, 1.2000 after 4"
        assert path == str(tmp_path / "report.html")
        assert (tmp_path / "report.png").is_file()

    def test_a_run_without_evaluations_shows_its_training_loss(self, tmp_path):
        done = self._run(write_run(tmp_path, 2))
        assert done.stdout.startswith("training loss 5.5000 at the start, 5.3")

    def test_several_folders_get_one_figure(self, tmp_path):
        runs = [write_run(tmp_path / name, 2) for name in "ab"]
        done = self._run(*runs, "--output", tmp_path / "compare.png")
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "compare.png").read_bytes().startswith(PNG)

    def test_every_stage_of_a_run_gets_a_report(self, tmp_path):
        stages = [write_run(tmp_path / name, 2) for name in ("b", "a")]
        done = self._run(tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[1::2] == [str(stage / "report.html") for stage in stages]

    def test_stability_figures_of_a_span_of_steps(self, tmp_path):
        """A line for each run, as the paper's table has them; of a falling loss the later steps are the steadier."""
        runs = [write_run(tmp_path / name, 40) for name in ("a", "b")]
        losses = [step_record(step)["lm_loss"] for step in range(20, 40)]
        expected = stability(losses, [step_record(step)["grad_norm"] for step in range(20, 40)])
        done = self._run(*runs, "--stability-steps", "20", "40")
        assert done.returncode == 0, done.stderr
        header, *lines = done.stdout.splitlines()
        assert header.startswith("steps 20 to 39")
        assert [line.split()[0] for line in lines] == ["a", "b"]
        for line in lines:
            figures = [float(figure) for figure in line.split()[1:]]
            assert figures == pytest.approx([getattr(expected, field) for field in vars(expected)], abs=1e-4)
        done = self._run(runs[0], "--stability-steps", "35", "60")
        assert done.returncode == 2
        assert "stability_steps: got 35 60, of which" in done.stderr
        assert "has 5 finite steps, needs 10; its steps are 0 to 39" in done.stderr

    def test_mistakes_are_one_line_without_a_traceback(self, tmp_path):
        done = self._run(tmp_path)
        assert done.returncode == 2
        assert re.fullmatch(r"error: .*metrics\.jsonl: not found, .*\n", done.stderr)

    def test_output_goes_with_several_folders_only(self, tmp_path):
        assert "--output: not given" in self._run(tmp_path / "a", tmp_path / "b").stderr
        assert "--output: goes with several" in self._run(tmp_path, "--output", "x.png").stderr


class TestPassageFlag:
    @pytest.fixture
    def report(self, capsys):
        """The command in this process, as it starts without seconds of imports: exit status, stdout, stderr."""
        main = runpy.run_path(str(TOOL))["main"]
        return lambda *arguments: (main(list(map(str, arguments))), *capsys.readouterr())

    def test_it_is_a_picture_beside_the_report(self, report, tmp_path):
        folder = write_passage_file(write_run(tmp_path / "run", 3, weighted=True))
        status, out, err = report(folder, "--passage", tmp_path / "passage.png")
        assert (status, err) == (0, "")
        assert out.splitlines()[1:] == [str(folder / "report.html"), str(tmp_path / "passage.png")]
        assert (tmp_path / "passage.png").read_bytes().startswith(PNG)

    def test_a_damaged_passage_is_a_note_unless_it_is_asked_for(self, report, tmp_path):
        folder = write_run(tmp_path, 3, weighted=True)
        (folder / "passage.json").write_text('{"step": 2, "sta')
        status, _, err = report(folder)
        assert status == 0
        assert re.fullmatch(r"note: .*passage\.json: damaged: .*; the report leaves it out\n", err)
        status, out, err = report(folder, "--passage", tmp_path / "passage.png")
        assert (status, out) == (2, "")
        assert re.fullmatch(r"error: .*passage\.json: damaged: .*\n", err)
        assert not (tmp_path / "passage.png").exists()

    def test_it_needs_one_run_with_token_weighting(self, report, capsys, tmp_path):
        status, _, err = report(write_run(tmp_path / "a", 2), "--passage", tmp_path / "passage.png")
        assert status == 2
        assert re.fullmatch(r"error: .*passage\.json: not found, .*\n", err)
        status, _, err = report(tmp_path / "a", tmp_path / "b", "--output", "x.png", "--passage", "y.png")
        assert status == 2
        assert "--passage: goes with one run folder" in err
