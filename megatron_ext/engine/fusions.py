"""Choose which of Megatron's fused operations a run uses: all that its device and the installed packages support.

Requirements in Megatron-Core 0.16.1 for the inputs used here (format "sbhd", one batch entry of t tokens):

    SwiGLU              one kernel in forward and one in backward, compiled by torch.compile: needs CUDA and Triton.
                        Only the input of the block is saved, [t, 2F], instead of five tensors of [t, F]; no bias
    rotary angles       Transformer Engine's kernel for "sbhd", one angle per token; otherwise each layer computes cos
                        and sin. The kernel uses int32 indices, and rows of the joint projection have (N + 2 G) H / tp
                        elements: a rank's tokens times that must be below 2^31
    weight gradients    added to their buffer by the matrix product itself: Transformer Engine's layers, or Megatron's
                        own with Apex's extension

The first two support only the blocks llama and olmo3: there are no such kernels for other activation functions, or for
rotary angles of a part of a head; so MLA's angles are not fused. Not included: norms, which are one kernel already
(torch's rms_norm, or Transformer Engine's, fused with the product that follows; Megatron's `persist_layer_norm` applies
to LayerNorm only); dropout and residual, a single addition without dropout; masked softmax and cross-entropy, which
Megatron does not compute here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from megatron_ext.config import Config
from megatron_ext.engine.platform import Platform

COUNTED = 2**31  # index limit of Transformer Engine's rotary kernel


@dataclass(frozen=True)
class Fusions:
    """The operations that are fused, under the names of Megatron's options."""

    bias_activation_fusion: bool
    apply_rope_fusion: bool
    gradient_accumulation_fusion: bool

    def __str__(self) -> str:
        names = {
            "SwiGLU": self.bias_activation_fusion,
            "rotary angles": self.apply_rope_fusion,
            "weight gradients into their buffer": self.gradient_accumulation_fusion,
        }
        return "fused: " + (", ".join(name for name, fused in names.items() if fused) or "nothing")


def joint_width(config: Config) -> int:
    """Return the number of elements per token in a rank's joint projection of queries, keys and values."""
    model = config.model
    heads = model.num_attention_heads + 2 * model.num_query_groups
    return heads * model.head_size // config.parallel.tensor_model_parallel_size


def rotation_counts(tokens: int, width: int) -> bool:
    """Return whether Transformer Engine's rotary kernel, which uses int32 indices, supports this many elements."""
    return tokens * width < COUNTED


def fusions_here(platform: Platform, config: Config) -> Fusions:
    """Return the fusions available in this process's environment; on a CPU nothing is fused."""
    data, on_cuda = config.data, platform.device.type == "cuda"
    plain = on_cuda and config.model.block in ("llama", "olmo3")
    tokens = data.micro_batch_size * data.seq_length // config.parallel.context_parallel_size
    apex = find_spec("fused_weight_gradient_mlp_cuda") is not None
    return Fusions(
        bias_activation_fusion=plain and find_spec("triton") is not None,
        apply_rope_fusion=plain
        and not config.model.multi_latent_attention
        and platform.transformer_engine
        and rotation_counts(tokens, joint_width(config)),
        gradient_accumulation_fusion=on_cuda and (platform.transformer_engine or apex),
    )
