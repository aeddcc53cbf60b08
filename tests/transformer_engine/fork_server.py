"""The program of tests/fork_server.py on an emulated CUDA machine with Transformer Engine.

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


def import_transformer_engine(folder: Path) -> None:
    """Import it without its shared libraries, with the emulated module in place of the one that it would load."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path[:0] = [str(folder), str(Path(__file__).parent / "packages")]
    cuda.install()
    extension.install(folder)
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
    import_transformer_engine(Path(os.environ["TRANSFORMER_ENGINE"]))
    prepare_project()
    fork_server.serve()
