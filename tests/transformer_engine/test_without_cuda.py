"""A run on a CPU does not use a Transformer Engine that is installed, as in an image for GPUs."""

from pathlib import Path

import pytest

from tests.conftest import SmallData
from tests.engine.needed import needed
from tests.launcher import call
from tests.runs import CONFIG, Launched
from tests.transformer_engine import WITHOUT_CUDA

FLAGS = ["--train-iters", "2", "--lr-warmup-iters", "0", "--seq-length", "64", "--bf16"]


def test_kernels_of_cuda_are_not_called_on_a_cpu(
    launched: Launched, small_data: SmallData, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = launched(FLAGS, 1)
    installed = Launched(small_data.flags, tmp_path_factory.mktemp("installed"), WITHOUT_CUDA)(FLAGS, 1)
    assert installed.series("lm_loss") == alone.series("lm_loss")
    assert installed.series("grad_norm") == alone.series("grad_norm")


def train_without_patch(rank: int, flags: list[str]) -> None:
    from megatron_ext.engine import compat
    from pretrain_skyladder import main

    compat.install_optimizer = lambda: None
    assert main(flags) == 0


@needed("kernels on a CPU")
def test_megatron_still_calls_kernels_of_cuda_on_a_cpu(small_data: SmallData, tmp_path: Path) -> None:
    """Where this fails, Megatron asks for the device: remove that part of compat.install_optimizer."""
    flags = [*CONFIG, *small_data.flags, *FLAGS, "--save", str(tmp_path / "run")]
    with pytest.raises(RuntimeError, match="multi_tensor_adam was called"):
        call(train_without_patch, 1, flags, group=False, server=WITHOUT_CUDA)
