"""Check what a GPU machine has, and that training there gives the losses of another machine.

python benchmarks/checks.py machine             the GPU, the environment, a Transformer Engine layer, FlashAttention 4
python benchmarks/checks.py losses RUN_A RUN_B  the largest difference of the losses of two runs
python benchmarks/checks.py hang FOLDER         what the watchdog of a rank writes when the other one is stopped
"""

import contextlib
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention import Case, borders, errors
from clock import CUDA, DEVICE
from record import ROOT, Records, parser_of
from soak import Job, inject

from megatron_ext.engine.platform import compiler, python_header
from megatron_ext.files.jsonl import read_jsonl

QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"
TOLERANCE = 2e-2  # relative, two different bfloat16 kernels over a few dozen steps


def machine(records: Records) -> None:
    """Record the GPU, what tools/environment.py prints, and the errors of one layer and of one attention call."""
    records.add(case="nvidia-smi", text=output_of("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"))
    environment = output_of(sys.executable, str(ROOT / "tools" / "environment.py"), "--bf16")
    records.add(case="environment", text=environment.splitlines())
    records.add(case="C compiler", path=compiler(), ok=compiler() is not None)
    records.add(case="Python.h", path=str(python_header()), exists=python_header().is_file())
    for case, work in {"transformer_engine.Linear": transformer_engine, "flash_attn_4": flash_attn_4}.items():
        if CUDA:
            records.measure(work, case=case)
        else:
            records.add(case=case, skipped="needs a GPU")


def output_of(*command: str) -> str:
    """Return what a command prints, or why it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def transformer_engine() -> dict[str, Any]:
    """Return the relative error of a layer's output and gradient against a product in float32."""
    from transformer_engine.pytorch import Linear

    layer = Linear(256, 512, bias=False, params_dtype=torch.bfloat16)
    hidden = torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    out = layer(hidden)
    (gradient,) = torch.autograd.grad(out.sum(), hidden)
    weight = layer.weight.detach().float()
    exact = hidden.detach().float() @ weight.T, weight.sum(dim=0).expand(128, -1)
    pairs = zip((out.float(), gradient), exact, strict=True)
    error = max(((actual - want).norm() / want.norm()).item() for actual, want in pairs)
    return {"relative_error": error, "ok": error < 0.02}


def flash_attn_4() -> dict[str, Any]:
    """Return the error of a first call with three segments, and its time: short if its kernels were compiled before."""
    lengths = [5, 300, 95]
    case = Case("three segments", borders(np.array(lengths)), borders(np.array(lengths)))
    began = time.monotonic()
    facts = errors("flash_attn_4", case)
    return facts | {"seconds": time.monotonic() - began}


def losses(run_a: Path, run_b: Path) -> dict[str, Any]:
    """Return the largest relative difference of the losses of two runs of one configuration."""
    first, second = ([record["lm_loss"] for record in read_jsonl(run / "metrics.jsonl")] for run in (run_a, run_b))
    error = max(abs(a - b) / a for a, b in zip(first, second, strict=True))
    facts = {"steps": len(first), "worst_relative_difference": error, "final_losses": [first[-1], second[-1]]}
    return facts | {"ok": error <= TOLERANCE}


def hang(folder: Path) -> dict[str, Any]:
    """Stop one of two ranks, and count the collectives in the dump that the other one's watchdog leaves."""
    job = Job(folder, flags=("--bf16",))
    job.start()
    try:
        job.wait_for_checkpoint()
        status = inject(job, "stop", 1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            job.kill()
    stacks = job.run / "stacks"
    facts: dict[str, Any] = {"status": status, "stacks": (stacks / "rank0.txt").exists()}
    if not CUDA:
        return facts | {"collectives": "needs NCCL", "ok": facts["stacks"]}
    dump = pickle.loads((stacks / "nccl_0").read_bytes())
    unfinished = [entry["profiling_name"] for entry in dump["entries"] if entry["state"] != "completed"]
    facts |= {"collectives": len(dump["entries"]), "unfinished": ", ".join(unfinished)}
    return facts | {"ok": facts["stacks"] and facts["collectives"] > 0}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("machine", "losses", "hang"))
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--case", default="training", help="losses: name of the comparison")
    parser.add_argument("--part", default="correct", help="losses: part of its record")
    options = parser.parse_args()
    part = {"machine": "machine", "losses": options.part, "hang": "two"}[options.what]
    records = Records(part, options.output)
    if options.what == "machine":
        machine(records)
    elif options.what == "losses":
        records.measure(lambda: losses(*options.runs), case=options.case)
    else:
        records.measure(lambda: hang(*options.runs), case="hang")
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
