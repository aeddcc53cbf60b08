"""Analysis of prolong_twin.sh: loss by position on held-out rows, before and after each stage.

python docs/experiments/prolong_twin.py --eval DIR     # writes the numbers and the figure of the page
python docs/experiments/prolong_twin.py --check        # recompute the table of the page from its .json file
"""

import argparse
import itertools
import json
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from harness import check
from matplotlib.figure import Figure

from megatron_ext.evaluation.report import table
from megatron_ext.token_weighting.store import ScoreStore

MODELS = {
    "published": "published, 512",
    "s512": "novels, 512",
    "s2048": "then 2048",
    "s8192": "then 8192",
}
COLOURS = dict(zip(MODELS, ("#9ca3af", "#2166ac", "#d95f02", "#1b8a6b"), strict=True))
DRAWS = 2000

Losses = npt.NDArray[np.float64]


def losses_of(path: Path) -> Losses:
    """Read -log p of each label; float64 [rows, row length]."""
    store = ScoreStore.open(path)
    return np.stack([store.read(row) for row in range(store.identity.rows)]).astype(np.float64)


def bins_of(length: int) -> list[tuple[int, int]]:
    """Return [0, 512), then doubling intervals, up to the row's length."""
    edges = [0, 512]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return list(itertools.pairwise(edges))


def results(models: dict[str, Losses]) -> dict[str, dict[str, dict[str, float]]]:
    """Compute each model's mean loss by bin, and its difference from stage s512 with a 95 % interval."""
    rows, length = models["s512"].shape
    draws = np.random.default_rng(0).integers(0, rows, (DRAWS, rows))
    bins_by_model: dict[str, dict[str, dict[str, float]]] = {}
    for name, losses in models.items():
        bins_by_model[name] = {}
        for first, last in [*bins_of(length), (0, length)]:
            mean = losses[:, first:last].mean(axis=1)
            difference = mean - models["s512"][:, first:last].mean(axis=1)
            low, high = np.percentile(difference[draws].mean(axis=1), [2.5, 97.5])
            bins_by_model[name][f"{first}-{last}"] = {
                "loss": float(mean.mean()),
                "difference": float(difference.mean()),
                "low": float(low),
                "high": float(high),
            }
    return bins_by_model


def tables(bins_by_model: dict[str, dict[str, dict[str, float]]]) -> str:
    """Make the table of losses from the numbers of the .json file."""
    *columns, whole = bins_by_model["s512"]
    rows = [
        [label, *(f"{bins_by_model[name][column]['loss']:.3f}" for column in (*columns, whole))]
        for name, label in MODELS.items()
    ]
    return table(["model", *columns, "all"], rows)


def draw(models: dict[str, Losses], path: Path) -> None:
    """Draw the loss by position, in 31 bins that grow with the position."""
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.add_subplot()
    length = models["s512"].shape[1]
    edges = np.unique(np.geomspace(16, length, 32).astype(int))
    for name, losses in models.items():
        means = [losses[:, a:b].mean() for a, b in itertools.pairwise(edges)]
        middles = np.sqrt(edges[:-1] * edges[1:])
        axis.plot(middles, np.minimum(means, 5.5), color=COLOURS[name], label=MODELS[name], linewidth=1.8)
    for border in (512, 2048):
        axis.axvline(border, color="#d1d5db", linewidth=1, zorder=0)
    axis.set(xscale="log", xlabel="position in the row", ylabel="nats per token (cut at 5.5)")
    axis.set_xticks([16, 64, 256, 512, 1024, 2048, 4096, 8192], ["16", "64", "256", "512", "1K", "2K", "4K", "8K"])
    axis.minorticks_off()
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(__file__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--eval", type=Path, help="the stores of prolong_twin.sh")
    action.add_argument("--check", action="store_true", help="compare the table of the page with its .json file")
    parser.add_argument("--json", type=Path, default=beside.with_suffix(".json"))
    parser.add_argument("--figure", type=Path, default=beside.with_suffix(".png"))
    options = parser.parse_args()
    if options.check:
        check(beside.with_suffix(".md"), tables)
        return
    models = {name: losses_of(options.eval / f"{name}.zarr") for name in MODELS}
    bins_by_model = results(models)
    options.json.write_text(json.dumps(bins_by_model, indent=1) + "\n")
    draw(models, options.figure)
    print(tables(bins_by_model))


if __name__ == "__main__":
    main()
