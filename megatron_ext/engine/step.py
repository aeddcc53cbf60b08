"""One optimizer step over one global batch: batches -> forward and backward -> update; and validation.

Between `_forward_backward`'s first line and its last, Megatron's schedule fixes the order. It calls back

    forward     for each micro-batch and model chunk; the last stage adds the terms of its loss to the sums
    finalize    once, after the last backward pass: the sums of all processes, then the one division of the gradients
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron_ext.attention.exchange import ContextGroup
from megatron_ext.batch import PackedBatch, StepBatches
from megatron_ext.config import Config
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.pipeline import Pipeline, no_count, one_or_all
from megatron_ext.engine.platform import Platform
from megatron_ext.evaluation.by_position import BINS, PositionLosses, sums_by_position
from megatron_ext.loss import GlobalLoss, LossTerms, TokenLosses, loss_terms
from megatron_ext.token_weighting import NotFiniteError
from megatron_ext.token_weighting.weigher import Weigher, Weights


@dataclass(frozen=True)
class StepResult:
    """Says what one optimizer step did, the same on every process.

    Attributes:
        loss: of the global batch, before the update.
        grad_norm: before clipping; 0 where the step was skipped.
        segments: attention segments of the global batch.
        effective_context: the keys that a token may see, twice their mean, over tokens and layers.
        skipped: nothing was trained, and no weight changed.
        score_seconds: the short-context pass.
        weight_max: the largest weight.
    """

    loss: GlobalLoss
    grad_norm: float
    segments: int
    effective_context: float
    skipped: bool
    score_seconds: float
    weight_max: float


class DivergedError(FloatingPointError):
    """Says that a loss or a gradient norm is not finite.

    Attributes:
        what: which of them.
        value: nan, inf or -inf.
    """

    def __init__(self, what: str, value: float) -> None:
        super().__init__(f"the {what} is {value}")
        self.what, self.value = what, value


class Stepper:
    """Runs Megatron's pipeline schedule over packed batches.

    Args:
        model: the wrapped chunks of this pipeline stage.
        optimizer: over them.
        platform, ranks: where this process runs and stands.
        config: the loss and its weights.
        context: the ranks that share each row.
    """

    def __init__(
        self,
        model: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        platform: Platform,
        ranks: Ranks,
        config: Config,
        context: ContextGroup,
    ) -> None:
        self.model, self.optimizer, self.platform, self.ranks = model, optimizer, platform, ranks
        self.weighting, self.z_loss = config.weighting, config.training.z_loss
        dumped = config.checkpoint.dump_trajectory is not None
        self.weigher = Weigher(config.weighting, config.data.seq_length, context, keeps_rows=dumped)
        self.pipeline = Pipeline(model)
        transformer = model[0].config
        transformer.grad_scale_func = optimizer.scale_loss
        if model[0].ddp_config.overlap_grad_reduce:
            transformer.no_sync_func = one_or_all([chunk.no_sync for chunk in model])

    def train(self, step: StepBatches) -> StepResult:
        """Forward, backward and update on this rank's micro-batches.

        Raises:
            DivergedError: the loss or the gradient norm is not finite; all processes raise it, and no checkpoint has
                the bad weights.
        """
        batches = [batch.to(self.platform.device) for batch in step.train]
        segments, context, tokens = self._global_facts(batches)
        began = self._now()
        if self.weighting.token_weighting == "unfrozen" and self.weighting.needs_short_losses:
            batches = self._with_short_losses(batches, step.short)
        score_seconds = self._now() - began

        loss, weight_max = self._forward_backward(batches)
        if not math.isfinite(loss.terms.weighted_sum):
            unweighted = loss.terms.loss_sum
            if math.isfinite(unweighted):
                raise DivergedError("weighted loss", loss.terms.weighted_sum)
            raise DivergedError("loss", unweighted)

        # without a trained token there is no gradient, but momentum and weight decay would still move the weights
        grad_norm = self.optimizer.step()[1] if loss.denominator else 0.0
        if not math.isfinite(grad_norm):
            raise DivergedError("gradient norm", grad_norm)
        return StepResult(
            loss=loss,
            grad_norm=float(grad_norm),
            segments=int(segments),
            effective_context=context / tokens,
            skipped=not loss.denominator,
            score_seconds=score_seconds,
            weight_max=weight_max,
        )

    def evaluate(self, batches: Sequence[PackedBatch]) -> PositionLosses:
        """Sum the losses of the trained tokens, each weighing 1, by position; the model's weights are untouched."""

        def forward(batches: Iterator[PackedBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
            batch = next(batches)

            def binned(losses: TokenLosses) -> tuple[Tensor, Tensor, Tensor]:
                loss_t = losses.cross_entropy_t
                return loss_t.sum(), no_count(loss_t), sums_by_position(loss_t, batch.positions_t, batch.trained_t)

            return model(batch), binned

        on_device = [batch.to(self.platform.device) for batch in batches]
        by_batch = self.pipeline.forward_only(on_device, forward)
        sums = torch.zeros(2, BINS, dtype=torch.float64, device=self.platform.device)
        if self.ranks.reports_loss:
            sums += torch.stack(by_batch).sum(dim=0)
        dist.all_reduce(sums)
        return PositionLosses(sums.cpu())

    def _with_short_losses(self, batches: list[PackedBatch], short: list[PackedBatch]) -> list[PackedBatch]:
        """Run the short-context pass; every process takes part, the last stage alone learns the losses."""
        on_device = [batch.to(self.platform.device) for batch in short]
        losses = self.pipeline.token_losses(on_device) if short else []
        return self.weigher.fill_in(batches, on_device, losses) if self.ranks.last_stage else batches

    def _forward_backward(self, batches: Sequence[PackedBatch]) -> tuple[GlobalLoss, float]:
        """Leave the global batch's gradients in the buffers; return its loss and the largest weight of a token."""
        device = self.platform.device
        sums = torch.zeros(len(fields(LossTerms)), dtype=torch.float64, device=device)
        largest = torch.zeros((), device=device)
        finished: list[GlobalLoss] = []

        def forward(batches: Iterator[PackedBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
            batch = next(batches)
            return model(batch), functools.partial(weighted_loss, batch)

        def weighted_loss(batch: PackedBatch, losses: TokenLosses) -> tuple[Tensor, Tensor, Tensor]:
            try:
                weights = self.weigher(batch, losses)
            except NotFiniteError:  # the other processes do not know: they learn it from the sum that all of them get
                weights = Weights(torch.full_like(batch.weights_t, math.nan))
            total, terms = loss_terms(losses, weights.weights_t, batch.trained_t, self.z_loss, weights.scores_t)
            sums.add_(terms.stacked())
            largest.copy_(torch.maximum(largest, (weights.weights_t * batch.trained_t).max()))
            return total, no_count(total), sums

        def finalize(model: list[DistributedDataParallel], num_tokens: Tensor | None = None, **options: Any) -> None:
            # None: Megatron's own division is by an integer count of tokens, which cannot carry weights
            finalize_model_grads(model, None, **options)
            loss = self._summed(sums)
            if loss.denominator > 0:
                for chunk in model:
                    chunk.scale_gradients(1.0 / loss.denominator)
            finished.append(loss)

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model[0].config.finalize_model_grads_func = finalize
        self.pipeline.run(batches, forward, forward_only=False)
        (loss,) = finished
        if self.weighting.token_weighting == "none":
            return loss, 1.0
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return loss, largest.item()

    def _summed(self, sums: Tensor) -> GlobalLoss:
        """Add up all processes' sums; every one gets the same loss, the stages that compute none too."""
        if not self.ranks.reports_loss:
            sums = torch.zeros_like(sums)
        dist.all_reduce(sums)
        terms: LossTerms[float] = LossTerms(*sums.tolist())
        by_weights = self.weighting.loss_denominator == "weights"
        return GlobalLoss(terms, denominator=terms.weight_sum if by_weights else terms.token_count)

    def _global_facts(self, batches: Sequence[PackedBatch]) -> list[float]:
        """Count segments, the context summed over tokens and layers, and tokens x layers, of the global batch."""
        counts_layouts = self.ranks.context == 0  # all context-parallel ranks know the same layouts
        mine = [
            sum(batch.layout.segments for batch in batches) * counts_layouts,
            sum(batch.masks.context_sum for batch in batches) * counts_layouts,
            sum(batch.masks.layers * batch.layout.tokens for batch in batches) * counts_layouts,
        ]
        facts = torch.tensor(mine, dtype=torch.float64, device=self.platform.device)
        dist.all_reduce(facts, group=self.ranks.data_context_group)
        return facts.tolist()

    def _now(self) -> float:
        """Return the time in seconds, after what the GPU has been given where the score's share is measured."""
        if self.platform.device.type == "cuda" and self.weighting.token_weighting == "unfrozen":
            torch.cuda.synchronize()
        return time.perf_counter()
