"""Megatron's pipeline schedule over packed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron_ext.batch import PackedBatch
from megatron_ext.loss import TokenLosses

# Megatron's forward step: (batches, model) -> (output, output -> (loss to run backward from, 0, what is kept))
Forward = Callable[[Iterator[PackedBatch], nn.Module], tuple[Any, Callable[..., Any]]]


class Pipeline:
    """Runs the model chunks of this pipeline stage.

    Args:
        model: the chunks, wrapped or not.
        experts: the ranks that hold all experts together; each forward pass of one is one of all.
    """

    def __init__(self, model: Sequence[nn.Module], experts: dist.ProcessGroup | None = None) -> None:
        self.model, self.experts = list(model), experts
        self._schedule: Callable[..., list[Any]] = get_forward_backward_func()

    def run(self, batches: Sequence[PackedBatch], forward: Forward, *, forward_only: bool) -> list[Any]:
        """Return what was kept of each micro-batch, on the last stage; [] on the others.

        The micro-batches are of equal length: stages receive activations of a size that they know beforehand.
        """
        iterators: list[Iterator[PackedBatch]] = [iter(batches) for _ in self.model]
        return self._schedule(
            forward_step_func=forward,
            data_iterator=one_or_all(iterators),
            model=one_or_all(self.model),
            num_microbatches=len(batches),
            seq_length=batches[0].layout.tokens,
            micro_batch_size=1,  # the rows of a micro-batch lie end to end
            forward_only=forward_only,
        )

    @torch.no_grad()
    def forward_only(
        self, batches: Sequence[PackedBatch], forward: Forward, spare: Sequence[PackedBatch] = ()
    ) -> list[Any]:
        """Do what `run` does, without gradients and in evaluation mode.

        Args:
            batches: as many as there are; [] does nothing, unless ranks that share experts have some.
            forward: as `run` takes it.
            spare: what to run, for their sake, where there are none; nothing is kept of it.
        """
        filled = list(batches)
        for _ in range(self._passes(len(batches)) - len(batches)):
            filled.append((batches or spare)[0])
        if not filled:
            return []
        for chunk in self.model:
            chunk.eval()
        kept = self.run(filled, forward, forward_only=True)[: len(batches)]
        for chunk in self.model:
            chunk.train()
        return kept

    def _passes(self, own: int) -> int:
        """Return the most forward passes of any rank that this one shares experts with: its tokens come here too."""
        if self.experts is None or self.experts.size() == 1:
            return own
        most = torch.tensor([own], device=next(self.model[0].parameters()).device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.experts)
        return int(most.item())

    def token_losses(self, batches: Sequence[PackedBatch], spare: Sequence[PackedBatch] = ()) -> list[Tensor]:
        """Compute float32 -log p(label) of the tokens that each batch asks for here; [] but on the last stage.

        `spare` is as in `forward_only`.
        """

        def kept(losses: TokenLosses) -> tuple[Tensor, Tensor, Tensor]:
            return losses.cross_entropy_t.sum(), no_count(losses.cross_entropy_t), losses.cross_entropy_t

        return self.forward_only(batches, lambda left, model: (model(next(left)), kept), spare)


def no_count(like: Tensor) -> Tensor:
    """Return the 0 that Megatron adds up where it counts tokens, as integers; our counts are in the loss terms."""
    return torch.zeros((), dtype=torch.int, device=like.device)


def one_or_all(items: list[Any]) -> Any:
    """Return the item alone where there is one, as Megatron takes one model chunk; else the list."""
    return items[0] if len(items) == 1 else items
