"""Build the mock of CUDA's hooks once and load it before torch is imported, because torch looks for CUDA on import.

The library is cached in the user's cache folder, by torch's version and the hash of its source.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write

SOURCE = Path(__file__).with_name("cuda_mock.cpp")
SUPPORTED = ("2.11", "2.12", "2.13")
COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 300


def load() -> None:
    """Give torch a CUDA device without memory; call once per process, before torch is imported.

    Raises:
        UserError: an unsupported torch, a CUDA build of torch, no C++ compiler, or one that cannot build the mock.
    """
    assert "torch" not in sys.modules, "torch has already looked for CUDA"
    torch = distribution("torch")
    folder, found = Path(str(torch.locate_file("torch"))), torch.version
    if not found.startswith(tuple(f"{release}." for release in SUPPORTED)):
        raise UserError(f"torch: got {found}, a rehearsal needs {SUPPORTED[0]} to {SUPPORTED[-1]}; pip install one")
    if any((folder / "lib").glob("libtorch_cuda*")):  # only one guard and one set of hooks can be registered
        raise UserError(
            "torch: got a build for CUDA, a rehearsal needs one for the CPU; in a virtual environment of its own, "
            "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
        )
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_ext"
    library = cache / f"cuda_mock-torch-{found}-{sys.implementation.cache_tag}-{digest}.so"
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
    with atomic_write(target) as made:  # two rehearsals may build at once
        command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}", str(SOURCE)]
        command += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        if done.returncode != 0:
            wrong = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
            raise UserError(f"compiler: {compiler} cannot build {SOURCE.name}: {wrong}; install g++ 11 or newer")
