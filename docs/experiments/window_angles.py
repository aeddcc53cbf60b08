"""Do angles or scores that follow the window make a growing window better? See window_angles.md.

python docs/experiments/window_angles.py NOVELS OUT --rate 4e-3     # trains what has no line in window_angles.jsonl yet
python docs/experiments/window_angles.py --check                    # recompute the page beside this file from its runs
python docs/experiments/window_angles.py train ANGLES SCORES ...    # as pretrain_skyladder.py; each is 0 or 1
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import budget
import numpy as np
from harness import Mean
from torch import Tensor

from megatron_ext.evaluation.report import table

ARMS = {
    "growing": "plain",
    "growing_angles": "angles follow",
    "growing_scores": "scores follow",
    "growing_both": "both (YaRN)",
}
SEEDS = (8, 9, 10)
# YaRN's: pairs that turn less often than SLOW in a row are stretched, those above FAST are kept
SLOW = 1
FAST = 32


def train(angles: bool, scores: bool, argv: list[str]) -> int:
    """Train as pretrain_skyladder.py does; at a window of w in rows of L tokens, s = L / w:

        angles    theta_k (kept_k + (1 - kept_k) s): YaRN divides by s on the way from w to L
        scores    times 1 / (0.1 ln s + 1)^2: YaRN multiplies by it

    With the whole row both are those of a plain model. A batch's `rotary_base` carries its window.
    """
    from megatron_ext import rope
    from megatron_ext.engine import model
    from megatron_ext.run.batches import BatchMaker
    from pretrain_skyladder import main

    plain_at = rope.Frequencies.at
    plain_forward = model.PackedAttention.forward
    row = budget.ROW

    def with_window(self: BatchMaker, batches: list[Any], window: int) -> list[Any]:
        return [replace(batch, rotary_base=float(window)) for batch in batches]

    def at(self: rope.Frequencies, window: float | None, *where: Any, **options: Any) -> Tensor:
        plain_h = plain_at(self, None, *where, **options)
        stretch = row / (window or row)
        turns_h = row * plain_h / (2 * math.pi)
        kept_h = ((turns_h - SLOW) / (FAST - SLOW)).clamp(0, 1)
        return plain_h * (kept_h + (1 - kept_h) * stretch) if angles else plain_h

    def forward(self: Any, query: Tensor, *args: Any, **options: Any) -> Tensor:
        window = options["packed_seq_params"].batch.rotary_base
        factor = (0.1 * math.log(row / (window or row)) + 1) ** -2 if scores else 1.0
        return plain_forward(self, query * factor, *args, **options)

    BatchMaker._with_base = with_window  # type: ignore[method-assign]
    rope.Frequencies.at = at  # type: ignore[method-assign]
    model.PackedAttention.forward = forward  # type: ignore[method-assign]
    return main(argv)


def trainer(arm: str) -> list[object]:
    """Return the command that trains an arm."""
    kind = arm.removeprefix("growing").removeprefix("_")
    if not kind:
        return ["pretrain_skyladder.py"]
    return [f"docs/experiments/{Path(__file__).name}", "train", int(kind != "scores"), int(kind != "angles")]


def results(runs: budget.Losses, rate: float, steps: int, seeds: Sequence[int]) -> list[str]:
    """Make the table of the runs that are done: the loss of plain, and of each arm what it adds to it."""
    plans = {arm: [budget.Plan(arm, rate, steps, seed) for seed in seeds] for arm in ARMS}
    if not all(plan in runs for arm_plans in plans.values() for plan in arm_plans):
        return ["Not yet run."]
    losses = {
        arm: {length: np.array([runs[plan][length] for plan in arm_plans]) for length in budget.LENGTHS}
        for arm, arm_plans in plans.items()
    }
    plain = losses["growing"]
    rows: list[list[object]] = [["plain", *(f"{plain[length].mean():.4f}" for length in budget.LENGTHS)]]
    for arm, arm_losses in losses.items():
        if arm != "growing":
            rows.append([ARMS[arm], *(Mean.of((arm_losses[n] - plain[n]).tolist()) for n in budget.LENGTHS)])
    return [
        f"Held-out loss after {steps:,} steps at a peak rate of {rate:g}, {len(seeds)} seeds; below plain the "
        "difference from it, paired by seed, ± half the 95 % interval over seeds; bold: it excludes 0.",
        table(["run", *map(str, budget.LENGTHS)], rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("novels", type=Path, nargs="?", help="folder of .txt novels")
    parser.add_argument("out", type=Path, nargs="?", help="folder for data and runs")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate: the best of a growing window")
    parser.add_argument("--steps", type=int, default=budget.TUNED)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--held-out", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=Path, help="file with a line for each run [OUT/results/window_angles.jsonl]")
    parser.add_argument("--check", action="store_true", help="compare the page with its runs; nothing is trained")
    options = parser.parse_args()
    beside = Path(__file__)
    plan_of_runs = (options.rate, options.steps, options.seeds)
    page = beside.with_suffix(".md")
    design, _, _ = page.read_text(encoding="utf-8").partition("\n## Results\n")
    if options.check:
        parts = results(budget.read_runs(beside.with_suffix(".jsonl")), *plan_of_runs)
        if "\n\n".join([f"{design}\n## Results", *parts]) + "\n" != page.read_text(encoding="utf-8"):
            raise SystemExit("window_angles.md does not follow from window_angles.jsonl")
        return
    if options.out is None:
        parser.error("NOVELS and OUT are required without --check")
    out = options.out.resolve()
    file = (options.runs or out / "results" / "window_angles.jsonl").resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    data = budget.prepare_documents(options.novels, out)
    plans = [budget.Plan(arm, options.rate, options.steps, seed) for seed in options.seeds for arm in ARMS]
    budget.run_all(plans, file, out, data, options.held_out, options.workers, trainer)
    parts = results(budget.read_runs(file), *plan_of_runs)
    (file.parent / "window_angles.md").write_text(
        "\n\n".join([f"{design}\n## Results", *parts]) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        sys.exit(train(sys.argv[2] == "1", sys.argv[3] == "1", sys.argv[4:]))
    main()
