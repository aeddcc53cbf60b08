"""Create and destroy process groups, and seed the random states of their ranks.

A process joins once (`join`) and leaves once (`stop`); each stage of a run in between has its own groups, which
`finish_stage` destroys.
"""

import hashlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_ext.config import Config, ParallelConfig
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.engine import compat
from megatron_ext.engine.platform import Platform
from megatron_ext.launch import LaunchError, read_launch


@dataclass(frozen=True)
class Ranks:
    """The ranks of this process, and its process groups."""

    world: int  # global rank of this process, among `world_size`
    world_size: int
    # tensor, pipeline, data, context, expert: its rank in each kind of group. Expert-parallel ranks hold different
    # experts; for all other weights they are data- and context-parallel ranks.
    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    data: int
    data_size: int
    context: int
    context_size: int
    expert: int
    expert_size: int
    expert_copy: int  # its rank among the processes that hold the same experts
    context_group: dist.ProcessGroup  # the processes that share the tokens of each row
    data_context_group: dist.ProcessGroup  # the processes that hold different tokens of one global batch
    tensor_group: dist.ProcessGroup  # the processes that share each matrix
    expert_group: dist.ProcessGroup  # the processes that together hold all experts
    expert_tensor_group: dist.ProcessGroup  # the processes that together hold all parts of all experts

    @property
    def last_stage(self) -> bool:
        """Whether this process computes losses."""
        return self.pipeline == self.pipeline_size - 1

    @property
    def layout(self) -> str:
        layout = f"TP {self.tensor_size} x PP {self.pipeline_size} x CP {self.context_size} x DP {self.data_size}"
        if self.expert_size > 1:
            layout += f", experts over {self.expert_size} ranks"
        return layout

    @property
    def reports_loss(self) -> bool:
        """Whether sums over all processes include this one: once per tensor-parallel group of the last stage."""
        return self.last_stage and self.tensor == 0


def join(config: ParallelConfig, platform: Platform) -> None:
    """Initialize torch.distributed if necessary.

    Raises:
        UserError: the launcher's environment variables are missing or invalid, or another program has the port.
    """
    if dist.is_initialized():
        return
    meeting: dict[str, Any] = {}
    if read_launch().world_size == 1:
        meeting = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    try:
        dist.init_process_group(platform.communication, timeout=timeout, **meeting)
    except dist.DistNetworkError as error:
        if "failed to listen" not in str(error):  # rank 0 may have crashed
            raise
        reason = str(error).rpartition("message: ")[2]
        raise LaunchError(
            f"MASTER_PORT: got {os.environ['MASTER_PORT']}, needs a free port on this host ({reason})"
        ) from None


def start(config: ParallelConfig, num_layers: int, platform: Platform, seed: int) -> Ranks:
    """Join the processes, build Megatron's groups and seed its random states; raise what `join` raises."""
    join(config, platform)
    chunks = None
    if config.is_interleaved:
        chunks = model_chunks(config, num_layers)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        distributed_timeout_minutes=config.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    ranks = Ranks(
        world=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        context=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_copy=parallel_state.get_expert_data_parallel_rank(),
        context_group=parallel_state.get_context_parallel_group(),
        data_context_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        expert_group=parallel_state.get_expert_model_parallel_group(),
        expert_tensor_group=parallel_state.get_expert_tensor_and_model_parallel_group(),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(dropout_seed(seed, ranks.data, ranks.context, ranks.pipeline))
    return ranks


def start_tensor_overlap(config: Config, ranks: Ranks) -> None:
    """Allocate the buffers of --tp-comm-overlap for the tokens of a tensor-parallel group. Collective."""
    if not config.parallel.tp_comm_overlap:
        return
    from transformer_engine.pytorch import destroy_ub, initialize_ub
    from transformer_engine.pytorch.module import UserBufferQuantizationMode as Mode

    tokens = config.data.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size
    destroy_ub()  # of an earlier stage
    initialize_ub(
        shape=[tokens, config.model.hidden_size],
        tp_size=ranks.tensor_size,
        quantization_modes=[Mode.FP8 if config.training.fp8_format else Mode.NONE],
        bootstrap_backend="nccl",
    )


def context_group(config: ParallelConfig, ranks: Ranks, platform: Platform) -> CPGroup:
    """Return the group that shares each row's tokens, with its own counter of the bytes that this process sends."""
    return CPGroup(
        rank=ranks.context,
        size=ranks.context_size,
        group=ranks.context_group,
        parts=config.overlap_parts(platform.device.type == "cuda"),
    )


def dropout_seed(seed: int, data: int, context: int, pipeline: int) -> int:
    """Return the seed of dropout on these ranks; it differs between ranks with different tokens or layers.

    Tensor-parallel ranks hold the same activations and use the same seed. Where sequence parallelism gives them
    different tokens, Megatron uses a second random state, seeded with this seed + 2718 + the tensor-parallel rank.
    """
    digest = hashlib.sha256(f"{seed}:dropout:{data}:{context}:{pipeline}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def model_chunks(config: ParallelConfig, num_layers: int) -> int:
    """Return the number of model chunks of a pipeline stage: 1, or more with the interleaved schedule."""
    return len(config.layers_of_chunks(num_layers)) // config.pipeline_model_parallel_size


def finish_stage() -> None:
    """Destroy Megatron's groups so that `start` can build others; the processes stay connected. Collective."""
    dist.barrier()
    groups = compat.process_groups()
    parallel_state.destroy_model_parallel()  # drops the references; the communicators would keep their memory
    for group in groups:
        dist.destroy_process_group(group)


def stop() -> None:
    """Destroy all process groups. Collective."""
    finish_stage()
    dist.destroy_process_group()
