"""Run a function of this file in a process with the mock of CUDA: python mocked.py FUNCTION; it prints JSON."""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

TINY = (
    "--vocab-size 1000 --data-path nowhere --hidden-size 64 --ffn-hidden-size 192 --num-layers 2 "
    "--num-attention-heads 4 --num-query-groups 2 --seq-length 256 --global-batch-size 2 "
    "--loss-block-tokens 64 --train-iters 10 --bf16"
)


def mocked(function: str, *words: str) -> Any:
    """Return what the function of this file returns in a process of its own."""
    command = [sys.executable, __file__, function, *words]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def waits() -> Any:
    """Plant waits of the host on known lines of this package's own code, and count collectives' bytes.

    Also list the operators that a CPU-only torch composes though CUDA has a kernel for them.
    """
    import torch
    import torch.distributed as dist

    from megatron_ext.rehearsal.meter import Meter

    dist.init_process_group()
    row = dist.new_group([0, 1])
    meter = Meter("cuda", (2, 1, 2, 1))
    planted = compile(PLANTED, str(os.path.join(os.getcwd(), "megatron_ext", "planted.py")), "exec")
    names: dict[str, Any] = {"torch": torch}
    exec(planted, names)
    with meter:
        x = torch.ones(8, device="cuda")
        for name in ("item", "branch", "lists", "shape", "host", "quiet"):
            names[name](x)
        host_syncs = sorted(meter.host_syncs.items())
        copied = torch.tensor([3, 5]).to("cuda", non_blocking=True)
        values = [copied[1].item(), (copied + 1).tolist()]
        dist.all_reduce(x)
        dist.all_reduce(x[:4], group=row)
        dist.all_gather_into_tensor(torch.empty(16, device="cuda"), x, group=row)
        dist.reduce_scatter_tensor(torch.empty(4, device="cuda"), x, group=row)
        dist.all_to_all_single(torch.empty(7, device="cuda"), x[:6], [3, 4], [2, 4], group=row)
    calls = {name: [call["count"], call["sent_bytes"]] for name, call in meter.collectives.items()}
    return {"waits": host_syncs, "values": values, "collectives": calls, "composed": composed()}


PLANTED = """
def item(x):
    return x.sum().item()
def branch(x):
    return bool((x > 0).all())
def lists(x):
    return x.tolist()
def shape(x):
    return len(x.nonzero())
def host(x):
    return x.cpu() is None
def quiet(x):
    x[x > 0] = 1.0
    y = torch.where(x > 0, x, 0.0).cumsum(0).to(torch.bfloat16)
    return len(y)
"""


def composed() -> Any:
    """List the operators that a CPU-only torch composes on CUDA though CUDA has a kernel of its own for them."""
    from importlib.util import find_spec

    import torch
    import yaml

    folder = Path(str(find_spec("torchgen").origin)).parent  # type: ignore[union-attr]
    functions = yaml.safe_load((folder / "packaged/ATen/native/native_functions.yaml").read_text())
    keys = {
        entry["func"].split("(")[0]: {key.strip() for names in entry.get("dispatch", {}) for key in names.split(",")}
        for entry in functions
    }
    delegates = {entry["func"].split("(")[0]: entry.get("structured_delegate") for entry in functions}
    on_cuda = {
        name for name, kernel_keys in keys.items() if "CUDA" in kernel_keys | keys.get(delegates[name] or "", set())
    }
    composite = {name for name, kernel_keys in keys.items() if "CompositeImplicitAutograd" in kernel_keys}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in sorted(on_cuda & composite) if not has(f"aten::{name}", "CUDA")]


def fault() -> Any:
    """Leave the rotary angles on the CPU, as a forgotten .to(device) would; return the step's fault."""
    from megatron_ext import rope
    from megatron_ext.rehearsal.process import Request, run

    angles = rope.angles
    rope.angles = lambda *args: angles(*args).cpu()
    with tempfile.NamedTemporaryFile() as result_file:
        run(Request(TINY.split(), 1, 0, [64], "drawn"), result_file.name)
        return json.load(result_file)["steps"][0]["fault"]


if __name__ == "__main__":
    from megatron_ext.rehearsal.process import load_mock

    load_mock()
    warnings.simplefilter("ignore")
    if sys.argv[1] == "fault":
        print(json.dumps(fault()))
        sys.exit()
    from megatron_ext.rehearsal import cuda_mock

    os.environ.update(RANK="0", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    cuda_mock.install()
    print(json.dumps(waits()))
