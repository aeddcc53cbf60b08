"""Compare the losses of two runs of one configuration: python benchmarks/compare_losses.py RUN_A RUN_B"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from record import Records, add_output

from megatron_ext.monitoring import read_jsonl

TOLERANCE = 2e-2  # relative, two different bfloat16 kernels over a few dozen steps


def main() -> int:
    """Print the largest difference; return 1 if it exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs=2)
    add_output(parser)
    options = parser.parse_args()
    records = Records("correct", options.output)
    for run in options.runs:
        if not (run / "metrics.jsonl").is_file():
            records.add(case="training", skipped=f"{run} has no metrics.jsonl; run benchmarks/gpu.sh prepare first")
            return 1
    first, second = ([r["lm_loss"] for r in read_jsonl(run / "metrics.jsonl")] for run in options.runs)
    apart = max(abs(a - b) / a for a, b in zip(first, second, strict=True))
    records.add(
        case="training",
        steps=len(first),
        worst_relative_difference=apart,
        final_losses=[first[-1], second[-1]],
        ok=apart <= TOLERANCE,
    )
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
