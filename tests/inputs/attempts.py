"""Run the wrong inputs on a checkout: each in a child process with limits, from another folder.

    python tests/inputs/attempts.py ROOT WORLD ANSWERS [NAMES]

ROOT is the checkout; WORLD the valid files (world.py), made by that checkout if missing; ANSWERS gets a line of JSON
for each row. NAMES is a JSON file with the rows to run (default: all).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import inspect
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 60  # seconds per row
MEMORY = 6 * 2**30  # bytes that a row may allocate
LATE = ["megatron_ext.run.stages", "megatron_ext.run.scoring", "megatron_ext.run.rehearsal.rows", "torch._dynamo"]
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(root: Path, world: Path, answers: Path, names: Path | None) -> None:
    """Run the rows and write the result of each."""
    sys.path[:0] = [str(root)]
    for module in LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    from inputs.table import all_inputs
    from inputs.world import make, prepare

    wanted = None if names is None else set(json.loads(names.read_text()))
    mains: dict[str, Callable[..., Any]] = {}
    busy = socket.socket()
    busy.bind(("", 0))
    busy.listen()
    gc.collect()
    gc.freeze()  # or the first collection of every child copies each page of what was imported
    with answers.open("w") as file, tempfile.TemporaryDirectory(prefix="inputs-") as temporary:

        def tool(script: str, *words: object) -> None:
            own = Path(temporary) / "tool"
            own.mkdir(exist_ok=True)
            answer = attempt(own, root / script, main_of(root, script), [str(word) for word in words], {})
            assert answer["status"] == 0, answer["stderr"]

        if not world.exists():
            make(world, tool)
        for number, wrong in enumerate(all_inputs()):
            if (wanted is not None and wrong.name not in wanted) or not (root / wrong.script).exists():
                continue  # an older version has not every tool
            if wrong.script not in mains:
                mains[wrong.script] = main_of(root, wrong.script)
            own = Path(temporary) / str(number)
            prepare(own / "in", world / wrong.good if wrong.good else None, wrong.changes)
            (own / "out").mkdir()
            places = {"{w}": str(world), "{in}": str(own / "in"), "{out}": str(own / "out")}
            words = [_placed(word, places) for word in wrong.words]
            environment = {
                name: value.replace("{busy}", str(busy.getsockname()[1])) for name, value in wrong.environment.items()
            }
            answer = attempt(own, root / wrong.script, mains[wrong.script], words, environment)
            answer["written"] = [
                str(path.relative_to(own / "out")) for path in sorted((own / "out").rglob("*")) if path.is_file()
            ]
            file.write(json.dumps({"name": wrong.name} | answer) + "\n")
            file.flush()
            shutil.rmtree(own, ignore_errors=True)


def _placed(word: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        word = word.replace(name, place)
    return word


def main_of(root: Path, script: str) -> Callable[..., Any]:
    """Import the script's main(), under the script's own name."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, root / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main  # type: ignore[no-any-return]


def attempt(
    own: Path, script: Path, main: Callable[..., Any], words: list[str], environment: dict[str, str]
) -> dict[str, Any]:
    """Run a command in a child; return its exit status (None: killed at the limit), output and seconds."""
    gc.collect()
    gc.freeze()  # what was imported since
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        _do(own, script, main, words, environment)
    status = None
    while time.monotonic() - began < LIMIT_S:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # its own children too
    if status is None:
        os.waitpid(pid, 0)
    output = {name: (own / name).read_text(errors="replace") for name in ("stdout", "stderr")}
    return {"status": status, "seconds": round(time.monotonic() - began, 2), **output}


def _do(own: Path, script: Path, main: Callable[..., Any], words: list[str], environment: dict[str, str]) -> None:
    os.setsid()
    os.chdir(own)  # no command may need the repository's folder
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(environment)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(own / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv[:] = [str(script), *words]
    status: Any = 1
    try:
        status = main(words) if inspect.signature(main).parameters else main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(int(status or 0) & 255)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    main(*map(Path, sys.argv[1:4]), Path(sys.argv[4]) if len(sys.argv) > 4 else None)
