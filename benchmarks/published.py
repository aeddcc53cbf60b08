"""Published figures beside the time model's predictions: python benchmarks/published.py [--fit] [--write]

--fit fits the shares of facts/gpus.yaml to the figures that are marked so, at most a third of them, and prints the
numbers to put there (needs scipy: pip install scipy). The other figures are the test: median error at most 15 %, none
above 35 %.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from megatron_ext.planning.published import compare, read_figures, table
from megatron_ext.planning.step_time import Speeds, read_speeds

PAGE = Path(__file__).resolve().parents[1] / "docs" / "plan-run.md"
BEGIN, END = "<!-- benchmarks/published.py -->", "<!-- end -->"
# start and bounds of what is fitted
FITTED = {
    "ampere.matmul": (0.7, 0.3, 0.95),
    "hopper.matmul": (0.65, 0.3, 0.9),
    "hopper.flash2": (0.4, 0.15, 0.7),
    "hopper.cudnn": (0.4, 0.15, 0.7),
    "hopper.ring": (0.2, 0.08, 0.5),
    "fp8_speedup": (1.5, 1.1, 1.9),
    "torchao_speedup": (1.4, 1.0, 1.9),
    "eager": (0.7, 0.3, 1.0),
}


def with_values(speeds: Speeds, values: dict[str, float]) -> Speeds:
    """Return the speeds with some of the fitted numbers set."""
    reached = dict(speeds.reached)
    for name in (name for name in values if "." in name):
        family, share = name.split(".")
        reached[family] = replace(reached[family], **{share: values[name]})
    plain = {name: value for name, value in values.items() if "." not in name}
    return replace(speeds, reached=reached, **plain)


def fit(speeds: Speeds) -> dict[str, float]:
    """Fit to the logarithm of predicted over published."""
    from scipy.optimize import least_squares

    figures = [figure for figure in read_figures() if figure.fit]

    def errors(values: list[float]) -> list[float]:
        there = with_values(speeds, dict(zip(FITTED, map(float, values), strict=True)))
        return [math.log(one.predicted / one.figure.value) for one in compare(figures, there)]

    starts, low, high = zip(*FITTED.values(), strict=True)
    return dict(zip(FITTED, map(float, least_squares(errors, starts, bounds=(low, high)).x), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the shares anew and show the table with them")
    parser.add_argument("--write", action="store_true", help="put the table into docs/plan-run.md")
    options = parser.parse_args()
    speeds = read_speeds()
    if options.fit:
        values = fit(speeds)
        speeds = with_values(speeds, values)
        print("\n".join(f"{name} {value:.3f}" for name, value in values.items()))
    compared = compare(read_figures(), speeds)
    lines = list(table(compared))
    print("\n".join(lines))
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")
    errors = [abs(one.error) for one in compared if not one.figure.fit]
    print(f"\n{len(errors)} figures not fitted to: median error {median(errors):.1%}, largest {max(errors):.1%}")
    return int(median(errors) > 0.15 or max(errors) > 0.35)


if __name__ == "__main__":
    sys.exit(main())
