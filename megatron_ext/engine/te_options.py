"""Check the options that need Transformer Engine, and initialize those that require it."""

from __future__ import annotations

from megatron_ext.config import Config
from megatron_ext.config.checks import PLATFORM, broken
from megatron_ext.engine.platform import Platform
from megatron_ext.errors import UserError


def check(config: Config, platform: Platform) -> None:
    """Raise UserError with one line per option that this platform does not support."""
    if lines := list(broken(PLATFORM, config, transformer_engine=platform.transformer_engine)):
        raise UserError("\n".join(lines))


def start_tensor_overlap(config: Config, tensor_size: int) -> None:
    """Allocate the buffers of --tp-comm-overlap for the tokens of a tensor-parallel group. Collective."""
    if not config.parallel.tp_comm_overlap:
        return
    from transformer_engine.pytorch import destroy_ub, initialize_ub
    from transformer_engine.pytorch.module import UserBufferQuantizationMode as Mode

    tokens = config.data.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size
    destroy_ub()  # of an earlier stage
    initialize_ub(
        shape=[tokens, config.model.hidden_size],
        tp_size=tensor_size,
        quantization_modes=[Mode.FP8 if config.training.fp8_format else Mode.NONE],
        bootstrap_backend="nccl",
    )
