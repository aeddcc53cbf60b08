"""Check the options that need Transformer Engine, and initialize those that require it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config import Config
from megatron_ext.engine.platform import Platform
from megatron_ext.errors import UserError


def check(config: Config, platform: Platform) -> None:
    """Raise UserError with one line per option that this platform does not support."""
    lines = list(_mistakes(config, platform))
    if lines:
        raise UserError("\n".join(lines))


def _mistakes(config: Config, platform: Platform) -> Iterator[str]:
    parallel, optimizer, training = config.parallel, config.optimizer, config.training
    if platform.transformer_engine:
        if parallel.compile:
            yield (
                "compile: got true with Transformer Engine's layers, which it cannot compile, needs the local ones; "
                "leave it out"
            )
        if training.fp8_format is not None:
            from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

            ask = {
                "mxfp8": FP8GlobalStateManager.is_mxfp8_available,
                "blockwise": FP8GlobalStateManager.is_fp8_block_scaling_available,
            }.get(training.fp8_recipe, FP8GlobalStateManager.is_fp8_available)
            able, reason = ask()  # Transformer Engine's own wording
            if not able:
                yield f"fp8_recipe: got {training.fp8_recipe}, needs another GPU or recipe: {reason}"
        return
    for name, asked in (
        ("tp_comm_overlap", parallel.tp_comm_overlap),
        ("cpu_offloading", parallel.cpu_offloading),
        ("moe_grouped_gemm", parallel.moe_grouped_gemm),
        # if offloaded, it is Megatron's own optimizer around torch's Adam
        (
            "use_precision_aware_optimizer",
            optimizer.use_precision_aware_optimizer and not optimizer.optimizer_cpu_offload,
        ),
    ):
        if asked:
            yield f"{name}: got true, needs CUDA with Transformer Engine; install it or leave the option out"
    if training.fp8_format is not None:
        yield (
            f"fp8_format: got {training.fp8_format}, needs CUDA with Transformer Engine; install it or leave the "
            "option out"
        )


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
