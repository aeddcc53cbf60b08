"""Must the learning rate be tuned again for each token budget? See rate.md.

python docs/experiments/rate.py NOVELS OUT     # OUT/results gets the page and a line for each run
python docs/experiments/rate.py --check        # recompute the page beside this file from its runs

A run that has a line is not trained again, so a stopped experiment continues by the same command, on another machine
with the file of runs alone (--runs).
"""

import argparse
from collections.abc import Sequence
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

Best = dict[tuple[str, int], int]  # k of the best rate, by arm and steps

VOCABULARY = 1024  # of budget.py's 17 novels this makes 4.3M tokens, more than the largest budget
LENGTHS = (32, ROW)
RATES = range(1, 4)  # k of 2e-3 * sqrt(2)^k, before extensions
LIMITS = (-4, 12)
TUNING_SEEDS = (21,)
SEEDS = tuple(range(31, 38))


def rate(k: int) -> float:
    """Return the k-th learning rate."""
    return float(f"{2e-3 * 2 ** (k / 2):.3g}")


def tuning(budgets: Sequence[int], seeds: Sequence[int], rates: Sequence[int]) -> list[Plan]:
    """List the runs of the grid, seed by seed: a stopped experiment has fewer seeds."""
    return [Plan(arm, rate(k), steps, seed) for seed in seeds for steps in budgets for k in rates for arm in ARMS]


def tested(best: Best, budgets: Sequence[int], seeds: Sequence[int]) -> list[Plan]:
    """List the runs at each arm's best rates, then those of the largest budget at the best rate of the smallest."""
    first, last = budgets[0], budgets[-1]
    own = [Plan(arm, rate(best[arm, steps]), steps, seed) for seed in seeds for steps in budgets for arm in ARMS]
    carried = [Plan(arm, rate(best[arm, first]), last, seed) for seed in seeds for arm in ARMS]
    return list(dict.fromkeys([*own, *carried]))


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


def tried(runs: Losses, arm: str, steps: int, seeds: Sequence[int]) -> dict[int, float]:
    """Return the mean loss of the tuning half at the full row, by k, of the rates at which all these seeds are done."""
    loss_by_exponent = {}
    for k in range(LIMITS[0], LIMITS[1] + 1):
        plans = [Plan(arm, rate(k), steps, seed) for seed in seeds]
        if all(plan in runs for plan in plans):
            loss_by_exponent[k] = float(np.mean([runs[plan]["tuning"][ROW] for plan in plans]))
    return loss_by_exponent


def choose(runs: Losses, budgets: Sequence[int], seeds: Sequence[int]) -> tuple[Best, list[Plan]]:
    """Return the best rates so far, and the runs beyond those that are at an edge of what was tried."""
    best: Best = {}
    beyond: list[Plan] = []
    for arm in ARMS:
        for steps in budgets:
            means = tried(runs, arm, steps, seeds)
            at = best[arm, steps] = min(means, key=lambda k: means[k])
            more = [at - 1] * (at == min(means)) + [at + 1] * (at == max(means))
            beyond += [Plan(arm, rate(k), steps, seed) for k in more if LIMITS[0] <= k <= LIMITS[1] for seed in seeds]
    return best, beyond


def missing(runs: Losses, budgets: Sequence[int], tuning_seeds: Sequence[int], seeds: Sequence[int]) -> list[Plan]:
    """Return the runs of the next part of the experiment: the grid, its extension, and the test at the best rates."""
    part = [plan for plan in tuning(budgets, tuning_seeds, RATES) if plan not in runs]
    if not part:
        best, beyond = choose(runs, budgets, tuning_seeds)
        part = [plan for plan in beyond if plan not in runs] or [
            plan for plan in tested(best, budgets, seeds) if plan not in runs
        ]
    return part


def results(runs: Losses, budgets: Sequence[int], tuning_seeds: Sequence[int], seeds: Sequence[int]) -> list[str]:
    """Make the sections of the page; until all runs are done, their number alone."""
    if missing(runs, budgets, tuning_seeds, seeds):
        least = len(tuning(budgets, tuning_seeds, RATES)) + len(seeds) * len(budgets) * len(ARMS)
        return [f"Unfinished: {len(runs)} runs of at least {least} are done. Nothing is concluded from a part of them."]
    best, _ = choose(runs, budgets, tuning_seeds)
    first, last = budgets[0], budgets[-1]
    return [
        f"### Learning rates\n\nHeld-out loss at {ROW} tokens on the tuning half, mean of {len(tuning_seeds)} seeds.",
        rate_table(runs, best, tuning_seeds),
        "### Gains\n\nConstant minus growing, each at its best rate of the budget, nats per token of the test half, "
        f"{len(seeds)} other seeds, paired, ± half the 95 % interval over seeds; bold: it excludes 0. The slope is per "
        "doubling of the budget.",
        gain_table(runs, best, budgets, seeds),
        f"### The best rate of {million(first)} tokens at {million(last)}\n\n"
        f"Loss at {ROW} tokens, minus that at the own best rate.",
        carried_table(runs, best, (first, last), seeds),
    ]


def million(steps: int) -> str:
    """Return the tokens of so many steps."""
    return f"{steps * ROW * BATCH / 1e6:.2f}M"


def rate_table(runs: Losses, best: Best, seeds: Sequence[int]) -> str:
    """Make the table of the losses by arm, budget and learning rate."""
    means = {key: tried(runs, *key, seeds) for key in best}
    rates = sorted({k for arm_means in means.values() for k in arm_means})
    rows = []
    for (arm, steps), arm_means in means.items():
        losses = [f"{arm_means[k]:.4f}" if k in arm_means else "" for k in rates]
        rows.append([arm, million(steps), *losses, f"{rate(best[arm, steps]):g}"])
    return table(["arm", "tokens", *(f"{rate(k):g}" for k in rates), "best"], rows)


def tested_losses(runs: Losses, arm: str, steps: int, k: int, length: int, seeds: Sequence[int]) -> Float64:
    """Return the losses of the test half for each seed."""
    return np.array([runs[Plan(arm, rate(k), steps, seed)]["test"][length] for seed in seeds])


def gain_table(runs: Losses, best: Best, budgets: Sequence[int], seeds: Sequence[int]) -> str:
    """Make the table of the gains at both windows and of their difference, by budget, and of their slopes."""

    def gain(steps: int, length: int) -> Float64:
        constant, growing = (tested_losses(runs, arm, steps, best[arm, steps], length, seeds) for arm in ARMS)
        return constant - growing

    short, whole = (np.array([gain(steps, length) for steps in budgets]) for length in LENGTHS)
    columns = {f"gain at {LENGTHS[0]}": short, f"gain at {ROW}": whole, f"{ROW} minus {LENGTHS[0]}": whole - short}
    rows: list[list[object]] = [
        [million(steps), *(Mean.of(values[number].tolist()) for values in columns.values())]
        for number, steps in enumerate(budgets)
    ]
    slopes = [np.polyfit(np.log2(budgets), values, 1)[0] for values in columns.values()]
    rows.append(["slope", *(Mean.of(seed_values.tolist()) for seed_values in slopes)])
    rows.append(["its p", *(f"{stats.ttest_1samp(seed_values, 0).pvalue:.2g}" for seed_values in slopes)])
    return table(["tokens", *columns], rows)


def carried_table(runs: Losses, best: Best, budgets: tuple[int, int], seeds: Sequence[int]) -> str:
    """Make the table of what the best rate of the first budget costs at the last."""
    first, last = budgets
    rows: list[list[object]] = []
    for arm in ARMS:
        first_exponent, best_exponent = best[arm, first], best[arm, last]
        more = tested_losses(runs, arm, last, first_exponent, ROW, seeds) - tested_losses(
            runs, arm, last, best_exponent, ROW, seeds
        )
        rows.append([arm, f"{rate(first_exponent):g}", f"{rate(best_exponent):g}", Mean.of(more.tolist())])
    return table(["arm", "its rate", "own best", "difference"], rows)


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
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=TUNING_SEEDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--held-out", type=int, default=60, help="documents of each half [60]")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a core each [2]")
    parser.add_argument("--check", action="store_true", help="compare the page with its runs; nothing is trained")
    options = parser.parse_args()
    grid = (options.budgets, options.tuning_seeds, options.seeds)
    beside = Path(__file__)
    if options.check:
        if page(results(read_runs(beside.with_suffix(".jsonl")), *grid)) != beside.with_suffix(".md").read_text():
            raise SystemExit("rate.md does not follow from rate.jsonl")
        return
    if options.out is None:
        parser.error("NOVELS and OUT are required without --check")
    out = options.out.resolve()
    file = (options.runs or out / "results" / "rate.jsonl").resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    data = prepare_halves(options.novels, out)
    while plans := missing(read_runs(file), *grid):
        run_all(plans, file, out, data, options.held_out, options.workers, losses=evaluate)
    (file.parent / "rate.md").write_text(page(results(read_runs(file), *grid)), encoding="utf-8")


if __name__ == "__main__":
    main()
