"""How far the losses of two runs of one configuration are apart: python benchmarks/compare_losses.py RUN_A RUN_B"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_ext.monitoring import read_jsonl

TOLERANCE = 2e-2  # relative, two different bfloat16 kernels over a few dozen steps


def main() -> int:
    """Print one JSON object, and append it to --output; 1 where the losses are too far apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs=2)
    parser.add_argument("--output", type=Path, help="file of JSON lines to append to")
    options = parser.parse_args()
    first, second = ([r["lm_loss"] for r in read_jsonl(run / "metrics.jsonl")] for run in options.runs)
    apart = max(abs(a - b) / a for a, b in zip(first, second, strict=True))
    record = {"step": "training", "steps": len(first), "worst_relative_difference": apart, "ok": apart <= TOLERANCE}
    record |= {"final_losses": [first[-1], second[-1]]}
    print(json.dumps(record))
    if options.output:
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
