"""Choose which of Megatron's fused operations a run uses: all that its device and the installed packages support.

Requirements in Megatron-Core 0.16.1 for the inputs used here (format "sbhd", one batch entry of t tokens):

    SwiGLU              one kernel in forward and one in backward, compiled by torch.compile: needs CUDA and Triton.
                        Only the input of the block is saved, [t, 2F], instead of five tensors of [t, F]; no bias
    rotary angles       Transformer Engine's kernel for "sbhd", one angle per token; otherwise each layer computes cos
                        and sin. The kernel uses int32 indices, so a long micro-batch is rotated without it
    weight gradients    added to their buffer by the matrix product itself: Transformer Engine's layers, or Megatron's
                        own with Apex's extension

The first two support only the blocks llama and olmo3: there are no such kernels for other activation functions, or for
rotary angles of a part of a head; so MLA's angles are not fused.
"""

from __future__ import annotations

from importlib.util import find_spec

from megatron_ext.config import Config
from megatron_ext.engine.platform import Platform

COUNTED = 2**31  # index limit of Transformer Engine's rotary kernel


def rotation_counts(tokens: int, config: Config) -> bool:
    """Return whether Transformer Engine's rotary kernel can index a rank's queries, keys and values of `tokens`."""
    model = config.model
    width = (model.num_attention_heads + 2 * model.num_query_groups) * model.head_size
    return tokens * width // config.parallel.tensor_model_parallel_size < COUNTED


def fusions_here(platform: Platform, config: Config) -> dict[str, bool]:
    """Return Megatron's options for the fusions available in this process's environment; on a CPU all are off."""
    on_cuda = platform.device.type == "cuda"
    plain = on_cuda and config.model.block in ("llama", "olmo3")
    apex = find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        "bias_activation_fusion": plain and find_spec("triton") is not None,
        "apply_rope_fusion": plain and not config.model.multi_latent_attention and platform.transformer_engine,
        "gradient_accumulation_fusion": on_cuda and (platform.transformer_engine or apex),
    }
