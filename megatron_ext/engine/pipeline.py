"""Run Megatron's pipeline schedule over packed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron_ext.batch import PackedBatch
from megatron_ext.loss import TokenLosses

# Megatron's forward step: (batches, model) -> (output, output -> (loss for backward, 0, value to return)).
# The 0 is a token count, int []; our counts are in the loss terms.
Forward = Callable[[Iterator[PackedBatch], nn.Module], tuple[Any, Callable[..., Any]]]


class Pipeline:
    """Runs the model chunks of this pipeline stage, wrapped or not.

    The ranks in `experts`, which together hold all experts, run the same number of forward passes.
    """

    def __init__(self, model: Sequence[nn.Module], experts: dist.ProcessGroup | None = None) -> None:
        self.model, self.experts = list(model), experts
        self._schedule: Callable[..., list[Any]] = get_forward_backward_func()

    def run(self, batches: Sequence[PackedBatch], forward: Forward, *, forward_only: bool) -> list[Any]:
        """Return the value of each micro-batch on the last stage; [] on the others.

        The micro-batches have equal lengths, because stages receive activations of a size known in advance.
        """
        iterators: list[Iterator[PackedBatch]] = [iter(batches) for _ in self.model]
        return self._schedule(
            forward_step_func=forward,
            data_iterator=one_or_all(iterators),
            model=one_or_all(self.model),
            num_microbatches=len(batches),
            seq_length=batches[0].layout.tokens,
            micro_batch_size=1,  # the rows of a micro-batch are concatenated
            forward_only=forward_only,
        )

    @torch.no_grad()
    def forward_only(
        self, batches: Sequence[PackedBatch], forward: Forward, spare: Sequence[PackedBatch] = ()
    ) -> list[Any]:
        """Run like `run`, without gradients and in evaluation mode.

        Nothing is run without batches, unless ranks that share experts have some: this rank then runs a `spare` one and
        discards the result.
        """
        filled, passes = list(batches), len(batches)
        if self.experts is not None and self.experts.size() > 1:  # the tokens of the others are routed to this rank too
            most = torch.tensor([passes], device=next(self.model[0].parameters()).device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.experts)
            passes = int(most.item())
        while len(filled) < passes:
            filled.append((batches or spare)[0])
        if not filled:
            return []
        for chunk in self.model:
            chunk.eval()
        kept = self.run(filled, forward, forward_only=True)[: len(batches)]
        for chunk in self.model:
            chunk.train()
        return kept

    def token_losses(self, batches: Sequence[PackedBatch], spare: Sequence[PackedBatch] = ()) -> list[Tensor]:
        """Return -log p(label), float32, of the tokens that each batch requests; [] except on the last stage.

        `spare` is as in `forward_only`.
        """

        def kept(losses: TokenLosses) -> tuple[Tensor, Tensor, Tensor]:
            return (
                losses.cross_entropy_t.sum(),
                losses.cross_entropy_t.new_zeros((), dtype=torch.int),
                losses.cross_entropy_t,
            )

        return self.forward_only(batches, lambda left, model: (model(next(left)), kept), spare)


def one_or_all(items: list[Any]) -> Any:
    """Return the item if there is only one, else the list, as Megatron expects."""
    return items[0] if len(items) == 1 else items
