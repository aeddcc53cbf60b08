"""Record the GPU, the environment, and a Transformer Engine layer: python benchmarks/machine.py [--output FILE]"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from record import CUDA, DEVICE, Records, add_output

QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"


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


def output_of(command: list[str]) -> str:
    """Return what a command prints, or why it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_output(parser)
    records = Records("machine", parser.parse_args().output)
    records.add(case="nvidia-smi", text=output_of(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]))
    environment = Path(__file__).parents[1] / "tools" / "environment.py"
    records.add(case="environment", text=output_of([sys.executable, str(environment), "--bf16"]).splitlines())
    facts = {"case": "transformer_engine.Linear"}
    if not CUDA or find_spec("transformer_engine") is None:
        records.add(**facts, skipped="needs a GPU" if not CUDA else "transformer_engine is not installed")
        return 0
    try:
        apart = transformer_engine()
        records.add(**facts, relative_error=apart, ok=apart < 0.02)
    except Exception as error:  # a library without kernels for this GPU fails at the first call
        records.error(error, **facts)
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
