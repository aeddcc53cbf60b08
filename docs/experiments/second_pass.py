"""Is the second pass of dense unfrozen weights worth its time? See second_pass.md.

python docs/experiments/second_pass.py NOVELS HF OUT     # OUT/results gets the page and a line for each run
python docs/experiments/second_pass.py --check           # recompute the page beside this file from its runs

HF and the data are those of token_weighting.py, whose published runs are the other arms. A run that has a line is not
trained again, so a stopped experiment continues by the same command, on another machine with that file alone (--runs).
"""

import json
from collections.abc import Sequence
from pathlib import Path

import token_weighting
from harness import Planned, arguments
from token_weighting import OF_TOKEN, Values, less

from megatron_ext.evaluation.report import table

LONGER_STEPS = 202  # 1.26 times token_weighting's
SEEDS = tuple(range(1, 16))
REPEATED = ("uniform", "dense_unfrozen")  # trained again with the first seed, to compare with the published runs
ARMS: dict[str, list[object]] = {
    "uniform_longer": ["--train-iters", LONGER_STEPS],
    "exposure": ["--token-weighting", "unfrozen", "--weight-score", "exposure", "--weight-post", "none"],
}
PAIRS = {
    "dense, unfrozen - uniform, longer": ("dense_unfrozen", "uniform_longer"),
    "exposure - uniform": ("exposure", "uniform"),
    "dense, unfrozen - uniform": ("dense_unfrozen", "uniform"),
    "uniform, longer - uniform": ("uniform_longer", "uniform"),
}
COLUMNS: dict[str, tuple[str, ...]] = {
    "gain, far - near, per name": ("gain_far", "gain_near"),
    "the same, per token": (f"gain_far{OF_TOKEN}", f"gain_near{OF_TOKEN}"),
    "loss, all tokens": ("loss",),
    "gain, all tokens": ("gain",),
    "loss, far names, per token": (f"loss_far{OF_TOKEN}",),
}


def planned(seeds: Sequence[int], out: Path) -> list[list[Planned]]:
    """List the runs: the repeated ones, and then both arms of each seed."""
    both_arms = [Planned(seed, arm, flags) for seed in seeds for arm, flags in ARMS.items()]
    return [token_weighting.planned(seeds[:1], out, REPEATED), both_arms]


def published(seeds: Sequence[int]) -> Values:
    """Read the measures of the published runs, by arm, for these seeds."""
    numbers = json.loads(Path(token_weighting.__file__).with_suffix(".json").read_text(encoding="utf-8"))
    places = [numbers["seeds"].index(seed) for seed in seeds]
    return {
        arm: {name: [values[place] for place in places] for name, values in measures.items()}
        for arm, measures in numbers["values"].items()
    }


def results(file: Path, asked: Sequence[int]) -> list[str]:
    """Make the sections of the page; until all runs are done, their number alone."""
    runs = token_weighting.read_runs(file)
    seeds = list(asked)
    if not all((seed, arm) in runs for seed in seeds for arm in ARMS):
        least = len(REPEATED) + len(seeds) * len(ARMS)
        return [f"Unfinished: {len(runs)} runs of {least} are done. Nothing is concluded from a part of them."]
    values = published(seeds)
    names = runs[seeds[0], "exposure"]
    for arm in ARMS:
        values[arm] = {name: [runs[seed, arm][name] for seed in seeds] for name in names}
    rows = [
        [title, *(less(values, arm, other, *measures) for measures in COLUMNS.values())]
        for title, (arm, other) in PAIRS.items()
    ]
    return [
        f"Differences in nats, paired by seed, ± half the 95 % interval over {len(seeds)} seeds; bold: it excludes 0. "
        "The planned tests are the first column of the first two rows, then their third column.",
        table(["runs", *COLUMNS], rows),
        *repeated(file, asked[0]),
    ]


def repeated(file: Path, seed: int) -> list[str]:
    """Compare the repeated runs with the published ones, and give the share of a step that the scores take."""
    runs = token_weighting.read_runs(file)
    before = published([seed])
    done = [arm for arm in REPEATED if (seed, arm) in runs]
    away = [abs(runs[seed, arm][name] - before[arm][name][0]) for arm in done for name in runs[seed, arm]]
    parts = [f"Trained again, seed {seed}, {' and '.join(done)}: no measure differs by more than {max(away):.1g} nats."]
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if (line["seed"], line["arm"]) == (seed, "dense_unfrozen"):
            step, scores = (line["seconds"][name] for name in token_weighting.TIMES)
            text = f"A step of dense, unfrozen takes {step / (step - scores):.2f} times its time without the scores"
            parts.append(f"{text} (medians of the repeated run's steps).")
    return parts


def page(parts: Sequence[str]) -> str:
    """Return the page of the design with these results in the place of its own."""
    design, _, _ = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").partition("\n## Results\n")
    return "\n\n".join([f"{design}\n## Results", *parts]) + "\n"


def main() -> None:
    options = arguments(
        __doc__,
        steps=token_weighting.STEPS,
        seeds=SEEDS,
        held_out=(1024, "held-out rows that models are evaluated on"),
        novels="folder of .txt novels",
        more_flags={"--runs": {"type": Path, "help": "file with a line for each run [OUT/results/second_pass.jsonl]"}},
        hf="the Llama of 260K parameters as a Hugging Face folder",
        out="folder for data, runs and results",
    )
    beside = Path(__file__)
    if options.check:
        if page(results(beside.with_suffix(".jsonl"), options.seeds)) != beside.with_suffix(".md").read_text():
            raise SystemExit("second_pass.md does not follow from second_pass.jsonl")
        return
    out = options.out.resolve()
    folder = options.results or out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    file = (options.runs or folder / "second_pass.jsonl").resolve()
    if not options.only_results:
        token_weighting.run_all(options, out, file, planned(options.seeds, out))
    (folder / "second_pass.md").write_text(page(results(file, options.seeds)), encoding="utf-8")


if __name__ == "__main__":
    main()
