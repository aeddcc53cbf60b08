"""Run Megatron's pipeline schedule over packed batches."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron_ext.batch import PackedBatch
from megatron_ext.loss import TokenLosses


class Pipeline:
    """Runs the model chunks of this pipeline stage, wrapped or not.

    The ranks in `experts`, which together hold all experts, run the same number of forward passes.
    """

    def __init__(self, model: Sequence[nn.Module], experts: dist.ProcessGroup | None = None) -> None:
        self.model, self.experts = list(model), experts
        self._schedule: Callable[..., list[Any]] = get_forward_backward_func()

    def run(
        self,
        batches: Sequence[PackedBatch],
        reduce: Callable[[PackedBatch, TokenLosses], tuple[Tensor, Any]],
        *,
        forward_only: bool = False,
    ) -> list[Any]:
        """Run forward, and backward unless `forward_only`; return the value of each micro-batch on the last stage.

        `reduce` returns the loss of a micro-batch [], for backward, and its value. Other stages return []. The
        micro-batches have equal lengths, because stages receive activations of a size known in advance.
        """

        def forward(left: Iterator[PackedBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
            batch = next(left)

            def reduced(losses: TokenLosses) -> tuple[Tensor, Tensor, Any]:
                loss, value = reduce(batch, losses)
                return loss, loss.new_zeros((), dtype=torch.int), value  # Megatron's count of tokens is not used

            return model(batch), reduced

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
        self,
        batches: Sequence[PackedBatch],
        value_of: Callable[[PackedBatch, TokenLosses], Tensor],
        spare: Sequence[PackedBatch] = (),
    ) -> list[Tensor]:
        """Return the value of each micro-batch on the last stage, without gradients and in evaluation mode.

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
        found = self.run(
            filled,
            lambda batch, losses: (losses.cross_entropy_t.sum(), value_of(batch, losses)),
            forward_only=True,
        )
        for chunk in self.model:
            chunk.train()
        return found[: len(batches)]

    def token_losses(self, batches: Sequence[PackedBatch], spare: Sequence[PackedBatch] = ()) -> list[Tensor]:
        """Return -log p(label), float32, of the tokens that each batch requests; [] except on the last stage.

        `spare` is as in `forward_only`.
        """
        return self.forward_only(batches, lambda batch, losses: losses.cross_entropy_t, spare)


def one_or_all(items: list[Any]) -> Any:
    """Return the item if there is only one, else the list, as Megatron expects."""
    return items[0] if len(items) == 1 else items
