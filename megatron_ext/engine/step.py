"""One optimizer step over one global batch, and evaluation: batches -> forward and backward -> update."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_ext.batch import PackedBatch
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.platform import Platform
from megatron_ext.loss import loss_terms


@dataclass(frozen=True)
class GlobalLoss:
    """The loss of one global batch, the same on every process.

    Attributes:
        weighted_sum: sum of weight * loss over all ranks and micro-batches.
        denominator: what it is divided by, once.
        loss_sum: sum of the unweighted losses of the trained tokens.
        token_count: the trained tokens.
    """

    weighted_sum: float
    denominator: float
    loss_sum: float
    token_count: float

    @property
    def train_loss(self) -> float:
        """What the step minimises; 0 where nothing is trained."""
        return self.weighted_sum / self.denominator if self.denominator else 0.0

    @property
    def lm_loss(self) -> float:
        """Mean cross-entropy over the trained tokens; 0 where there is none."""
        return self.loss_sum / self.token_count if self.token_count else 0.0


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every process.

    Attributes:
        loss: of the global batch, before the update.
        grad_norm: before clipping.
        segments: attention segments of the global batch.
        effective_context: the keys that a token may see, twice their mean, over tokens and layers.
    """

    loss: GlobalLoss
    grad_norm: float
    segments: int
    effective_context: float


class Stepper:
    """Runs Megatron's pipeline schedule over packed batches."""

    def __init__(
        self,
        model: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        platform: Platform,
        ranks: Ranks,
    ) -> None:
        self.model, self.optimizer, self.platform, self.ranks = model, optimizer, platform, ranks
        self.schedule: Callable[..., list[Tensor]] = get_forward_backward_func()
        self.denominator = 0.0
        transformer = model[0].config
        transformer.finalize_model_grads_func = self._finalize
        transformer.grad_scale_func = optimizer.scale_loss
        if model[0].ddp_config.overlap_grad_reduce:
            transformer.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        if model[0].ddp_config.overlap_param_gather:
            transformer.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])

    def train(self, batches: Sequence[PackedBatch]) -> StepResult:
        """Forward, backward and update on this rank's micro-batches.

        Raises:
            FloatingPointError: the loss or the gradient norm is not finite; no checkpoint has the bad weights.
        """
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        trained, segments, context, tokens = self._global_facts(batches)
        self.denominator = trained
        loss = self._run(batches, forward_only=False)
        if not math.isfinite(loss.weighted_sum):
            raise FloatingPointError(f"loss: got {loss.weighted_sum}; lower the learning rate or look at the data")
        _, norm, _ = self.optimizer.step()
        if not math.isfinite(norm):
            raise FloatingPointError(f"grad_norm: got {norm}; lower the learning rate or look at the data")
        return StepResult(loss, float(norm), int(segments), context / tokens)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedBatch]) -> GlobalLoss:
        """Forward only; the weights are untouched."""
        for chunk in self.model:
            chunk.eval()
        loss = self._run(batches, forward_only=True)
        for chunk in self.model:
            chunk.train()
        return loss

    def _run(self, batches: Sequence[PackedBatch], forward_only: bool) -> GlobalLoss:
        on_device = [batch.to(self.platform.device) for batch in batches]
        iterators: list[Iterator[PackedBatch]] = [iter(on_device) for _ in self.model]
        terms = self.schedule(
            forward_step_func=_forward_step,
            data_iterator=_one_or_all(iterators),
            model=_one_or_all(self.model),
            num_microbatches=len(batches),
            seq_length=on_device[0].layout.tokens,
            micro_batch_size=1,  # the rows of a micro-batch lie end to end
            forward_only=forward_only,
        )
        total = torch.zeros(4, dtype=torch.float64, device=self.platform.device)
        if self.ranks.reports_loss:
            total += torch.stack(terms).sum(dim=0)
        dist.all_reduce(total)
        return GlobalLoss(*total.tolist())

    def _global_facts(self, batches: Sequence[PackedBatch]) -> list[float]:
        """Trained tokens, segments, sums of context over tokens and layers, and tokens x layers of the global batch."""
        layouts = [batch.layout for batch in batches]
        counts_layouts = self.ranks.context == 0  # all context-parallel ranks know the same layouts
        mine = [
            sum(int(batch.trained_t.sum()) for batch in batches),
            sum(layout.segments for layout in layouts) * counts_layouts,
            sum(batch.masks.context_sum for batch in batches) * counts_layouts,
            sum(batch.masks.layers * batch.layout.tokens for batch in batches) * counts_layouts,
        ]
        facts = torch.tensor(mine, dtype=torch.float64, device=self.platform.device)
        dist.all_reduce(facts, group=self.ranks.data_context_group)
        return facts.tolist()

    def _finalize(self, model: list[DistributedDataParallel], num_tokens: Tensor | None = None, **options: Any) -> None:
        """Megatron's reductions, then one division by our own float denominator instead of its integer count."""
        finalize_model_grads(model, None, **options)
        if self.denominator > 0:
            for chunk in model:
                chunk.scale_gradients(1.0 / self.denominator)


def _forward_step(batches: Iterator[PackedBatch], model: DistributedDataParallel) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(batches)
    return model(batch), functools.partial(_sum_losses, batch)


def _sum_losses(batch: PackedBatch, losses_t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total, terms = loss_terms(losses_t, batch.weights_t, batch.trained_t)
    # Megatron adds the middle one up as integers; our denominator is known before (`Stepper.train`)
    return total, torch.zeros((), dtype=torch.int, device=total.device), terms.stacked()


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items
