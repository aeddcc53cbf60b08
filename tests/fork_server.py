"""The program that the ranks of a job are forked from, so that none of them imports torch and Megatron again.

There is one such server for each rank, started by launcher.py: the processes of a job then order their sets of strings
differently, as real ones do. A line of stdin is a job; the answer is the process id of the child that does it. A child
is a process like any other: it can be killed or signalled, and what it changes in memory ends with it.

    {"argv": [...]} with "script"    the script's main(argv), or main()
    {"call": FILE}                   the pickled (function, arguments), called with the rank first
"""

import gc
import importlib.util
import inspect
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What a run imports when it gets there: a child's import is lost with it.
LATE = ["megatron_ext.run.stages", "megatron_ext.inference.model", "torch._dynamo", "torch.utils.tensorboard", "pytest"]


def main_of(script: str) -> Callable[..., Any]:
    sys.path.append(str((ROOT / script).parent))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main  # type: ignore[no-any-return]


def serve() -> None:
    """Fork a child for each line of stdin, which the children themselves do not see."""
    for module in LATE:
        importlib.import_module(module)
    logging.root.handlers.clear()  # Megatron may have logged something, and a script would not configure it again
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits: a child that ends is gone
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    mains: dict[str, Callable[..., Any]] = {}
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        script = job.get("script")
        if script and script not in mains and not script.startswith("tests/"):  # those may change what they import
            mains[script] = main_of(script)
        gc.collect()
        gc.freeze()  # or the first collection of every child copies each page of what was imported
        pid = os.fork()
        if not pid:
            do(job, mains.get(script))
        print(pid, file=answers, flush=True)


def do(job: dict[str, Any], main: Callable[..., Any] | None) -> None:
    """Do a job in this child and leave, with the exit status in `output`.status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.setsid()
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    output = job["output"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    native = os.open(f"{output}.native", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # of libraries: Gloo greets its peers
    os.dup2(native, 1)
    os.dup2(native, 2)
    sys.stdout = open(f"{output}.stdout", "w", buffering=1)  # noqa: SIM115
    sys.stderr = open(f"{output}.stderr", "w", buffering=1)  # noqa: SIM115
    status: Any = 1
    try:
        status = call(job) if "call" in job else command(job, main)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for child in multiprocessing.active_children():  # checkpoint writers, which would outlive os._exit
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        aside = Path(f"{output}.status.new")
        aside.write_text(f"{status or 0}\n")
        aside.rename(f"{output}.status")
        os._exit(int(status or 0) & 255)


def command(job: dict[str, Any], main: Callable[..., Any] | None) -> Any:
    """Call the script's main with the job's words, and return its exit status."""
    sys.argv[:] = [job["script"], *job["argv"]]
    main = main or main_of(job["script"])
    return main(job["argv"]) if inspect.signature(main).parameters else main()


def call(job: dict[str, Any]) -> int:
    """Call a function as one rank of a gloo group, and leave its pickled answer in `output`.answer."""
    import torch.distributed as dist

    sys.path += [folder for folder in job["path"] if folder not in sys.path]
    function, args = pickle.loads(Path(job["call"]).read_bytes())
    rank, world_size = (int(job["environment"][name]) for name in ("RANK", "WORLD_SIZE"))
    if job["group"]:
        timeout = timedelta(seconds=job["timeout_s"] + 60)  # the launcher's comes first
        store = f"file://{job['call']}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    answer = function(rank, *args)
    Path(f"{job['output']}.answer").write_bytes(pickle.dumps(answer))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    serve()
