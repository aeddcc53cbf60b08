"""Which of Megatron's fused operations a run uses: all that its device and the installed packages have.

Looked up in Megatron-Core 0.16.1, for what its layers are given here (format "sbhd", one batch entry of t tokens):

    SwiGLU              one kernel forward, one backward, compiled by torch.compile: needs CUDA and Triton. The input of
                        the block is kept alone, [t, 2F], instead of five tensors of [t, F]; there is no bias
    rotary angles       Transformer Engine's kernel for "sbhd", an angle per token; else cos and sin of every layer.
                        It counts in int32, and its keys lie in the joint projection, rows of (N + 2 G) H / tp numbers
                        apart: a rank's tokens times that have to be fewer than 2^31
    weight gradients    added to their buffer by the matrix product itself: Transformer Engine's layers, or Megatron's
                        own with Apex's extension

The first two serve the Llama block alone: other activation functions, and angles of a part of a head or of two bases,
have no such kernel. Not among them: norms, which are one kernel already (torch's rms_norm, or Transformer Engine's,
there with the product that follows; Megatron's `persist_layer_norm` is of LayerNorm alone); dropout and residual, which
is one addition without dropout; masked softmax and cross-entropy, which Megatron does not compute here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from megatron_ext.config import Config
from megatron_ext.engine.platform import Platform

COUNTED = 2**31  # by Transformer Engine's rotation


@dataclass(frozen=True)
class Fusions:
    """Lists which operations are fused, under the names of Megatron's options."""

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
    """Return the numbers that a token has in a rank's joint projection of queries, keys and values."""
    model = config.model
    heads = model.num_attention_heads + 2 * model.num_query_groups
    return heads * model.head_size // config.parallel.tensor_model_parallel_size


def rotation_counts(tokens: int, width: int) -> bool:
    """Return whether Transformer Engine's rotary kernel, which counts in int32, can index that many elements."""
    return tokens * width < COUNTED


def fusions(
    *,
    on_cuda: bool,
    transformer_engine: bool,
    apex_weight_gradients: bool,
    triton: bool,
    block: str,
    tokens: int,
    width: int,
) -> Fusions:
    """Choose from what there is; on a CPU nothing is fused, and of other blocks than Llama's weight gradients alone.

    `tokens` are a rank's of a micro-batch, `width` is that of its joint projection of queries, keys and values.
    """
    plain = block == "llama"
    return Fusions(
        bias_activation_fusion=on_cuda and triton and plain,
        apply_rope_fusion=on_cuda and transformer_engine and plain and rotation_counts(tokens, width),
        gradient_accumulation_fusion=on_cuda and (transformer_engine or apex_weight_gradients),
    )


def fusions_here(platform: Platform, config: Config) -> Fusions:
    """Choose from what is installed beside this process."""
    data, ranks = config.data, config.parallel.context_parallel_size
    return fusions(
        on_cuda=platform.device.type == "cuda",
        transformer_engine=platform.transformer_engine,
        apex_weight_gradients=find_spec("fused_weight_gradient_mlp_cuda") is not None,
        triton=find_spec("triton") is not None,
        block=config.model.block,
        tokens=data.micro_batch_size * data.seq_length // ranks,
        width=joint_width(config),
    )
