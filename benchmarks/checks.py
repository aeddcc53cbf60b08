"""Check what a GPU machine has, and that training there gives the losses of another machine.

python benchmarks/checks.py machine             the GPU, the environment, a Transformer Engine layer
python benchmarks/checks.py losses RUN_A RUN_B  the largest difference of the losses of two runs
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from record import CUDA, DEVICE, ROOT, Records, parser_of

from megatron_ext.monitoring import read_jsonl

QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"
TOLERANCE = 2e-2  # relative, two different bfloat16 kernels over a few dozen steps


def machine(records: Records) -> None:
    """Record the GPU, what tools/environment.py prints, and the error of a layer of Transformer Engine."""
    records.add(case="nvidia-smi", text=output_of("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"))
    environment = output_of(sys.executable, str(ROOT / "tools" / "environment.py"), "--bf16")
    records.add(case="environment", text=environment.splitlines())
    facts = {"case": "transformer_engine.Linear"}
    if not CUDA or find_spec("transformer_engine") is None:
        records.add(**facts, skipped="needs a GPU" if not CUDA else "transformer_engine is not installed")
        return
    try:
        apart = transformer_engine()
        records.add(**facts, relative_error=apart, ok=apart < 0.02)
    except Exception as error:  # a library without kernels for this GPU fails at the first call
        records.error(error, **facts)


def output_of(*command: str) -> str:
    """Return what a command prints, or why it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def transformer_engine() -> float:
    """Return the relative error of a layer's output and gradient against a product in float32."""
    from transformer_engine.pytorch import Linear

    layer = Linear(256, 512, bias=False, params_dtype=torch.bfloat16)
    hidden = torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    out = layer(hidden)
    (gradient,) = torch.autograd.grad(out.sum(), hidden)
    weight = layer.weight.detach().float()
    exact = hidden.detach().float() @ weight.T, weight.sum(dim=0).expand(128, -1)
    return max(
        ((got - want).norm() / want.norm()).item() for got, want in zip((out.float(), gradient), exact, strict=True)
    )


def losses(runs: list[Path], records: Records) -> None:
    """Record the largest relative difference of the losses of two runs of one configuration."""
    try:
        first, second = ([record["lm_loss"] for record in read_jsonl(run / "metrics.jsonl")] for run in runs)
        error = max(abs(a - b) / a for a, b in zip(first, second, strict=True))
    except (OSError, ValueError) as error:
        records.error(error, case="training")
        return
    facts = {"steps": len(first), "worst_relative_difference": error, "final_losses": [first[-1], second[-1]]}
    records.add(case="training", **facts, ok=error <= TOLERANCE)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("machine", "losses"))
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    options = parser.parse_args()
    records = Records("machine" if options.what == "machine" else "correct", options.output)
    if options.what == "machine":
        machine(records)
    else:
        losses(options.runs, records)
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
