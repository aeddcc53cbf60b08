"""Rehearse one rank in a process of its own, which isolates the patches and mocks, and describe the result.

`in_process` starts python -m megatron_ext.rehearsal.process REQUEST FILE: JSON, and the file for the result.
"""

import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.files.fingerprint import fingerprint

GIB = 2**30
MOCK = Path(__file__).with_name("cuda_mock.cpp")
SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Request:
    """Describes the rehearsal of one rank under the windows, with the training flags `argv`."""

    argv: list[str]
    world_size: int
    rank: int
    windows: list[int]
    documents: str | None  # as for `rows.rows_of`
    fake: bool = True  # use fake CUDA tensors without memory; otherwise real tensors on this machine's CPU


def in_process(request: Request) -> dict[str, Any]:
    """Rehearse a rank and return the result, as `rank.Rehearsed` in plain types.

    Raises:
        UserError: this machine cannot rehearse, or the configuration cannot be run.
    """
    with tempfile.NamedTemporaryFile() as result:
        command = [sys.executable, "-m", "megatron_ext.rehearsal.process", json.dumps(asdict(request)), result.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 2:
            raise UserError(done.stderr.strip().splitlines()[-1])
        if done.returncode != 0:
            raise RuntimeError(f"rank {request.rank} died with status {done.returncode}:\n{done.stderr[-4000:]}")
        return dict(json.load(result))


def describe(rehearsed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one rank, from `rank.Rehearsed` in plain types."""
    yield f"rank {rehearsed['rank']}: {rehearsed['place']}; rows: {rehearsed['rows']}"
    yield from _fault(rehearsed["fault"], "the model cannot be built")
    for step in rehearsed["steps"]:
        yield ""
        yield (
            f"  window {step['window']:,}: {step['microbatches']} micro-batches, {step['measured']} of them run with "
            f"{step['segments']:,} segments"
        )
        yield from _fault(step["fault"], "the step fails")
        yield f"    peak memory    {sum(step['memory'].values()) / GIB:8.2f} GiB at {step['peak_at']}"
        for part, size in step["memory"].items():
            yield f"      {part:<12} {size / GIB:8.2f} GiB"
        if step["pinned"] >= 2**20:
            yield f"    pinned memory  {step['pinned'] / GIB:8.2f} GiB of the host"
        if step["cycles"]:
            yield f"    reference cycles kept {step['cycles'] / GIB:.2f} GiB until the step's end"
        flops = step["flops"]
        total = sum(flops.values())
        attention = sum(count for name, count in flops.items() if "attn" in name or "attention" in name)
        yield f"    FLOPs          {total:.3e}, of which attention {attention:.3e} ({attention / max(total, 1):.0%})"
        for group, calls in sorted(step["collectives"].items()):
            yield f"    sent over {group:<8} {calls['sent_bytes'] / GIB:8.3f} GiB in {calls['count']} collectives"
        yield f"    host syncs     {sum(step['host_syncs'].values())}"
        for what, count in step["host_syncs"].items():
            yield f"      {count:>4} x {what}"


def _fault(fault: Mapping[str, Any] | None, what: str) -> Iterator[str]:
    if fault is not None:
        yield f"  FAULT: {what}, at {fault['line'] or 'no line of this package'}: {fault['error']}"


def load_mock() -> None:
    """Load a mock of CUDA: torch then has a CUDA device without memory.

    A process calls this once, before it imports torch, which looks for CUDA. The built mock is kept in the user's cache
    folder, named by torch's version and a hash of the mock's source and torch's folder.

    Raises:
        UserError: an unsupported torch, no C++ compiler, or one that cannot build the mock.
    """
    assert "torch" not in sys.modules, "torch has already looked for CUDA"
    torch = distribution("torch")
    folder = Path(str(torch.locate_file("torch")))
    version = torch.version
    if not version.startswith(tuple(f"{release}." for release in SUPPORTED)):
        raise UserError(f"torch: got {version}, a rehearsal needs {SUPPORTED[0]} to {SUPPORTED[-1]}; pip install one")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_ext"
    tag = f"{sys.implementation.cache_tag}-{fingerprint(MOCK, str(folder))[:16]}"
    library = cache / f"cuda_mock-torch-{version}-{tag}.so"
    if not library.exists():
        _build(library, folder)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _build(target: Path, torch: Path) -> None:
    named = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, (named,) if named else COMPILERS)), None)
    if compiler is None:
        wanted = f"CXX={named}" if named else " or ".join(COMPILERS)
        raise UserError(f"compiler: found no {wanted}, a rehearsal builds one C++ file; install g++, or set CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as aside:  # two rehearsals may build at once
        command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}", str(MOCK)]
        command += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(aside)]
        if (torch / "lib" / "libtorch_cuda.so").exists():  # loaded before the mock, which replaces its hooks and guard
            command += ["-Wl,--no-as-needed", "-ltorch_cuda"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            wrong = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
            raise UserError(f"compiler: {compiler} cannot build {MOCK.name}: {wrong}; install g++ 11 or newer")


def run(request: Request, result_file: str) -> None:
    """Rehearse the request and write the result as JSON."""
    os.environ.update(RANK=str(request.rank), WORLD_SIZE=str(request.world_size), LOCAL_RANK="0")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rehearsal is the same with and without a GPU
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "1")  # mocked processes do not connect
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    if request.fake:
        from megatron_ext.rehearsal import cuda_mock

        cuda_mock.install()
    from megatron_ext.config.arguments import parse
    from megatron_ext.rehearsal.rank import rehearse  # after the mock: Megatron imports patched functions by name

    # Megatron's local layers have no grouped matrix products
    config = parse([*request.argv, "--no-moe-grouped-gemm"])
    rehearsed = rehearse(config, request.windows, request.documents, fake=request.fake)
    Path(result_file).write_text(json.dumps(asdict(rehearsed)), encoding="utf-8")


def main(request_json: str, result_file: str) -> int:
    request = Request(**json.loads(request_json))
    try:
        if request.fake:
            load_mock()
        run(request, result_file)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
