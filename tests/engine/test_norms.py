"""Megatron's own norm for local layers; ours are tested in tests/parity/."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from tests.engine.needed import needed


def norm_config(sequence_parallel: bool) -> TransformerConfig:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "tensor_model_parallel_size": 2}
    how = {"normalization": "RMSNorm", "persist_layer_norm": False, "sequence_parallel": sequence_parallel}
    return TransformerConfig(**sizes, **how)


@needed("norms")
def test_upstream_norm_still_refuses_sequence_parallel() -> None:
    """Where this fails, see whether WrappedTorchNorm marks its weight too: then remove `_MarkedNorm`."""
    assert isinstance(WrappedTorchNorm(norm_config(False), 8), torch.nn.RMSNorm)
    with pytest.raises(AssertionError, match="sequence parallel not supported by torch LayerNorm"):
        WrappedTorchNorm(norm_config(True), 8)
