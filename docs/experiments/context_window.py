"""Do longer constant windows make a worse small model of the same tokens? See context_window.md.

python docs/experiments/context_window.py NOVELS OUT
python docs/experiments/context_window.py --check     # recompute the tables of the page from its .json file

Trains every combination of constant window, packing and seed. Run the command again to resume after an interruption.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    Mean,
    Planned,
    arguments,
    check,
    command,
    evaluate,
    finished,
    losses,
    prepare,
    train,
    write_results,
)
from matplotlib.figure import Figure

from megatron_ext.evaluation.report import table

ROW = 512
BATCH = 2
VOCABULARY = 2048
DOCUMENT = 1_000  # characters of a training document: shorter than a row, so that packing has a choice
WINDOWS = (64, 128, 256, 512)
SHARED = WINDOWS[0]  # all models can be compared at this window
PACKINGS: dict[str, list[object]] = {
    "random": [],
    "intradoc": ["--document-mask"],
    "bm25": ["--packing", "bm25"],
}
COMMON: list[object] = [
    *("--model-preset", "tiny-1M", "--init-method-std", 0.08, "--seq-length", ROW, "--global-batch-size", BATCH),
    *("--micro-batch-size", 2, "--lr", 2e-3, "--min-lr", 2e-4, "--eval-iters", 8),
    *("--window-schedule", "constant"),
]


def name_of(packing: str, window: int) -> str:
    """Name a run."""
    return f"{packing}_{window}"


def planned(seeds: Sequence[int]) -> list[Planned]:
    """List the runs; differences are from the first run of each seed."""
    return [
        Planned(seed, name_of(packing, window), [*flags, "--window-end", window])
        for seed in seeds
        for packing, flags in PACKINGS.items()
        for window in WINDOWS
    ]


def tables(numbers: dict[str, Any]) -> str:
    """Make the tables from the numbers of a .json file."""
    by_length = {int(length): losses_by_name for length, losses_by_name in numbers["losses"].items()}
    last = f"{WINDOWS[-1]} minus {WINDOWS[0]}"
    parts = []
    for heading, at in (
        (f"at {SHARED} tokens, which every model was trained on", lambda window: SHARED),
        ("at each model's training window", lambda window: window),
    ):
        rows = [
            [
                packing,
                *(f"{np.mean(by_length[at(window)][name_of(packing, window)]):.4f}" for window in WINDOWS),
                _longest_minus_shortest(by_length[SHARED], packing),
            ]
            for packing in PACKINGS
        ]
        parts += [
            f"Held-out loss (nats / token) {heading}: mean of {len(numbers['seeds'])} seeds. Last column: {last}, at "
            f"{SHARED}, paired by seed, ± half the 95 % interval over seeds; bold: it excludes 0.",
            table(["packing", *map(str, WINDOWS), last], rows),
        ]
    rows = [
        [
            f"{packing} - random",
            *(_paired(by_length[SHARED], name_of(packing, window), name_of("random", window)) for window in WINDOWS),
        ]
        for packing in PACKINGS
        if packing != "random"
    ]
    parts += [
        f"Packings against random at {SHARED} tokens, by training window.",
        table(["packing", *map(str, WINDOWS)], rows),
    ]
    return "\n\n".join(parts) + "\n"


def _paired(losses_by_name: dict[str, list[float]], name: str, base: str) -> Mean:
    return Mean.of(np.subtract(losses_by_name[name], losses_by_name[base]).tolist())


def _longest_minus_shortest(losses_by_name: dict[str, list[float]], packing: str) -> Mean:
    return _paired(losses_by_name, name_of(packing, WINDOWS[-1]), name_of(packing, WINDOWS[0]))


def draw(out: Path, seeds: Sequence[int], path: Path) -> None:
    """Draw the loss at the shared window by training window, a line for each packing and a point for each seed."""
    figure = Figure(figsize=(6, 4.4), layout="constrained")
    axis = figure.add_subplot()
    losses_by_name = losses(out, seeds, SHARED)
    for number, packing in enumerate(PACKINGS):
        packing_losses = np.array([losses_by_name[name_of(packing, window)] for window in WINDOWS])
        axis.plot(WINDOWS, packing_losses.mean(axis=1), "-", color=f"C{number}", label=packing)
        axis.plot(WINDOWS, packing_losses, ".", color=f"C{number}", alpha=0.5)
    axis.set_xscale("log", base=2)
    axis.set_xticks(WINDOWS, [str(window) for window in WINDOWS])
    axis.set(xlabel="training window (tokens, log scale)", ylabel=f"held-out loss at {SHARED} tokens (nats)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    options = arguments(
        __doc__, steps=600, seeds=(1, 2, 3), novels="folder of .txt novels", out="folder for data, runs and results"
    )
    if options.check:
        check(Path(__file__).with_suffix(".md"), tables)
        return
    out = options.out.resolve()
    if not options.only_results:
        data = prepare(options.novels, out, VOCABULARY, DOCUMENT)
        steps = ["--train-iters", options.steps, "--lr-warmup-iters", options.steps // 20]
        common = [*data, *COMMON, *steps, "--eval-interval", options.steps]
        for seed in options.seeds:  # existing plans are kept
            command("tools/pack_data.py", *common, "--seed", seed, *PACKINGS["bm25"])
        train(planned(options.seeds), out, common, options.workers)
        limits = {"documents": options.held_out, "workers": options.workers}
        evaluate(planned(options.seeds), out, WINDOWS, ROW, **limits)
    seeds = finished(planned(options.seeds), out)
    folder = options.results or out / "results"
    numbers = {"seeds": seeds, "losses": {length: losses(out, seeds, length) for length in WINDOWS}}
    write_results(folder, "context_window", numbers, tables)
    draw(out, seeds, folder / "context_window.png")


if __name__ == "__main__":
    main()
