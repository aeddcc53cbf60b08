"""The norm of gradients is exact to float32 for any number and dtype of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.engine.optimizer import squared_gradient_norm


class Gradients:
    """Stands for an optimizer over given gradients."""

    def __init__(self, gradients: list[Tensor]) -> None:
        self.gradients = gradients

    def prepare_grads(self) -> bool:
        return False

    def get_grad_stats_parallel_group(self) -> None:
        return None

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        return self.gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_ten_million_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares added sequentially in float32 would make it 4e-4 too small."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    generator = torch.Generator().manual_seed(0)
    gradients = [(1e-3 * torch.randn(size, generator=generator)).to(dtype) for size in (10_000_000, 7)]
    optimizer: Any = Gradients(gradients)
    squared = squared_gradient_norm(optimizer, torch.device("cpu"))
    exact = sum(gradient.double().square().sum().item() for gradient in gradients)
    assert squared.dtype == torch.float32
    assert squared.item() == pytest.approx(exact, rel=1e-6)
