from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_ext.monitoring.figures import draw_comparison, draw_run
from megatron_ext.monitoring.panels import RUN_COLOURS, running_mean, tokens_text
from megatron_ext.monitoring.runs import load_run, load_runs

from .records import evaluation_record, step_record, weighting, write_run

WEIGHTING_PANELS = ["Spread of weights", "Largest weight", "Tokens of weight 0", "Mean score"]


def _panels(figure):
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


def _line(axis, label):
    (line,) = [line for line in axis.lines if line.get_label() == label]
    return line


def test_every_panel_has_its_axis_and_the_window_is_drawn_as_recorded(tmp_path):
    panels = _panels(draw_run(load_run(write_run(tmp_path, 100, evaluate_every=20))))
    assert list(panels) == [
        "Loss",
        "Context window",
        "Throughput",
        "Effective context",
        "Gradient norm before clipping",
        "Learning rate",
    ]
    assert all(axis.get_xlabel() == "optimizer step" for axis in panels.values())
    (window,) = panels["Context window"].lines
    assert window.get_ydata().tolist() == [min(1024, 32 + 16 * step) for step in range(100)]
    assert panels["Context window"].get_yscale() == "log"
    assert len({axis.get_xlim() for axis in panels.values()}) == 1


def test_the_loss_axis_leaves_the_first_steps_out_and_says_so(tmp_path):
    folder = write_run(tmp_path, 100, evaluate_every=20)
    loss = _panels(draw_run(load_run(folder)))["Loss"]
    highest = max(5.5, 6.0)  # the first training loss and the evaluation before training
    assert loss.get_ylim()[1] < highest
    assert loss.get_title(loc="right") == f"highest {highest:.2f}, not shown"
    assert _line(loss, "validation").get_xdata().tolist() == [20, 40, 60, 80]


def test_a_weighted_loss_is_drawn_only_where_it_differs(tmp_path):
    folder = write_run(tmp_path, 60)
    assert "training, weighted" not in [line.get_label() for line in draw_run(load_run(folder)).axes[0].lines]
    records = [step_record(step, train_loss=1.0) for step in range(60)]
    records[3]["train_loss"] = None
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    weighted = _line(draw_run(load_run(folder)).axes[0], "training, weighted").get_ydata()
    np.testing.assert_allclose(weighted, np.ones(59))


def test_validation_by_length_takes_the_last_panel(tmp_path):
    folder = write_run(tmp_path, 3)
    record = evaluation_record(3, 3.0, by_length={"1024": 2.5, "128": 3.0})
    (folder / "evaluation.jsonl").write_text(json.dumps(record))
    panel = _panels(draw_run(load_run(folder)))["Validation loss by evaluation length"]
    assert [line.get_label() for line in panel.lines] == ["128", "1K"]


@pytest.mark.parametrize("steps", [1, 2, 49, 50, 60])
@pytest.mark.parametrize("evaluate_every", [0, 1, 50])
@pytest.mark.filterwarnings("error")
def test_short_runs_are_drawn_without_a_warning(tmp_path, steps, evaluate_every):
    figure = draw_run(load_run(write_run(tmp_path, steps, evaluate_every=evaluate_every)))
    figure.canvas.draw()
    for axis in figure.axes:
        low, high = axis.get_xlim()
        assert low < 0
        assert high > steps


@pytest.mark.filterwarnings("error")
def test_a_run_whose_values_are_all_missing_says_so_in_each_panel(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "lm_loss": null}\n{"step": 1}\n')
    figure = draw_run(load_run(tmp_path))
    figure.canvas.draw()
    assert all([text.get_text() for text in axis.texts] == ["no values in this run"] for axis in figure.axes)


@pytest.mark.filterwarnings("error")
def test_a_comparison_gives_each_run_its_colour_in_every_panel(tmp_path):
    folders = [write_run(tmp_path / "one", 80, evaluate_every=10), write_run(tmp_path / "two", 30)]
    figure = draw_comparison(load_runs(folders))
    figure.canvas.draw()
    for axis in figure.axes:
        assert [line.get_label() for line in axis.lines] == ["one", "two"]
        assert [line.get_color() for line in axis.lines] == list(RUN_COLOURS[:2])


@pytest.mark.filterwarnings("error")
def test_token_weighting_adds_a_row_of_panels_with_its_history(tmp_path):
    figure = draw_run(load_run(write_run(tmp_path, 30, weighted=True)))
    figure.canvas.draw()
    panels = _panels(figure)
    assert list(panels)[6:] == WEIGHTING_PANELS
    for title, key in zip(WEIGHTING_PANELS, ["weight_std", "weight_max", "zero_share", "score_mean"], strict=True):
        (line,) = panels[title].lines
        assert line.get_ydata().tolist() == [weighting(step)[key] for step in range(30)]
        assert panels[title].get_xlim() == panels["Loss"].get_xlim()


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_a_constant_share_of_zeros_lies_inside_its_panel(tmp_path, share):
    records = [step_record(step, **weighting(step) | {"zero_share": share}) for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    low, high = _panels(draw_run(load_run(tmp_path)))["Tokens of weight 0"].get_ylim()
    assert low < share < high


@pytest.mark.filterwarnings("error")
def test_a_comparison_shows_weights_of_the_runs_that_have_them(tmp_path):
    folders = [write_run(tmp_path / "plain", 50), write_run(tmp_path / "weighted", 50, weighted=True)]
    figure = draw_comparison(load_runs(folders))
    figure.canvas.draw()
    panels = _panels(figure)
    assert [line.get_label() for line in panels["Training loss"].lines] == ["plain", "weighted"]
    for title in WEIGHTING_PANELS:
        (line,) = panels[title].lines
        assert (line.get_label(), line.get_color()) == ("weighted", RUN_COLOURS[1])
    assert len(draw_comparison(load_runs([folders[0], write_run(tmp_path / "other", 5)])).axes) == 6


@pytest.mark.filterwarnings("error")
def test_a_weighting_without_one_of_its_numbers_says_so_in_that_panel(tmp_path):
    records = [step_record(step, weight_std=0.5) for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for figure in (draw_run(load_run(tmp_path)), draw_comparison([load_run(tmp_path)])):
        figure.canvas.draw()
        remarks = [[text.get_text() for text in _panels(figure)[title].texts] for title in WEIGHTING_PANELS]
        assert remarks == [[]] + 3 * [["no values in this run"]]


def test_the_running_mean_by_hand():
    np.testing.assert_allclose(running_mean(np.array([0.0, 3.0, 6.0, 0.0])), [0.0, 3.0, 3.0, 3.0])
    np.testing.assert_allclose(running_mean(np.full(1000, 2.5)), 2.5)


@pytest.mark.parametrize(
    ("count", "text"),
    [(8, "8"), (1024, "1K"), (1536, "1.5K"), (8000, "7.8K"), (2**19, "512K"), (2**21, "2M")],
)
def test_token_counts_are_written_in_powers_of_two(count, text):
    assert tokens_text(count) == text
