"""Measure saving, resuming and converting checkpoints: python benchmarks/checkpoints.py [--only saving|resume|convert]

    saving    seconds that a checkpoint stalls training, plain and --async-save; 26M parameters with their moments; then
              the same bytes in a plain loop by torch.distributed.checkpoint's save and async_save, with its defaults
    resume    seconds to load that checkpoint under the layout that wrote it (DP 2) and under another (TP 2)
    convert   wall time and peak memory of Hugging Face -> Megatron -> Hugging Face; 80M parameters, 320 MB in fp32

Everything runs through the user commands, each in separate processes. Peak memory is that of the process (ru_maxrss),
minus that of converting a model of 0.1 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path.cwd()  # a checkout: this file also measures an older one
SIZES = "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --num-query-groups 8"
STEPS, INTERVAL = 24, 4
TIMED = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from megatron_ext.engine.state import Checkpointer
from pretrain_skyladder import main

load = Checkpointer.load

def timed(*arguments):
    began = time.perf_counter()
    found = load(*arguments)
    with open(os.environ["TIMES"], "a") as log:
        log.write(f"{time.perf_counter() - began}\\n")
    return found

Checkpointer.load = timed
sys.exit(main(sys.argv[1:]))
"""
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
MODEL = """
import json, sys
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[1]))).float().save_pretrained(sys.argv[2])
"""


def report(**values: object) -> None:
    """Print one JSON object."""
    print(json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in values.items()}), flush=True)


def call(*command: str, environment: dict[str, str] | None = None) -> tuple[float, float, float]:
    """Run a command; return its wall time, its CPU time (with its children's) and its peak memory in MiB."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        variables = {**os.environ, **(environment or {})}
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=variables, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        if status:
            output.seek(0)
            raise SystemExit(output.read()[-2000:])
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def train(
    folder: Path,
    steps: int,
    *flags: str,
    script: str = "pretrain_skyladder.py",
    environment: dict[str, str] | None = None,
) -> None:
    """Train the model on two processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    data = f"--train-iters {steps} --seq-length 512 --micro-batch-size 1 --global-batch-size 2 --lr-decay-iters {STEPS}"
    model = ["--config", "examples/configs/cpu_smoke.yaml", *SIZES.split(), *data.split()]
    saving = ["--use-distributed-optimizer", "--save", str(folder)]
    call(*launcher, *model, *saving, *flags, environment=environment)


def saving(folder: Path) -> None:
    """Report the stall of each way of saving, without the last checkpoint and the first, which allocates buffers."""
    size, step_s = 0, 0.0
    for name, flags in (("plain", []), ("async", ["--async-save"])):
        run = folder / name
        train(run, STEPS, "--save-interval", str(INTERVAL), *flags)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        manifests = [json.loads(path.read_bytes()) for path in sorted(run.glob("checkpoints/iter_*/manifest.json"))]
        stalls = [record["save_stall_s"] for record in records if record["step"] > INTERVAL]
        size = sum(facts["size"] for facts in manifests[0]["files"].values())
        step_s = statistics.median(record["step_time_s"] for record in records)
        written_s = statistics.median(manifest["seconds"] for manifest in manifests[1:-1])
        stall_s = sum(stalls) / len(manifests[1:-1])
        report(saving=name, bytes=size, step_s=step_s, written_s=written_s, stall_s=stall_s)
    for name in ("save", "async_save"):
        call("-c", DCP, name, str(folder / name), str(size // 2), str(INTERVAL * step_s), str(folder / f"{name}.json"))
        report(saving=f"torch's {name}", **json.loads((folder / f"{name}.json").read_text()))


def resume(folder: Path) -> None:
    """Report how long `Checkpointer.load` takes in the slower process: the median of three."""
    train(folder / "run", 1, "--save-interval", "1")
    (folder / "timed.py").write_text(TIMED)
    for layout, flags in (("same", []), ("tensor parallel", ["--tensor-model-parallel-size", "2"])):
        slowest = []
        for number in range(3):
            log, other = folder / f"{layout}{number}", folder / f"run {layout}{number}"
            load = ["--load", str(folder / "run"), "--save-interval", "0", *flags]
            train(other, 2, *load, script=str(folder / "timed.py"), environment={"TIMES": str(log)})
            slowest.append(max(map(float, log.read_text().split())))
        report(resume=layout, load_s=statistics.median(slowest))


def convert(folder: Path) -> None:
    """Report the time and memory of each direction."""
    empty: dict[str, float] = {}
    for size, (layers, width) in {"empty": (1, 8), "320 MB": (12, 640)}.items():
        here = folder / size.replace(" ", "_")
        sizes = {
            "vocab_size": 32 if layers == 1 else 16384,
            "hidden_size": width,
            "intermediate_size": width * 3,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 8,
            "max_position_embeddings": 512,
        }
        # in a separate process: a child's peak starts at its parent's memory
        call("-c", MODEL, json.dumps(sizes), str(here / "hf"))
        tool, run, back = "tools/convert_checkpoint.py", here / "run", here / "back"
        for way, options in (
            ("hf-to-megatron", [str(here / "hf"), "--output", str(run)]),
            ("megatron-to-hf", [str(run), "--output", str(back), "--tokenizer", "none"]),
        ):
            wall, cpu, peak = call(tool, way, "--input", *options)
            empty.setdefault(way, peak)
            if layers > 1:
                size_mb = sum(file.stat().st_size for file in (here / "hf").glob("*.safetensors")) / 1e6
                report(convert=way, mb=size_mb, wall_s=wall, cpu_s=cpu, growth_of_peak_mib=peak - empty[way])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("saving", "resume", "convert"))
    options = parser.parse_args()
    for part in (saving, resume, convert):
        if options.only in (None, part.__name__):
            with tempfile.TemporaryDirectory() as folder:
                part(Path(folder))


if __name__ == "__main__":
    main()
