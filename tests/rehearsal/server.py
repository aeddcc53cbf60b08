"""Rehearsals in children of one process, which has imported torch, the mock of CUDA and Megatron once for all."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from megatron_ext.rehearsal.process import Request, load_mock, run


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, __file__]  # it ends when this process does, and its stdin with it
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def in_child(request: Request) -> dict[str, Any]:
    """Return what `process.in_process` does.

    Raises:
        RuntimeError: the child failed; the message has its traceback.
    """
    with tempfile.NamedTemporaryFile() as result_file:
        pipes = _server()
        print(json.dumps([asdict(request), result_file.name]), file=pipes.stdin, flush=True)
        if error := json.loads(pipes.stdout.readline()):
            raise RuntimeError(error)
        return dict(json.load(result_file))


def serve() -> None:
    load_mock()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_ext.rehearsal import cuda_mock

    cuda_mock.install()
    cuda_mock.install = lambda: None  # once for all
    import megatron_ext.rehearsal.rank  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request, file = json.loads(line)
        if not (child := os.fork()):
            error = ""
            try:
                run(Request(**request), file)
            except BaseException:
                error = traceback.format_exc()[-4000:]
            print(json.dumps(error), file=answers, flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(json.dumps("the child was killed"), file=answers, flush=True)


if __name__ == "__main__":
    serve()
