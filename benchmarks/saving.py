"""How long saving holds up training, --async-save beside the plain one: python benchmarks/saving.py [--processes N]

Runs of `pretrain_skyladder.py` that save every fourth step: a model of about 26M parameters, whose checkpoint has its
weights and Adam's moments. "stall_s" is what metrics.jsonl says of each checkpoint in a run's middle: the first one
makes the buffers, the last one is waited for. "written_s" is how long writing one took, as their manifests say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --num-query-groups 8"
STEPS, INTERVAL = 24, 4
ROWS = f"--train-iters {STEPS} --save-interval {INTERVAL} --seq-length 512 --micro-batch-size 1"


def run(folder: Path, processes: int, flags: list[str]) -> dict[str, float]:
    """Train, and read what its metrics and manifests say."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [
        *launcher,
        "pretrain_skyladder.py",
        "--config",
        "examples/configs/cpu_smoke.yaml",
        *SIZES.split(),
        *ROWS.split(),
    ]
    command += ["--use-distributed-optimizer", "--global-batch-size", "2", "--save", str(folder), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    manifests = [json.loads(path.read_bytes()) for path in sorted(folder.glob("checkpoints/iter_*/manifest.json"))]
    saving = [record["save_stall_s"] for record in records if record["step"] > INTERVAL]
    return {
        "bytes": sum(facts["size"] for facts in manifests[0]["files"].values()),
        "step_s": round(statistics.median(record["step_time_s"] for record in records), 3),
        "written_s": round(statistics.median(manifest["seconds"] for manifest in manifests[1:-1]), 3),
        "stall_s": round(sum(saving) / len(manifests[1:-1]), 3),
    }


def main() -> None:
    """Print one JSON object per kind of saving, and the ratio of the stalls."""
    parser = argparse.ArgumentParser(description="Seconds that a checkpoint holds up training.")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    stalls = []
    for name, flags in (("plain", []), ("async", ["--async-save"])):
        with tempfile.TemporaryDirectory() as folder:
            found = run(Path(folder) / "run", options.processes, flags)
        stalls.append(found["stall_s"])
        print(json.dumps({"saving": name, "processes": options.processes, **found}), flush=True)
    print(json.dumps({"saving": "ratio", "stall": round(stalls[1] / stalls[0], 3)}))


if __name__ == "__main__":
    main()
