"""Does a window that grows from short to long make a better small model of the same tokens? See skyladder.md.

python docs/experiments/skyladder.py NOVELS OUT
python docs/experiments/skyladder.py --check     # recompute the tables of the page from its .json files

Trains eight schedules for each seed, on the same rows in the same order. Run the command again to resume after an
interruption; finished runs are kept.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    Mean,
    Planned,
    arguments,
    bootstrap,
    check,
    differences,
    evaluate,
    finished,
    layers,
    losses,
    prepare,
    records,
    train,
    write_results,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_ext.evaluation.report import table
from megatron_ext.monitoring.report import RUN_COLORS, Run

ROW = 512
VOCABULARY = 2048
LENGTHS = (64, 128, 256, 512)
VALID_ROWS = 16  # rows of each validation during training
ENDS = (LENGTHS[0], LENGTHS[-1])
OPPOSITE = ("linear", "long_to_short")  # the same windows, up and down
SHARE = 0.64  # share of the steps in which the window grows
START = 32
BASE = "constant"
RAMPS = 3  # cycles of the cyclic schedules; together as long as the single ramp of the others
SCHEDULES: dict[str, list[object]] = {
    BASE: [],
    "linear": ["linear", "--window-expansion-fraction", SHARE],
    "sinusoidal": ["sinusoidal", "--window-expansion-fraction", SHARE],
    "exponential": ["exponential", "--window-expansion-fraction", SHARE],
    "stepwise": ["stepwise", "--window-aligned", "--window-expansion-fraction", SHARE],
    "long_to_short": ["long_to_short", "--window-expansion-fraction", SHARE],
    "cyclic_jump": ["cyclic_jump", "--window-cycles", RAMPS, "--window-expansion-fraction", SHARE / RAMPS],
    "cyclic_gradual": ["cyclic_gradual", "--window-cycles", RAMPS / 2, "--window-expansion-fraction", SHARE / RAMPS],
}
COMMON: list[object] = [
    *("--model-preset", "tiny-1M", "--init-method-std", 0.08, "--seq-length", ROW),
    *("--micro-batch-size", 2, "--lr", 2e-3, "--min-lr", 2e-4),
    *("--eval-lengths", *ENDS, "--attention-health-interval", 10),
]
ATTENTION = {"attention_entropy": "attention entropy (nats)", "attention_sink_share": "heads with a sink (share)"}


def planned(seeds: Sequence[int], schedules: Sequence[str] = tuple(SCHEDULES)) -> list[Planned]:
    """List the runs: every schedule of a seed before the next seed."""
    return [
        Planned(seed, name, ["--window-start", START, "--window-schedule", *flags] if flags else [])
        for seed in seeds
        for name, flags in SCHEDULES.items()
        if name in schedules
    ]


def spent(run: Run, key: str) -> float:
    """Sum a metric over the run's steps."""
    return float(run.curve(key).values.sum())


def attention_at_end(run: Run, key: str) -> float:
    """Average a metric over the last tenth of its steps."""
    _, values = layers(run, key)
    return float(values[-max(values.size // 10, 1) :].mean())


def loss_tables(by_length: dict[int, dict[str, list[float]]]) -> list[str]:
    """Return tables of held-out losses: by window, the gain of a long window, and growing minus shrinking windows."""
    names = list(by_length[ROW])
    seeds = len(by_length[ROW][BASE])
    differences_by_length = {length: differences(by_length[length], BASE) for length in LENGTHS}
    rows: list[list[object]] = [[BASE, *(f"{np.mean(by_length[length][BASE]):.4f}" for length in LENGTHS)]]
    rows += [[name, *(differences_by_length[length][name] for length in LENGTHS)] for name in names if name != BASE]
    short, long = (by_length[length] for length in ENDS)
    worth = [[name, Mean.of(np.subtract(short[name], long[name]).tolist())] for name in names]
    parts = [
        f"Held-out loss (nats / token) by window, {seeds} seeds; below {BASE} the difference from it, paired by "
        "seed, ± half the 95 % interval over seeds; bold: it excludes 0.",
        table(["schedule", *map(str, LENGTHS)], rows),
        f"Loss of each model with a window of {ENDS[0]} tokens minus its loss with {ENDS[1]}.",
        table(["schedule", f"{ENDS[0]} - {ENDS[1]}"], worth),
    ]
    if set(OPPOSITE) <= set(names):
        up, down = OPPOSITE
        row = [f"{up} - {down}", *(differences(by_length[length], down)[up] for length in LENGTHS)]
        parts += ["The same windows, up and down.", table(["", *map(str, LENGTHS)], [row])]
    return parts


def results(out: Path, seeds: Sequence[int], schedules: Sequence[str]) -> dict[str, Any]:
    """Compute the numbers behind the tables."""
    runs = records(planned(seeds, schedules), out)
    by_length = {length: losses(out, seeds, length) for length in LENGTHS}
    differences_by_length = {length: differences(by_length[length], BASE) for length in LENGTHS}
    base = runs[BASE]
    at_end: dict[str, list[float]] = {}  # the base's
    numbers: dict[str, Any] = {"seeds": list(seeds), "losses": by_length, "schedules": {}}
    for name, schedule_runs in runs.items():
        saved = {
            key: Mean.of(
                [1 - spent(run, key) / spent(other, key) for run, other in zip(schedule_runs, base, strict=True)]
            )
            for key in ("flops", "step_time_s")
        }
        ends = {key: [attention_at_end(run, key) for run in schedule_runs] for key in ATTENTION}
        at_end = at_end or ends
        less = {key: Mean.of(np.subtract(values, at_end[key]).tolist()) for key, values in ends.items()}
        numbers["schedules"][name] = {
            "differences": {length: vars(differences_by_length[length][name]) for length in LENGTHS}
            if name != BASE
            else {},
            "bootstrap": {s: {n: bootstrap(out, s, n).get(name) for n in LENGTHS} for s in seeds},
            "saved": {key: vars(mean) for key, mean in saved.items()},
            "attention": ends,
            "attention_less": {key: vars(mean) for key, mean in less.items()},
        }
    return numbers


def tables(numbers: dict[str, Any]) -> str:
    """Make the tables from the numbers of a .json file."""
    parts = loss_tables({int(length): losses_by_name for length, losses_by_name in numbers["losses"].items()})
    schedules = numbers["schedules"]
    costs = [
        [
            name,
            *(_percent(Mean(**saved)) for saved in schedule["saved"].values()),
            *(
                f"{np.mean(schedule['attention'][key]):.3f}" if name == BASE else Mean(**less)
                for key, less in schedule["attention_less"].items()
            ),
        ]
        for name, schedule in schedules.items()
    ]
    parts += [
        f"Saved against {BASE}, and attention (mean of layers) in the last tenth of the steps, likewise.",
        table(["schedule", "FLOPs saved", "time saved", "entropy", "heads with a sink"], costs),
    ]
    within = [
        [seed, name, *(_span(schedule["bootstrap"][str(seed)][str(length)]) for length in LENGTHS)]
        for seed in numbers["seeds"]
        for name, schedule in schedules.items()
        if name != BASE
    ]
    parts += [
        f"Difference from {BASE} within each seed, with 95 % intervals of paired bootstrap samples of documents.",
        table(["seed", "schedule", *map(str, LENGTHS)], within),
    ]
    return "\n\n".join(parts) + "\n"


def _percent(saved: Mean) -> str:
    return f"{100 * saved.value:+.1f} %" + ("" if saved.half_width < 0.0005 else f" ± {100 * saved.half_width:.1f}")


def _span(interval: dict[str, float] | None) -> str:
    return "" if interval is None else f"{interval['value']:+.4f} [{interval['low']:+.4f}, {interval['high']:+.4f}]"


def draw(out: Path, seeds: Sequence[int], schedules: Sequence[str], path: Path) -> None:
    """Draw the loss minus the base's by step, and attention over time; means over seeds."""
    runs = records(planned(seeds, schedules), out)
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    loss, *attention = figure.subplots(1, 1 + len(ATTENTION))
    for number, (name, schedule_runs) in enumerate(runs.items()):
        colour = RUN_COLORS[number % len(RUN_COLORS)]
        less = [
            run.validation["valid_loss"].values - base.validation["valid_loss"].values
            for run, base in zip(schedule_runs, runs[BASE], strict=True)
        ]
        loss.plot(schedule_runs[0].validation["valid_loss"].steps, np.mean(less, axis=0), color=colour, label=name)
        for axis, key in zip(attention, ATTENTION, strict=True):
            measured = [layers(run, key) for run in schedule_runs]
            axis.plot(measured[0][0], np.mean([values for _, values in measured], axis=0), color=colour)
    loss.legend(frameon=False, fontsize=8)
    _label(loss, f"validation loss at {ROW} minus {BASE}'s (nats)")
    for axis, unit in zip(attention, ATTENTION.values(), strict=True):
        _label(axis, unit)
    figure.savefig(path, dpi=110)


def _label(axis: Axes, unit: str) -> None:
    axis.set(xlabel="optimizer step", ylabel=unit)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    more_flags: dict[str, dict[str, Any]] = {
        "--batch-size": {"type": int, "default": 8, "help": "rows of a step [8]"},
        "--schedules": {"nargs": "+", "choices": SCHEDULES, "default": list(SCHEDULES), "help": f"with {BASE} [all]"},
    }
    options = arguments(
        __doc__,
        steps=500,
        seeds=(1, 2, 3),
        more_flags=more_flags,
        novels="folder of .txt novels",
        out="folder for data, runs and results",
    )
    if options.check:
        check(Path(__file__).with_suffix(".md"), tables)
        return
    out = options.out.resolve()
    schedules = [BASE, *options.schedules]
    plans = planned(options.seeds, schedules)
    if not options.only_results:
        data = prepare(options.novels, out, VOCABULARY)
        batch = ["--global-batch-size", options.batch_size, "--eval-iters", max(VALID_ROWS // options.batch_size, 1)]
        steps = ["--train-iters", options.steps, "--eval-interval", max(options.steps // 10, 1)]
        warm_up = ["--lr-warmup-iters", options.steps // 20]
        train(plans, out, [*data, *COMMON, *batch, *steps, *warm_up], options.workers)
        limits = {"documents": options.held_out, "workers": options.workers}
        evaluate(plans, out, LENGTHS, ROW, **limits)
    seeds = finished(plans, out)
    folder = options.results or out / "results"
    write_results(folder, "skyladder", results(out, seeds, schedules), tables)
    draw(out, seeds, schedules, folder / "skyladder.png")


if __name__ == "__main__":
    main()
