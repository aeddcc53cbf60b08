"""Norms for layers of the local layer spec."""

from typing import Any

import torch


class _MarkedNorm(torch.nn.Module):
    """A norm for layers of the local layer spec.

    Megatron's WrappedTorchNorm does not support sequence parallelism, under which weights must be marked so that their
    gradients are summed over ranks. Remove when WrappedTorchNorm marks them.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(_MarkedNorm, torch.nn.RMSNorm):
    """RMSNorm that supports sequence parallelism."""


class LayerNorm(_MarkedNorm, torch.nn.LayerNorm):
    """LayerNorm that supports sequence parallelism."""


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight in fp32, as Gemma in transformers does.

    Neither torch nor Megatron's wrapper supports this.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normalized over its last dimension, in the dtype of x."""
        normed = torch.nn.functional.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps)
        return normed.type_as(x)
