"""Measure the memory that planning.memory estimates: torchrun --nproc-per-node N benchmarks/memory.py [trainer's flags]

One optimizer step on random rows. Each process prints a JSON line: bytes of the tensors that are kept between steps
(weights, gradients, optimizer) and, without pipeline parallelism, bytes that the layers keep of one micro-batch, with
attention keeping the same tensors as a flash kernel; next to each the estimate. On CUDA also the peak.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from training import Training

from megatron_ext.config import Config
from megatron_ext.config.arguments import parse
from megatron_ext.config.checks import check
from megatron_ext.engine import parallel
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.optimizer import unwrap
from megatron_ext.launch import read_launch
from megatron_ext.planning.attention_shapes import attention_shapes
from megatron_ext.planning.memory import final_norm_bytes, layer_bytes, stage_memory

DEFAULTS = ["--data-path", "random", "--vocab-size", "1000"]


class FlashLike(torch.autograd.Function):
    """Attention that keeps its inputs, its output and a float per query and head; its output is meaningless."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query * 0.5
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def storages() -> dict[int, int]:
    """Return the bytes of every tensor's storage, by address; views of one storage count once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    kept = [one.untyped_storage() for one in tensors if one.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in kept}


def kept_by(forward: Callable[[], Any], known: dict[int, int]) -> int:
    """Return the bytes of the storages that a forward pass keeps for its backward pass, excluding `known` ones."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = forward()  # the address of a freed storage could be reused
    del alive
    return sum(found.values())


class Measure(Training):
    """One model and its optimizer after a step."""

    def __init__(self, config: Config) -> None:
        before = storages()
        super().__init__(config)
        self.step = self.batches(config, 0, config.data.seq_length)
        self.stepper.train(self.step)
        after = storages()
        passing = [tensor for batch in self.step.train for tensor in tensors_of(batch)]
        for chunk in unwrap(self.model):  # a stage keeps its last received tensor until the next one
            received = chunk.decoder.input_tensor
            passing += [one for one in (received, getattr(received, "grad", None)) if one is not None]
        others = before.keys() | {tensor.untyped_storage().data_ptr() for tensor in passing}
        self.static = sum(size for at, size in after.items() if at not in others)
        self.known = after

    def layers(self) -> int:
        """Return the bytes that all layers keep of one micro-batch."""
        (chunk,) = unwrap(self.model)
        for layer in chunk.decoder.layers:
            layer.self_attention.core_attention.backend = lambda q, k, v, *unused: FlashLike.apply(q, k, v)
        batch = self.step.train[0].to(self.where.device)
        return kept_by(lambda: self._hidden(chunk, batch), self.known)

    def _hidden(self, chunk: PackedGPT, batch: Any) -> Tensor:
        chunk.post_process = False  # exclude the loss
        hidden: Tensor = chunk(batch)
        return hidden


def tensors_of(batch: Any) -> list[Tensor]:
    return [value for value in vars(batch).values() if isinstance(value, Tensor)]


def main(argv: list[str]) -> None:
    config = parse([*DEFAULTS, *argv])
    check(config, read_launch(os.environ).world_size)
    measure = Measure(config)
    ranks, options = measure.ranks, config.parallel
    memory = stage_memory(config, ranks.world_size, config.model.vocab_size or 0, ranks.pipeline)
    found: dict[str, Any] = {
        "tensor": ranks.tensor,
        "pipeline": ranks.pipeline,
        "data": ranks.data,
        "static": measure.static,
        "static_estimate": memory.static,
    }
    if options.pipeline_model_parallel_size == 1:
        found["layers"] = measure.layers()
        fused = measure.where.device.type == "cuda"
        shapes = attention_shapes(config, config.data.seq_length)[ranks.context][0]
        kept = memory.activations
        if options.recompute_granularity is None:
            experts = map(config.model.has_experts, range(config.model.num_layers))
            kept = sum(layer_bytes(config, shapes, experts=each, on_cuda=fused) for each in experts)
        found["layers_estimate"] = kept + final_norm_bytes(config, on_cuda=fused)
    if measure.where.device.type == "cuda":
        found |= {"peak": torch.cuda.max_memory_allocated(), "total_estimate": memory.total}
    for rank in range(ranks.world_size):
        if rank == ranks.world:
            print(json.dumps(found), flush=True)
        dist.barrier()
    parallel.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
