"""SkyLadder's gain by token budget, each arm at its best learning rate of one budget. See budget.md.

python docs/experiments/budget.py NOVELS OUT     # OUT/results gets the page, its figure and a line for each run
python docs/experiments/budget.py --check        # recompute the page beside this file from its runs

A run that has a line is not trained again, so a stopped experiment continues by the same command, on another machine
with the file of runs alone (--runs).
"""

import argparse
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from harness import Mean, command, prepare, read_evaluation
from matplotlib.figure import Figure
from scipy import stats

from megatron_ext.arrays import Float64
from megatron_ext.evaluation.report import table

ROW = 512
BATCH = 2
VOCABULARY = 2048
START = 2
SHARE = 0.64
# tokens of a document: the paper's CommonCrawl over 16
MEDIAN = 67
SIGMA = 1.11
SHORTEST = 3
LENGTHS = (32, 256, 512)
ARMS = ("constant", "growing")
TUNED = 2000  # steps of the runs that choose the learning rates
BUDGETS = (1000, 2000, 4000)  # steps
# grid, extended by factors of 2 up to the limits
RATES = (4e-3, 8e-3, 1.6e-2)
LIMITS = (5e-4, 0.128)
TUNING_SEEDS = (1, 2)
SEEDS = tuple(range(8, 15))
LONG_LESS_SHORT = f"{ROW} minus {LENGTHS[0]}"
COMMON: list[object] = [
    *("--model-preset", "tiny-1M", "--init-method-std", 0.08, "--seq-length", ROW, "--global-batch-size", BATCH),
    *("--micro-batch-size", BATCH, "--eval-interval", 0, "--split", "1,0,0", "--no-tensorboard"),
]


@dataclass(frozen=True)
class Plan:
    """A run: which window, peak learning rate, steps, and the seed of the weights and of the data order."""

    arm: str
    rate: float
    steps: int
    seed: int


Losses = dict[Plan, dict[int, float]]  # by length of the evaluation's window, nats per token


def cut(texts: Sequence[str], tokenizer: tokenizers.Tokenizer, seed: int = 0) -> list[str]:
    """Cut texts into documents whose numbers of tokens are log-normal; the end of a text is a document too."""
    draw = np.random.default_rng(seed)
    documents = []
    for text in texts:
        starts = [start for start, _ in tokenizer.encode(text, add_special_tokens=False).offsets]
        token = 0
        while token < len(starts):
            end = token + max(round(draw.lognormal(np.log(MEDIAN), SIGMA)), SHORTEST)
            documents.append(text[starts[token] : starts[end] if end < len(starts) else len(text)])
            token = end
    return [document for document in documents if document]


def prepare_documents(novels: Path, out: Path, vocabulary: int = VOCABULARY) -> list[object]:
    """Make the tokenizer, the training documents and the held-out ones, once; return the flags of the data."""
    data = out / "data"
    prepare(novels, out, vocabulary, sources=("novels",))
    documents = data / "documents"
    if not documents.with_suffix(".idx").exists():
        texts = [json.loads(line)["text"] for line in (data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
        tokenizer = tokenizers.Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
        lines = [json.dumps({"text": document}) + "\n" for document in cut(texts, tokenizer)]
        documents.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
        flags = ["--output-prefix", documents, "--tokenizer-model", data / "tokenizer"]
        command("tools/preprocess_data.py", "--input", documents.with_suffix(".jsonl"), *flags)
    return ["--data-path", documents, "--tokenizer-model", data / "tokenizer"]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the lines of the runs that are done."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def read_runs(file: Path) -> Losses:
    """Read the losses of the runs that are done."""
    runs = read_lines(file)
    return {Plan(**run["run"]): {int(length): loss for length, loss in run["losses"].items()} for run in runs}


def evaluate(folder: Path, out: Path, count: int) -> dict[int, float]:
    """Return the held-out loss of a run by window, over `count` documents."""
    flags = ["--data-path", out / "data" / "valid-novels", "--lengths", *LENGTHS, "--documents-per-source", count]
    flags += ["--min-tokens", ROW, "--max-tokens", 2 * ROW, "--output", folder / "evaluation", "--overwrite"]
    command("tools/evaluate.py", "perplexity", folder, *flags)
    (loss_by_window,) = read_evaluation(folder / "evaluation").values()
    return loss_by_window


def run_all(
    plans: Sequence[Plan],
    file: Path,
    out: Path,
    data: Sequence[object],
    held_out: int,
    workers: int,
    trainer: Callable[[str], Sequence[object]] = lambda arm: ["pretrain_skyladder.py"],
    losses: Callable[[Path, Path, int], object] = evaluate,
) -> None:
    """Train and evaluate the runs that have no line yet, and append their lines; `trainer` is an arm's command."""
    done = {Plan(**line["run"]) for line in read_lines(file)}
    lock = threading.Lock()

    def one(plan: Plan) -> None:
        folder = out / "runs" / f"{plan.arm}_{plan.rate:g}_{plan.steps}_{plan.seed}"
        flags = [*data, *COMMON, "--lr", plan.rate, "--min-lr", plan.rate / 10, "--seed", plan.seed]
        flags += ["--train-iters", plan.steps, "--lr-warmup-iters", plan.steps // 20, "--save-interval", 100]
        if plan.arm != "constant":
            flags += ["--window-schedule", "linear", "--window-start", START, "--window-expansion-fraction", SHARE]
        saving = ["--save", folder, "--load", folder, "--load-if-present", "--keep-last", 1]
        command(*map(str, trainer(plan.arm)), *flags, *saving, log=out / "logs" / f"{folder.name}.txt")
        plan_losses = losses(folder, out, held_out)
        with lock, file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"run": asdict(plan), "losses": plan_losses}) + "\n")
        shutil.rmtree(folder)
        print(plan, plan_losses, flush=True)

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(one, [plan for plan in plans if plan not in done]):
            pass


def train_all(options: argparse.Namespace, file: Path, out: Path) -> None:
    """Train what is missing: first the runs that choose the learning rates, then the budgets."""
    data = prepare_documents(options.novels, out)
    limits = {"data": data, "held_out": options.held_out, "workers": options.workers}
    grid = {arm: list(options.rates) for arm in ARMS}
    while True:
        plans = [
            Plan(arm, rate, options.tuned, seed) for arm in ARMS for rate in grid[arm] for seed in options.tuning_seeds
        ]
        run_all(plans, file, out, **limits)
        best = {arm: best_rate(tried(read_runs(file), arm, options.tuned, options.tuning_seeds)) for arm in ARMS}
        more = {beyond for _, beyond in best.values() if beyond is not None}
        if not more:
            break
        for arm in ARMS:  # both, so that the gain is known at equal rates
            grid[arm] = sorted({*grid[arm], *more})
    pairs = [(arm, rate) for arm, (rate, _) in best.items()]
    run_all(
        [Plan(arm, rate, steps, seed) for seed in options.seeds for steps in options.budgets for arm, rate in pairs],
        file, out, **limits,
    )  # fmt: skip


def tried(runs: Losses, arm: str, steps: int, seeds: Sequence[int]) -> dict[float, float]:
    """Return the mean loss at the full row for each learning rate at which all these seeds are done, by rate."""
    rates = sorted({plan.rate for plan in runs if (plan.arm, plan.steps) == (arm, steps)})
    losses_by_rate = {rate: [runs.get(Plan(arm, rate, steps, seed), {}).get(ROW) for seed in seeds] for rate in rates}
    return {rate: float(np.mean(losses)) for rate, losses in losses_by_rate.items() if None not in losses}  # type: ignore[arg-type]


def best_rate(means: dict[float, float]) -> tuple[float, float | None]:
    """Return the best learning rate, and the next one to try while the best is at an edge of the grid."""
    best = min(means, key=lambda rate: means[rate])
    beyond = best / 2 if best == min(means) else best * 2 if best == max(means) else None
    return best, beyond if beyond is not None and LIMITS[0] <= beyond <= LIMITS[1] else None


def complete(runs: Losses, rates: dict[str, float], budgets: Sequence[int], seeds: Sequence[int]) -> list[int]:
    """Return the seeds whose runs of both arms are done at every budget."""
    return [seed for seed in seeds if all(Plan(arm, rates[arm], n, seed) in runs for arm in ARMS for n in budgets)]


def gains(runs: Losses, rates: dict[str, float], steps: int, seeds: Sequence[int], length: int) -> list[float]:
    """Return the loss of constant minus that of growing, each at its rate, for each seed."""
    constant, growing = (
        [runs[Plan(arm, rates[arm], steps, seed)][length] for seed in seeds] for arm in ("constant", "growing")
    )
    return np.subtract(constant, growing).tolist()


def results(runs: Losses, tuned: int, budgets: Sequence[int], tuning: Sequence[int], seeds: Sequence[int]) -> list[str]:
    """Make the sections of the page from the runs that are done."""
    means = {arm: tried(runs, arm, tuned, tuning) for arm in ARMS}
    rates = sorted(set(means["constant"]) & set(means["growing"]))
    if not rates:
        return ["No learning rate is done yet."]
    by_rate = [gains(runs, dict.fromkeys(ARMS, rate), tuned, tuning, ROW) for rate in rates]
    rows = [[arm, *(f"{means[arm][rate]:.4f}" for rate in rates)] for arm in ARMS]
    rows.append(["gain", *(f"{np.mean(gain):+.4f}" for gain in by_rate)])
    best = {arm: best_rate(means[arm]) for arm in ARMS}
    parts = [
        f"### Learning rates\n\nHeld-out loss at {ROW} tokens after {tuned:,} steps, mean of {len(tuning)} seeds.",
        table(["arm", *(f"{rate:g}" for rate in rates)], rows),
        *(
            f"The best of {arm} is {rate:g}{', an edge of the grid' if more else ''}."
            for arm, (rate, more) in best.items()
        ),
    ]
    rate_by_arm = {arm: rate for arm, (rate, _) in best.items()}
    done = complete(runs, rate_by_arm, budgets, seeds)
    if len(done) < 2:
        return [*parts, "### Budgets\n\nUnfinished: fewer than two seeds are done at every budget."]
    gains_by_steps = {
        steps: {length: gains(runs, rate_by_arm, steps, done, length) for length in LENGTHS} for steps in budgets
    }
    columns: dict[str, Float64] = {  # [budgets, seeds]
        str(length): np.array([gains_by_steps[steps][length] for steps in budgets]) for length in LENGTHS
    }
    columns[LONG_LESS_SHORT] = columns[str(ROW)] - columns[str(LENGTHS[0])]
    slopes = {name: np.polyfit(np.log2(budgets), values, 1)[0] for name, values in columns.items()}
    cells = [
        [f"{steps * ROW * BATCH / 1e6:.2f}M", *(Mean.of(values[place].tolist()) for values in columns.values())]
        for place, steps in enumerate(budgets)
    ]
    return [
        *parts,
        f"### Budgets\n\nGain (constant minus growing, nats per token), each arm at its best rate of {tuned:,} steps, "
        f"{len(done)} seeds, paired, ± half the 95 % interval over seeds; bold: it excludes 0.",
        table(["tokens", *columns], cells),
        "Slope of the gain on log2 of the budget, nats per doubling. The row of 512 is the planned test; the last one "
        "was not planned for these runs.",
        table(
            ["window", "slope", "p"],
            [[name, Mean.of(of.tolist()), f"{stats.ttest_1samp(of, 0).pvalue:.2g}"] for name, of in slopes.items()],
        ),
        *doubts(means, slopes[str(ROW)], done),
        "![Gain by budget](budget.png)",
    ]


def doubts(means: dict[str, dict[float, float]], slopes: Float64, seeds: Sequence[int]) -> list[str]:
    """Say what the planned test depends on: single seeds, and best rates that are taken to be the same at all budgets.

    In octaves of the rate from the best one, at the tuned budget, an arm's loss is about c x^2 + b x + a. If best rates
    fall by f octaves per doubling, a run at half (twice) the budget loses b f less (more) by its rate than one at its
    best, but for terms that both have. So the slope of the gain rises by f (b of growing - b of constant).

    Args:
        means: of the runs that choose the rates, by arm and rate.
        slopes: of the planned test, of each seed.
        seeds: of the slopes.
    """
    without = {seed: stats.ttest_1samp(np.delete(slopes, place), 0).pvalue for place, seed in enumerate(seeds)}
    linear = {}
    for arm, losses in means.items():
        near = [losses.get(best_rate(losses)[0] * factor) for factor in (0.5, 1, 2)]
        if len(seeds) < 3 or None in near:
            return []
        linear[arm] = float(np.polyfit([-1, 0, 1], near, 2)[1])  # type: ignore[arg-type]
    fall = -float(slopes.mean()) / (linear["growing"] - linear["constant"])
    return [
        "The same p without one seed: " + ", ".join(f"{p:.2g} (without {seed})" for seed, p in without.items()) + ".",
        "By parabolas through the losses at half the best rate, at the best and at twice it, the slope is 0 if the "
        f"best rates of both arms fall by {fall:.2f} octaves per doubling of the budget.",
    ]


def draw(
    runs: Losses, tuned: int, budgets: Sequence[int], tuning: Sequence[int], seeds: Sequence[int], to: Path
) -> None:
    """Draw the losses by learning rate, and the gain by budget with its interval, a point for each seed."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    rate_axis, gain_axis = figure.subplots(1, 2)
    rate_by_arm = {}
    for number, arm in enumerate(ARMS):
        means = tried(runs, arm, tuned, tuning)
        rate_by_arm[arm] = best_rate(means)[0]
        rate_axis.plot(list(means), list(means.values()), "o-", color=f"C{number}", label=arm)
    rate_axis.set(xscale="log", xlabel="peak learning rate", ylabel="held-out loss (nats / token)")
    rate_axis.set_xticks(sorted(means), [f"{rate:g}" for rate in sorted(means)])
    rate_axis.minorticks_off()
    rate_axis.legend(frameon=False)
    done = complete(runs, rate_by_arm, budgets, seeds)
    if len(done) >= 2:
        seed_gains = [gains(runs, rate_by_arm, steps, done, ROW) for steps in budgets]
        tokens = [steps * ROW * BATCH / 1e6 for steps in budgets]
        mean = [Mean.of(values) for values in seed_gains]
        gain_axis.errorbar(
            tokens, [gain.value for gain in mean], [gain.half_width for gain in mean], fmt="o-", capsize=4
        )
        gain_axis.plot(tokens, seed_gains, ".", color="C0", alpha=0.4)
        gain_axis.set_xscale("log")
        gain_axis.set_xticks(tokens, [f"{number:.2f}" for number in tokens])
        gain_axis.minorticks_off()
    gain_axis.axhline(0, color="#9ca3af", linewidth=1)
    gain_axis.set(xlabel="million tokens", ylabel="gain (nats / token)")
    figure.savefig(to, dpi=110)


def page(parts: Sequence[str]) -> str:
    """Return the page of the design with these results in the place of its own."""
    design, _, _ = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").partition("\n## Results\n")
    return "\n\n".join([f"{design}\n## Results", *parts]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("novels", type=Path, nargs="?", help="folder of .txt novels")
    parser.add_argument("out", type=Path, nargs="?", help="folder for data, runs and results")
    parser.add_argument("--runs", type=Path, help="file with a line for each run [OUT/results/budget.jsonl]")
    parser.add_argument("--tuned", type=int, default=TUNED, help=f"steps of the runs that choose the rates [{TUNED}]")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="steps")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="the first learning rates")
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=TUNING_SEEDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--held-out", type=int, default=120, help="documents that models are evaluated on [120]")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a core each [2]")
    parser.add_argument("--only-results", action="store_true", help="of the runs that are done: nothing is trained")
    parser.add_argument("--check", action="store_true", help="compare the page with its runs; nothing is trained")
    options = parser.parse_args()
    plan_of_runs = (options.tuned, options.budgets, options.tuning_seeds, options.seeds)
    beside = Path(__file__)
    if options.check:
        if (
            page(results(read_runs(beside.with_suffix(".jsonl")), *plan_of_runs))
            != beside.with_suffix(".md").read_text()
        ):
            raise SystemExit("budget.md does not follow from budget.jsonl")
        return
    if options.out is None:
        parser.error("NOVELS and OUT are required without --check")
    out = options.out.resolve()
    file = (options.runs or out / "results" / "budget.jsonl").resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    if not options.only_results:
        train_all(options, file, out)
    runs = read_runs(file)
    (file.parent / "budget.md").write_text(page(results(runs, *plan_of_runs)), encoding="utf-8")
    draw(runs, *plan_of_runs, file.parent / "budget.png")


if __name__ == "__main__":
    main()
