"""FlashAttention 4 compiles for an H100 on a CPU, in all shapes that a run may ask for; values are not computed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.attention import adapters


@pytest.mark.slow
@pytest.mark.skipif(adapters.flash_attn_4_missing() is not None, reason="FlashAttention 4 is not installed")
@pytest.mark.parametrize("arch", ["90", "100"])
def test_it_compiles(tmp_path: Path, arch: str) -> None:
    """The kernel compiles for an H100 and a B200 in all cases that the benchmark compares on a GPU."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_flash_attn_4.py"), arch],
        env=os.environ | {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    chosen = dict(line.split("\t")[1:] for line in done.stdout.splitlines() if line.startswith("compiled:"))
    lacking = {"sliding window, head 256"} if arch == "100" else set()
    assert {name for name, backend in chosen.items() if backend != "flash_attn_4"} == lacking
    kernels = list(tmp_path.rglob("*.o"))
    assert {"fwd", "bwd_pre", "bwd", "bwd_post"} <= {kernel.parent.name for kernel in kernels}
    assert all(f"-arch sm_{arch}a".encode() in kernel.read_bytes() for kernel in kernels)
