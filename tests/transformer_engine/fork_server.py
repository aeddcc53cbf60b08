"""The program of tests/fork_server.py with Transformer Engine, on an emulated CUDA machine or with `cpu` without CUDA.

TRANSFORMER_ENGINE is a folder of `make build/transformer_engine/VERSION`.
"""

import functools
import os
import sys
import warnings
from pathlib import Path

import torch

from tests import fork_server
from tests.transformer_engine import cuda, extension


def import_transformer_engine(folder: Path, *, emulated: bool) -> None:
    """Import it without its shared libraries, with our module in place of the one that it would load."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path[:0] = [str(folder), str(Path(__file__).parent / "packages")]
    if emulated:
        cuda.install()
    extension.install(folder, emulated=emulated)
    with warnings.catch_warnings(action="ignore"):
        import transformer_engine.common  # it finds no library for torch, and goes on
    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch


def prepare_project() -> None:
    """Apply what the project does for gloo and for torch without Triton, which it decides by asking for CUDA."""
    from megatron_ext import loss
    from megatron_ext.engine import compat

    loss.cross_entropy = functools.partial(loss.cross_entropy, fused=False)
    compat.install_gloo()


if __name__ == "__main__":
    torch.set_num_threads(1)
    on_cuda = sys.argv[1:] != ["cpu"]
    import_transformer_engine(Path(os.environ["TRANSFORMER_ENGINE"]), emulated=on_cuda)
    if on_cuda:
        prepare_project()
    fork_server.serve()
