"""Print registers, spills, shared memory and blocks per SM of `triton_packed`'s kernels, compiled for an H100 on a CPU.

    python benchmarks/occupancy.py [HEAD_SIZE ...] [--output FILE]

Triton and the ptxas that it brings compile for sm_90a without a GPU. Blocks per SM is what registers (65,536), shared
memory (228 KiB, of which each block reserves 1) and warps (64) allow.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported

import triton
from record import Records, parser_of
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from megatron_ext.attention import triton_kernels, triton_packed

KERNELS = ("forward", "backward_query", "backward_key")
POINTERS = dict.fromkeys(("lse", "delta"), "*fp32") | dict.fromkeys(("scale", "scale_grad"), "fp32")
POINTERS |= dict.fromkeys(("low", "high", "first_query", "end_query", "full_query", "full_end_query"), "*i32")


def compiled(name: str, head_size: int, share: int = 4, groups: int = 8) -> dict[str, Any]:
    """Compile one kernel for `groups` key heads of `share` query heads each, and return its figures."""
    kernel, tile = getattr(triton_kernels, name), getattr(triton_packed.tiles(head_size), name)
    names = kernel.arg_names
    constants = {"N": groups * share, "G": groups, **triton_packed._constants(tile, share, head_size)}
    options = {option: constants.pop(option) for option in ("num_warps", "num_stages")}
    constants = {name: value for name, value in constants.items() if name in names}
    strides = [argument for argument in names if argument.endswith(("_row", "_head"))]

    def type_of(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        return "i32" if argument in ("t", "u", *strides) else POINTERS.get(argument, "*bf16")

    types = {argument: type_of(argument) for argument in names}
    aligned = [argument for argument in names if types[argument].startswith("*") or argument in strides]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(argument),): value for argument, value in constants.items()},
        attrs={(names.index(argument),): [["tt.divisibility", 16]] for argument in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(made.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", ptx, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (int(re.findall(rf"(\d+) {what}", log)[0]) for what in ("registers", "bytes spill stores"))
    shared, warps = made.metadata.shared, tile.warps
    per_warp = -(-registers * 32 // 256) * 256
    blocks = min(65536 // (per_warp * warps), 228 * 1024 // (shared + 1024), 64 // warps)
    return {
        "kernel": name,
        "head_size": head_size,
        "tile": f"{tile.queries}x{tile.keys}",
        "warps": warps,
        "stages": tile.stages,
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "blocks_per_sm": blocks,
        "tensor_cores": "wgmma" in made.asm["ptx"],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("head_sizes", nargs="*", type=int, default=[64, 80, 96, 128, 256], metavar="HEAD_SIZE")
    options = parser.parse_args()
    records = Records("kernels", options.output)
    for size in options.head_sizes:
        for name in KERNELS:
            records.add(**compiled(name, size))


if __name__ == "__main__":
    main()
