"""Measure the report of a long run: time, memory and size of the page.

    python benchmarks/report.py --steps 8000 500000

Each run's metrics.jsonl has the fields of a training step (about 540 bytes), its window restarts every 120 steps, and
it is validated every 100 steps. "seconds" and "peak_mb" are those of `tools/report.py` as a process of its own.
"resume_s" is the time in which a run that resumes 1,000 steps before the end cuts its files and reads its losses.
"""

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from record import ROOT, Records, parser_of

CYCLE, EVALUATED_EVERY = 120, 100


def step_line(step: int) -> dict[str, Any]:
    loss = 2.5 + 3 * math.exp(-step / 2000) + 0.001 * (step % 97)
    window = 512 + 270 * (step % CYCLE)
    return {
        "step": step,
        "consumed_samples": 128 * (step + 1),
        "consumed_tokens": 4_194_304 * (step + 1),
        "lm_loss": loss,
        "train_loss": loss,
        "window": window,
        "segments": 2211,
        "effective_context": window / 2.1,
        "learning_rate": 3.9871e-4,
        "grad_norm": 0.4 + 1 / (1 + step % 53),
        "denominator": 4_187_203.0,
        "skipped": 0,
        "step_time_s": 3.512834,
        "tokens_per_s": 1_193_998.4,
        "mfu": 0.4127,
        "data_wait_s": 0.000312,
        "save_stall_s": 0.0,
        "cp_bytes": 73_014_444_032,
        "peak_memory_bytes": 73_014_444_032,
        "spike": 0,
        "flops": 8e18,
    }


def write_run(folder: Path, steps: int) -> None:
    """Write the metrics and validations of a run of this many steps."""
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(step_line(step)) + "\n" for step in range(steps))
    with (folder / "evaluation.jsonl").open("w") as file:
        for step in range(0, steps, EVALUATED_EVERY):
            loss = 2.4 + 3 * math.exp(-step / 2000)
            losses = {"valid_loss": loss, "valid_perplexity": math.exp(loss), "by_length": {"32768": loss}}
            line = {"step": step, "tokens": 1_048_576, "document_mask": False, "stride": None, **losses}
            file.write(json.dumps(line) + "\n")


def measure(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, steps)
        began = time.perf_counter()
        subprocess.run([sys.executable, ROOT / "tools" / "report.py", folder], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # the largest so far: give the steps in order
        return {
            "metrics_mb": round((folder / "metrics.jsonl").stat().st_size / 2**20, 1),
            "page_mb": round((folder / "report.html").stat().st_size / 2**20, 2),
            "seconds": round(seconds, 2),
            "peak_mb": round(peak / 1024),
            "resume_s": round(resume_seconds(folder, steps), 3),
        }


def resume_seconds(folder: Path, steps: int) -> float:
    """Return the time in which a run that resumes from its last steps has cut its files and read its losses."""
    sys.path.insert(0, str(ROOT))
    from contextlib import closing

    from megatron_ext.config import LoggingConfig
    from megatron_ext.monitoring.metrics import MetricsWriter
    from megatron_ext.run.validation import read_losses

    began = time.perf_counter()
    quiet = LoggingConfig(tensorboard=False)
    with closing(MetricsWriter(folder, resume_step=steps - 1000, logging=quiet, config={})):
        read_losses(folder, steps - 1000, "")
    return time.perf_counter() - began


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[8000, 500_000])
    options = parser.parse_args()
    records = Records("report", options.output)
    for steps in sorted(options.steps):
        records.measure(partial(measure, steps), steps=steps)
    sys.exit(records.failed > 0)


if __name__ == "__main__":
    main()
