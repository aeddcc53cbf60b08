"""Create and destroy process groups; the only module that reads Megatron's parallel state.

A process joins once (`join`) and leaves once (`stop`); each stage of a run in between has its own groups, which
`finish_stage` destroys.
"""

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_ext import heartbeat
from megatron_ext.attention.exchange import ContextGroup
from megatron_ext.config import Config, ParallelConfig
from megatron_ext.engine import compat
from megatron_ext.engine.platform import Platform
from megatron_ext.errors import PERMANENT, UserError
from megatron_ext.launch import LaunchError, read_launch

Answer = TypeVar("Answer")


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
        shared = f"TP {self.tensor_size} x PP {self.pipeline_size} x CP {self.context_size} x DP {self.data_size}"
        return shared + (f", experts over {self.expert_size} ranks" if self.expert_size > 1 else "")

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
    several, timeout = read_launch().world_size > 1, timedelta(minutes=config.distributed_timeout_minutes)
    meeting: dict[str, Any] = {} if several else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(platform.communication, timeout=timeout, **meeting)
    except dist.DistNetworkError as error:
        if "failed to listen" not in str(error):  # rank 0 may have crashed
            raise
        port, reason = os.environ["MASTER_PORT"], str(error).rpartition("message: ")[2]
        raise LaunchError(f"MASTER_PORT: got {port}, needs a free port on this host ({reason})") from None


def start(config: ParallelConfig, num_layers: int, platform: Platform, seed: int) -> Ranks:
    """Join the processes, build Megatron's groups and seed its random states; raise what `join` raises."""
    join(config, platform)
    chunk = config.num_layers_per_virtual_pipeline_stage
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=model_chunks(config, num_layers) if chunk else None,
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


def together(action: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Run an action on each process; if it fails on one, all raise an error, so that none waits. Collective.

    `group` is another group of all processes, for a thread.

    Raises:
        UserError: that of the first process with one; the same on all.
        RuntimeError: another process had another error, which it raises itself.
    """
    mine: BaseException | None = None
    try:
        action()
    except BaseException as error:  # includes SystemExit and KeyboardInterrupt: the other ranks must not continue
        mine = error
    everyone: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine and (isinstance(mine, UserError), str(mine)), group)
    if mine is not None and not isinstance(mine, UserError):
        raise mine
    failures = [one for one in everyone if one is not None]
    for is_user_error, text in sorted(failures, reverse=True, key=lambda failure: failure[0]):
        raise UserError(text) if is_user_error else RuntimeError(f"another process has failed: {text}")


def run_on_rank0(action: Callable[[], Answer], path: Path, *, reads: bool = False) -> Answer:
    """Run `action` on rank 0 and return its result on all ranks; if it fails, every rank raises. Collective.

    The result is pickled. Errors that do not name a file name `path`; `reads`: the action does not write.

    Raises:
        UserError: raised by the action, or replacing an OSError that the user can fix (`errors.PERMANENT`); the latter
            names the file, the reason and the remedy.
        RuntimeError: any other exception on rank 0, which raises that exception itself.
    """
    answer: list[Any] = [None]

    def on_rank0() -> None:
        try:
            if dist.get_rank() == 0:
                answer[0] = action()
        except OSError as error:
            if error.errno not in PERMANENT:
                raise
            refusal = f"{cannot_write(error, path)}; choose another folder or make this one writable"
            if reads:
                refusal = (
                    f"load: {error.filename or path} cannot be read ({error.strerror or error}); make it readable, or "
                    "restore it from a copy"
                )
            raise UserError(refusal) from None

    together(on_rank0)
    dist.broadcast_object_list(answer, src=0)
    everyones: Answer = answer[0]
    return everyones


def wait_for_threads(working: Future[Any], device: Any) -> None:
    """Wait until the threads of all processes have ended. Collective.

    A thread may take longer than the timeout of a collective or of the watchdog, as long as any process sends
    heartbeats; these count for all processes.
    """
    before, pause_s = -1, 0.001
    while True:
        mine = [float(not working.done()), float(heartbeat.beats)]
        state = torch.tensor(mine, dtype=torch.float64, device=device)
        dist.all_reduce(state)
        alive, beats = state.tolist()
        if not alive:
            return
        if beats != before:
            heartbeat.beat()
            before = beats + dist.get_world_size()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)


def cannot_write(error: OSError, path: Path) -> str:
    """Return the first part of the message for an OSError on writing; `path` is named if the error names no file."""
    return f"save: {error.filename or path} cannot be written ({error.strerror or error})"


def context_group(config: ParallelConfig, ranks: Ranks, platform: Platform) -> ContextGroup:
    """Return the group that shares each row's tokens, with its own counter of the bytes that this process sends."""
    return ContextGroup(
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
    chunk = config.num_layers_per_virtual_pipeline_stage
    return num_layers // config.pipeline_model_parallel_size // chunk if chunk else 1


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
