"""Measure for how many seconds a checkpoint stops training: python benchmarks/checkpoints.py

Two processes train 26M parameters and save them with their moments, plain and with --async-save; then a plain loop
saves the same bytes by torch.distributed.checkpoint's save and async_save, with its defaults.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Records, parser_of

ROOT = Path.cwd()  # a checkout: this file also measures an older one
SIZES = "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --num-query-groups 8"
STEPS = 24
INTERVAL = 4
DCP = """
import json, statistics, sys, time
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp

name, folder, size, between, log = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
dist.init_process_group("gloo", init_method=f"file://{folder}.meet", rank=0, world_size=1)
state = {str(n): torch.ones(size // 4 // 100) for n in range(100)}
stalls, running = [], None
for number in range(6):
    until = time.perf_counter() + between
    while time.perf_counter() < until:
        state["0"].add_(1)
    began = time.perf_counter()
    if running is not None:
        running.result()
    done = getattr(dcp, name)(state, checkpoint_id=f"{folder}/{number}")
    running = done if name == "async_save" else None
    stalls.append(time.perf_counter() - began)
if running is not None:
    running.result()
open(log, "w").write(json.dumps({"bytes": size, "stall_s": statistics.median(stalls[1:-1])}))
"""


def call(*command: str) -> None:
    """Run a Python command; print the end of its output if it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit((done.stdout + done.stderr)[-2000:])


def train(folder: Path, *flags: str) -> None:
    """Train the model on two processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_skyladder.py"]
    data = f"--train-iters {STEPS} --seq-length 512 --micro-batch-size 1 --global-batch-size 2 --lr-decay-iters {STEPS}"
    model = ["--config", "examples/configs/cpu_smoke.yaml", *SIZES.split(), *data.split()]
    call(*launcher, *model, "--use-distributed-optimizer", "--save", str(folder), *flags)


def saving(folder: Path, records: Records) -> None:
    """Record the stall of each way of saving, without the last checkpoint and the first, which allocates buffers."""
    size = 0
    step_s = 0.0
    for name, flags in (("plain", []), ("async", ["--async-save"])):
        run = folder / name
        train(run, "--save-interval", str(INTERVAL), *flags)
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        manifests = [json.loads(path.read_bytes()) for path in sorted(run.glob("checkpoints/iter_*/manifest.json"))]
        stalls = [step["save_stall_s"] for step in steps if step["step"] > INTERVAL]
        size = sum(facts["size"] for facts in manifests[0]["files"].values())
        step_s = statistics.median(step["step_time_s"] for step in steps)
        written_s = statistics.median(manifest["seconds"] for manifest in manifests[1:-1])
        stall_s = sum(stalls) / len(manifests[1:-1])
        records.add(saving=name, bytes=size, step_s=step_s, written_s=written_s, stall_s=stall_s)
    for name in ("save", "async_save"):
        call("-c", DCP, name, str(folder / name), str(size // 2), str(INTERVAL * step_s), str(folder / f"{name}.json"))
        records.add(saving=f"torch's {name}", **json.loads((folder / f"{name}.json").read_text()))


def main() -> None:
    records = Records("checkpoints", parser_of(__doc__).parse_args().output)
    with tempfile.TemporaryDirectory() as folder:
        saving(Path(folder), records)


if __name__ == "__main__":
    main()
