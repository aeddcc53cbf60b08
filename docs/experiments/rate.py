"""Must the learning rate be tuned again for each token budget? See rate.md.

python docs/experiments/rate.py NOVELS OUT     # OUT/results gets the page and a line for each run
python docs/experiments/rate.py --check        # recompute the page beside this file from its runs

A run that has a line is not trained again, so a stopped experiment continues by the same command, on another machine
with the file of runs alone (--runs).
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from budget import ARMS, BATCH, BUDGETS, ROW, Plan, prepare_documents, read_lines, run_all
from harness import Mean, command, read_evaluation
from scipy import stats

from megatron_ext.arrays import Float64
from megatron_ext.evaluation.report import table

Half = Literal["tuning", "test"]
Losses = dict[Plan, dict[Half, dict[int, float]]]  # by half of the held-out documents and window, nats per token

VOCABULARY = 1024  # of budget.py's 17 files of novels this makes 4.3M tokens, more than the largest budget
LENGTHS = (32, ROW)
RATES = range(1, 4)  # k of 2e-3 * sqrt(2)^k, before extensions
OCTAVES = 0.5  # between neighbouring rates
EXPONENTS = range(-4, 13)  # limits of the extensions
TUNING_SEEDS = tuple(range(21, 24))
SEEDS = tuple(range(21, 26))


@dataclass(frozen=True)
class Grid:
    """What is compared.

    Attributes:
        budgets: steps of a run.
        tuning_seeds: run at every rate, and choose the rates.
        seeds: of the gains. Those that choose no rate run at the chosen ones alone.
    """

    budgets: Sequence[int] = BUDGETS
    tuning_seeds: Sequence[int] = TUNING_SEEDS
    seeds: Sequence[int] = SEEDS


def rate(k: int) -> float:
    """Return the k-th learning rate."""
    return float(f"{2e-3 * 2 ** (OCTAVES * k):.3g}")


def planned(
    budgets: Sequence[int], seeds: Sequence[int], rates: Sequence[int] = RATES, arms: Sequence[str] = ARMS
) -> list[Plan]:
    """List the runs at these rates, seed by seed."""
    return [Plan(arm, rate(k), steps, seed) for seed in seeds for steps in budgets for k in rates for arm in arms]


def prepare_halves(novels: Path, out: Path) -> list[object]:
    """Make the data, the held-out pieces in two halves that alternate; return the flags of the training data."""
    flags = prepare_documents(novels, out, VOCABULARY)
    data = out / "data"
    lines = (data / "valid-novels.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for number, half in enumerate(("tuning", "test")):
        prefix = data / half
        if not prefix.with_suffix(".idx").exists():
            prefix.with_suffix(".jsonl").write_text("".join(lines[number::2]), encoding="utf-8")
            files = ["--input", prefix.with_suffix(".jsonl"), "--output-prefix", prefix]
            command("tools/preprocess_data.py", *files, "--tokenizer-model", data / "tokenizer")
    return flags


def evaluate(folder: Path, out: Path, count: int) -> dict[str, dict[int, float]]:
    """Return the loss of a run on `count` documents of each half, by window."""
    halves = {half: str(out / "data" / half) for half in ("tuning", "test")}
    flags = ["--data-path", *halves.values(), "--lengths", *LENGTHS, "--documents-per-source", count]
    flags += ["--min-tokens", ROW, "--max-tokens", 2 * ROW, "--output", folder / "evaluation", "--overwrite"]
    command("tools/evaluate.py", "perplexity", folder, *flags)
    loss_by_half = {half: read_evaluation(folder / "evaluation", task) for half, task in halves.items()}
    return {half: losses for half, by_model in loss_by_half.items() for losses in by_model.values()}


def read_runs(file: Path) -> Losses:
    """Read the losses of the runs that are done."""
    return {
        Plan(**line["run"]): {
            half: {int(length): loss for length, loss in losses.items()} for half, losses in line["losses"].items()
        }
        for line in read_lines(file)
    }


def tuning_losses(runs: Losses, arm: str, steps: int, seeds: Sequence[int]) -> dict[int, Float64]:
    """Return the losses of the tuning half at the full row [seeds], by k, of the rates at which all seeds are done."""
    plans_by_exponent = {k: planned([steps], seeds, [k], [arm]) for k in EXPONENTS}
    return {
        k: np.array([runs[plan]["tuning"][ROW] for plan in plans])
        for k, plans in plans_by_exponent.items()
        if runs.keys() >= set(plans)
    }


def best_of(losses_by_exponent: dict[int, Float64]) -> int:
    """Return k of the lowest mean."""
    return min(losses_by_exponent, key=lambda k: losses_by_exponent[k].mean())


def missing(runs: Losses, grid: Grid) -> list[Plan]:
    """Return the runs of the next part.

    First every rate for the seeds that choose, then the next rate of an arm that is best at an edge at a budget, then
    the chosen rates for the other seeds.
    """
    return missing_to_choose(runs, grid.budgets, grid.tuning_seeds) or [
        plan for plan in planned_at_chosen(runs, grid) if plan not in runs
    ]


def missing_to_choose(runs: Losses, budgets: Sequence[int], seeds: Sequence[int]) -> list[Plan]:
    """Return the next runs of the seeds that choose the rates."""
    part = planned(budgets, seeds)
    for arm in ARMS:
        begun = [k for k in EXPONENTS if not runs.keys().isdisjoint(planned(budgets, seeds, [k], [arm]))]
        part += planned(budgets, seeds, begun, [arm])
    part = [plan for plan in dict.fromkeys(part) if plan not in runs]
    if part:
        return part
    for arm in ARMS:
        losses_by_steps = [tuning_losses(runs, arm, steps, seeds) for steps in budgets]
        first, last = min(losses_by_steps[0]), max(losses_by_steps[0])
        best = set(map(best_of, losses_by_steps))
        beyond = [first - 1] * (first in best) + [last + 1] * (last in best)
        part += planned(budgets, seeds, [k for k in beyond if k in EXPONENTS], [arm])
    return part


def chosen(runs: Losses, arm: str, steps: int, grid: Grid) -> list[int]:
    """Return for each seed k of the rate that is best for the other seeds that choose."""
    losses = tuning_losses(runs, arm, steps, grid.tuning_seeds)
    others = [np.array(grid.tuning_seeds) != seed for seed in grid.seeds]
    return [best_of({k: values[mask] for k, values in losses.items()}) for mask in others]


def best_for_all(runs: Losses, arm: str, steps: int, grid: Grid) -> list[int]:
    """Return for each seed k of the rate that is best for all seeds that choose, its own losses too."""
    return [best_of(tuning_losses(runs, arm, steps, grid.tuning_seeds))] * len(grid.seeds)


def planned_at_chosen(runs: Losses, grid: Grid) -> list[Plan]:
    """List the runs that are compared: at each budget the rate chosen there, at the last one that of the first too."""
    first, last = grid.budgets[0], grid.budgets[-1]
    pairs = [*((steps, steps) for steps in grid.budgets), (last, first)]
    plans = [
        Plan(arm, rate(k), steps, seed)
        for steps, chosen_at in pairs
        for arm in ARMS
        for k, seed in zip(chosen(runs, arm, chosen_at, grid), grid.seeds, strict=True)
    ]
    return sorted(dict.fromkeys(plans), key=lambda plan: grid.seeds.index(plan.seed))


def optimum(runs: Losses, arm: str, steps: int, seeds: Sequence[int]) -> Float64:
    """Return log2 of each seed's best rate, by a parabola through the losses around the best rate of all seeds.

    In octaves x from that rate a loss is about c x^2 + b x + a, lowest at -b / 2c. b is of the seed, c of the mean.
    """
    losses = tuning_losses(runs, arm, steps, seeds)
    at = best_of(losses)
    below, middle, above = losses[at - 1], losses[at], losses[at + 1]
    curvature = (below + above - 2 * middle).mean() / (2 * OCTAVES**2)
    slope = (above - below) / (2 * OCTAVES)
    return np.asarray(np.log2(rate(at)) - slope / (2 * curvature))


def test_losses(runs: Losses, arm: str, steps: int, rates: Sequence[int], length: int, grid: Grid) -> Float64:
    """Return the losses of the test half for each seed at its rate."""
    plans = [Plan(arm, rate(k), steps, seed) for k, seed in zip(rates, grid.seeds, strict=True)]
    return np.array([runs[plan]["test"][length] for plan in plans])


def results(runs: Losses, grid: Grid) -> list[str]:
    """Make the sections of the page; until all runs are done, their number alone."""
    if missing(runs, grid):
        return [f"Unfinished: {len(runs)} runs are done. Nothing is concluded from a part of them."]
    first, last = million(grid.budgets[0]), million(grid.budgets[-1])
    choosing = f"{len(grid.tuning_seeds)} seeds that choose the rates"
    return [
        "± is half the 95 % interval over seeds, paired; bold: it excludes 0.",
        f"### Learning rates\n\nHeld-out loss at {ROW} tokens on the tuning half, nats per token, mean of the "
        f"{choosing}.",
        rate_table(runs, grid),
        f"The best rate by parabolas, and its change in octaves for each doubling of the budget, over the {choosing}.",
        optimum_table(runs, grid),
        f"### Gains\n\nConstant minus growing, {len(grid.seeds)} seeds, each at the rate that is best at this budget "
        "for the other seeds that choose, nats per token of the test half. The slope is per doubling of the budget.",
        gain_table(runs, grid, chosen),
        "The same, not planned, at the rate that is best at this budget for all seeds that choose, their own too.",
        gain_table(runs, grid, best_for_all),
        f"### The best rate of {first} tokens at {last}\n\nLoss at {ROW} tokens of the test half after {last} tokens, "
        f"at the rate that is best for the others after {first}, minus that at their best after {last}, "
        f"{len(grid.seeds)} seeds.",
        carried_table(runs, grid),
    ]


def million(steps: int) -> str:
    """Return the tokens of so many steps."""
    return f"{steps * ROW * BATCH / 1e6:.2f}M"


def rate_table(runs: Losses, grid: Grid) -> str:
    """Make the table of the losses by arm, budget and learning rate."""
    losses_by_run = {
        (arm, steps): tuning_losses(runs, arm, steps, grid.tuning_seeds) for arm in ARMS for steps in grid.budgets
    }
    rates = sorted({k for losses in losses_by_run.values() for k in losses})  # an arm has as many at each budget
    rows = []
    for (arm, steps), losses in losses_by_run.items():
        cells = [f"{losses[k].mean():.4f}" if k in losses else "" for k in rates]
        rows.append([arm, million(steps), *cells, f"{rate(best_of(losses)):g}"])
    return table(["arm", "tokens", *(f"{rate(k):g}" for k in rates), "best"], rows)


def optimum_table(runs: Losses, grid: Grid) -> str:
    """Make the table of the best rates by arm and budget, and of their change with the budget."""
    rows: list[list[object]] = []
    for arm in ARMS:
        optima = np.array([optimum(runs, arm, steps, grid.tuning_seeds) for steps in grid.budgets])
        slopes = np.polyfit(np.log2(grid.budgets), optima, 1)[0]
        rows.append([arm, *(f"{2 ** values.mean():.2g}" for values in optima), Mean.of(slopes.tolist())])
    return table(["arm", *map(million, grid.budgets), "octaves per doubling"], rows)


def gain_table(runs: Losses, grid: Grid, choose: Callable[[Losses, str, int, Grid], list[int]]) -> str:
    """Make the table of the gains at both windows and of their difference, by budget, and of their slopes."""

    def gain(steps: int, length: int) -> Float64:
        constant, growing = (
            test_losses(runs, arm, steps, choose(runs, arm, steps, grid), length, grid) for arm in ARMS
        )
        return constant - growing

    short, whole = (np.array([gain(steps, length) for steps in grid.budgets]) for length in LENGTHS)
    columns = {f"gain at {LENGTHS[0]}": short, f"gain at {ROW}": whole, f"{ROW} minus {LENGTHS[0]}": whole - short}
    rows: list[list[object]] = [
        [million(steps), *(Mean.of(values[number].tolist()) for values in columns.values())]
        for number, steps in enumerate(grid.budgets)
    ]
    slopes = [np.polyfit(np.log2(grid.budgets), values, 1)[0] for values in columns.values()]
    rows.append(["slope", *(Mean.of(seed_values.tolist()) for seed_values in slopes)])
    rows.append(["its p", *(f"{stats.ttest_1samp(seed_values, 0).pvalue:.2g}" for seed_values in slopes)])
    return table(["tokens", *columns], rows)


def carried_table(runs: Losses, grid: Grid) -> str:
    """Make the table of what the best rate of the first budget costs at the last."""
    first, last = grid.budgets[0], grid.budgets[-1]
    rows: list[list[object]] = []
    for arm in ARMS:
        old_rates, own_rates = (chosen(runs, arm, chosen_at, grid) for chosen_at in (first, last))
        old, own = (test_losses(runs, arm, last, rates, ROW, grid) for rates in (old_rates, own_rates))
        named = [", ".join(f"{rate(k):g}" for k in sorted(set(rates))) for rates in (old_rates, own_rates)]
        rows.append([arm, *named, Mean.of((old - own).tolist())])
    return table(["arm", "old rate", "own best", "difference"], rows)


def page(parts: Sequence[str]) -> str:
    """Return the page of the design with these results in the place of its own."""
    design, _, _ = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").partition("\n## Results\n")
    return "\n\n".join([f"{design}\n## Results", *parts]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("novels", type=Path, nargs="?", help="folder of .txt novels")
    parser.add_argument("out", type=Path, nargs="?", help="folder for data, runs and results")
    parser.add_argument("--runs", type=Path, help="file with a line for each run [OUT/results/rate.jsonl]")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="steps")
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=TUNING_SEEDS, help="they choose the rates")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the gains")
    parser.add_argument("--held-out", type=int, default=60, help="documents of each half [60]")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a core each [2]")
    parser.add_argument("--check", action="store_true", help="compare the page with its runs; nothing is trained")
    options = parser.parse_args()
    grid = Grid(options.budgets, options.tuning_seeds, options.seeds)
    beside = Path(__file__)
    if options.check:
        if page(results(read_runs(beside.with_suffix(".jsonl")), grid)) != beside.with_suffix(".md").read_text():
            raise SystemExit("rate.md does not follow from rate.jsonl")
        return
    if options.out is None:
        parser.error("NOVELS and OUT are required without --check")
    out = options.out.resolve()
    file = (options.runs or out / "results" / "rate.jsonl").resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    data = prepare_halves(options.novels, out)
    while plans := missing(read_runs(file), grid):
        run_all(plans, file, out, data, options.held_out, options.workers, losses=evaluate)
    (file.parent / "rate.md").write_text(page(results(read_runs(file), grid)), encoding="utf-8")


if __name__ == "__main__":
    main()
