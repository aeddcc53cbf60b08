"""Check what a GPU machine has, and that training there gives the losses of another machine.

python benchmarks/checks.py machine             the GPU, the environment, a Transformer Engine layer
python benchmarks/checks.py losses RUN_A RUN_B  the largest difference of the losses of two runs
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from clock import CUDA, DEVICE
from record import ROOT, Records, parser_of

from megatron_ext.monitoring.metrics import read_jsonl

QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"
TOLERANCE = 2e-2  # relative, two different bfloat16 kernels over a few dozen steps


def machine(records: Records) -> None:
    """Record the GPU, what tools/environment.py prints, and the error of a layer of Transformer Engine."""
    records.add(case="nvidia-smi", text=output_of("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"))
    environment = output_of(sys.executable, str(ROOT / "tools" / "environment.py"), "--bf16")
    records.add(case="environment", text=environment.splitlines())
    case = "transformer_engine.Linear"
    if CUDA:
        records.measure(transformer_engine, case=case)
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
    error = max(((got - want).norm() / want.norm()).item() for got, want in pairs)
    return {"relative_error": error, "ok": error < 0.02}


def losses(run_a: Path, run_b: Path) -> dict[str, Any]:
    """Return the largest relative difference of the losses of two runs of one configuration."""
    first, second = ([record["lm_loss"] for record in read_jsonl(run / "metrics.jsonl")] for run in (run_a, run_b))
    error = max(abs(a - b) / a for a, b in zip(first, second, strict=True))
    facts = {"steps": len(first), "worst_relative_difference": error, "final_losses": [first[-1], second[-1]]}
    return facts | {"ok": error <= TOLERANCE}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("machine", "losses"))
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    options = parser.parse_args()
    records = Records("machine" if options.what == "machine" else "correct", options.output)
    if options.what == "machine":
        machine(records)
    else:
        records.measure(lambda: losses(*options.runs), case="training")
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
