"""Save memory of activations (ALST, arXiv 2506.13996): MLPs in blocks of tokens, inputs of layers on the host.

Full recomputation keeps the input of each layer, or group of layers, on the device. `keep_inputs_on_host` copies an
input to the host while the next layer runs, and back while the layer after it runs backward:

    forward    layer 1    layer 2    layer 3    layer 4
    to host               input 1    input 2    input 3
    backward   layer 4    layer 3    layer 2    layer 1
    to device  input 3    input 2    input 1

The last input is needed at once and stays on the device. Copies are exact, so training is the same bit for bit.

torch's `save_on_cpu` copies on the stream of the layers, so that nothing overlaps, and pins new memory for each tensor.
Megatron's `offload_modules` is not used for the reasons in docs/planning.md.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks


def compute_in_blocks(mlp: MLP, block_tokens: int) -> None:
    """Make an MLP without experts compute at most `block_tokens` tokens at a time.

    Its inner activations never exist for all tokens. Forward keeps only its input; backward recomputes one block at a
    time and adds the blocks' weight gradients in float32. Under sequence parallelism a block has block_tokens / tp
    tokens of each tensor-parallel rank.
    """
    config = mlp.config
    compute = mlp.forward
    rows = block_tokens
    if config.sequence_parallel:
        rows = max(block_tokens // config.tensor_model_parallel_size, 1)
    last_bias = None
    if config.add_bias_linear:
        last_bias = mlp.linear_fc2.bias  # returned, and added by the layer
    weights = [weight for weight in mlp.parameters() if weight is not last_bias]

    def forward(hidden_t1D: Tensor, **unused: Any) -> tuple[Tensor, Tensor | None]:
        return _Blocks.apply(compute, rows, weights, hidden_t1D, *weights), last_bias

    mlp.forward = forward


class _Blocks(torch.autograd.Function):
    """Runs an MLP block by block; the weights are arguments only because they get gradients."""

    @staticmethod
    def forward(ctx: Any, mlp: Any, rows: int, weights: list[Tensor], hidden_t1D: Tensor, *unused: Tensor) -> Tensor:
        ctx.mlp = mlp
        ctx.rows = rows
        ctx.weights = weights
        ctx.save_for_backward(hidden_t1D)
        out_t1D = torch.empty_like(hidden_t1D)
        for out_b1D, hidden_b1D in zip(out_t1D.split(rows), hidden_t1D.split(rows), strict=True):
            out_b1D.copy_(mlp(hidden_b1D)[0])
        return out_t1D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_t1D,) = ctx.saved_tensors
        grad_hidden_t1D = torch.empty_like(hidden_t1D)
        sums: list[Tensor] = []
        for grad_hidden_b1D, grad_b1D, hidden_b1D in zip(
            *(x.split(ctx.rows) for x in (grad_hidden_t1D, grads[0], hidden_t1D)), strict=True
        ):
            with torch.enable_grad():
                input_b1D = hidden_b1D.detach().requires_grad_()
                out_b1D = ctx.mlp(input_b1D)[0]
            grad_input_b1D, *parts = torch.autograd.grad(out_b1D, (input_b1D, *ctx.weights), grad_b1D)
            grad_hidden_b1D.copy_(grad_input_b1D)
            if sums:  # Transformer Engine adds a matrix's gradient to its buffer by itself and returns a placeholder
                sums = [
                    part if getattr(weight, "grad_added_to_main_grad", False) else total.float().add_(part)
                    for total, part, weight in zip(sums, parts, ctx.weights, strict=True)
                ]
            else:
                sums = parts
            del parts  # before the next block computes its own
        grad_weights = [total.to(weight.dtype) for total, weight in zip(sums, ctx.weights, strict=True)]
        return None, None, None, grad_hidden_t1D, *grad_weights


@dataclass(frozen=True, eq=False)
class HostBuffer:
    """Host memory for a tensor, in parts of a power of two of numbers, because torch pins memory in powers of two."""

    shape: torch.Size
    parts: list[Tensor]

    @classmethod
    def like(cls, x: Tensor) -> "HostBuffer":
        count = x.numel()
        sizes = [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]
        return cls(x.shape, [torch.empty(size, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda) for size in sizes])

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Return the views of a contiguous tensor that are copied from and to the parts."""
        return x.detach().view(-1).split([len(part) for part in self.parts])


class HostCopies:
    """Copies tensors to reused host buffers and back; on CUDA the buffers are pinned, and a separate stream copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream()
        self._free: dict[Any, list[HostBuffer]] = defaultdict(list)  # by shape and dtype

    def to_host(self, x: Tensor) -> tuple[HostBuffer, Any]:
        """Return a buffer and the event after which it holds x, which is contiguous and must exist until then."""
        free = self._free[x.shape, x.dtype]
        if not free:
            free.append(HostBuffer.like(x))
        host = free.pop()
        return host, self._copy(host.parts, host.split(x))

    def to_device(self, host: HostBuffer) -> tuple[Tensor, Any]:
        """Return a new tensor and the event after which it holds the buffer's values; the buffer is free again."""
        x = torch.empty(host.shape, dtype=host.parts[0].dtype, device=self._device)
        event = self._copy(host.split(x), host.parts)
        self._free[x.shape, x.dtype].append(host)  # what is copied into it next follows on the same stream
        return x, event

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        pairs = list(zip(targets, sources, strict=True))
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()


@dataclass(eq=False)
class _Input:
    """The input of a layer, [t / s, 1, D]."""

    x: Tensor | None  # on the device, or None
    before: "_Input | None"  # the input before it, until that returns to the device
    host: HostBuffer | None = None
    copied: Any = None  # the event that ends the last copy

    def leave_device(self) -> None:
        """Free the device's memory when the copy on the host is complete."""
        if self.host is not None:
            self.wait()
            self.x = None

    def return_to_device(self, copies: HostCopies) -> None:
        """Start copying back what is on the host."""
        if self.host is not None:
            self.x, self.copied = copies.to_device(self.host)
            self.host = None

    def wait(self) -> None:
        """Make the current stream wait for the last copy."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


def keep_inputs_on_host(decoder: TransformerBlock, copies: HostCopies, group: int, *, received: bool) -> None:
    """Make a decoder with full recomputation keep the inputs of its layers on the host, except the last one.

    `group` layers are recomputed together and keep one input. The pipeline keeps the first one on the device if it was
    `received` from another stage.
    """
    run_layers = decoder.forward
    count = len(decoder.layers) // group

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        inputs: list[_Input] = []

        def pack(x: Tensor) -> Tensor | _Input:
            # not the angles [t, 1, 1, H], what a norm keeps for a moment inside a layer, what the final norm keeps
            if x.dim() != 3 or not x.requires_grad or len(inputs) == count:
                return x
            kept = _Input(x, before=None)
            if inputs:
                kept.before = inputs[-1]
                kept.before.leave_device()
            if int(received) <= len(inputs) < count - 1:
                kept.host, kept.copied = copies.to_host(x)
            inputs.append(kept)
            return kept

        def unpack(kept: Tensor | _Input) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            kept.return_to_device(copies)  # already there, unless backward visits the layers in another order
            kept.wait()
            if kept.before is not None:
                kept.before.return_to_device(copies)
                kept.before = None
            assert kept.x is not None
            return kept.x

        with saved_tensors_hooks(pack, unpack):
            out: Tensor = run_layers(*args, **kwargs)
        inputs.clear()  # from here on only the graph keeps them
        return out

    decoder.forward = forward
