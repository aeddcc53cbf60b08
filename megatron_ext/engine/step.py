"""One optimizer step over one global batch, and evaluation: batches -> forward and backward -> update."""

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

from megatron_ext.attention.exchange import ContextGroup, Traffic
from megatron_ext.batch import PackedBatch
from megatron_ext.config import Config
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.pipeline import Pipeline, no_count, one_or_all
from megatron_ext.engine.platform import Platform
from megatron_ext.engine.rows import StepBatches
from megatron_ext.engine.weighting import Weigher, Weights
from megatron_ext.evaluation.by_position import BINS, PositionLosses, sums_by_position
from megatron_ext.loss import LossTerms, TokenLosses, loss_terms
from megatron_ext.token_weighting import NotFiniteError


@dataclass(frozen=True)
class GlobalLoss:
    """The loss of one global batch, the same on every process.

    Attributes:
        weighted_sum: sum of weight * loss over all ranks and micro-batches, and of the z-loss.
        loss_sum: sum of the unweighted losses of the trained tokens.
        token_count: the trained tokens.
        weight_sum, weight_square_sum, zero_count, score_sum: of their weights and scores.
        denominator: what the weighted sum is divided by, once.
    """

    weighted_sum: float
    loss_sum: float
    token_count: float
    weight_sum: float
    weight_square_sum: float
    zero_count: float
    score_sum: float
    denominator: float

    @property
    def train_loss(self) -> float:
        """What the step minimises; 0 where nothing is trained."""
        return self.weighted_sum / self.denominator if self.denominator else 0.0

    @property
    def lm_loss(self) -> float:
        """Mean cross-entropy over the trained tokens; 0 where there is none."""
        return self.loss_sum / self.token_count if self.token_count else 0.0

    @property
    def weight_std(self) -> float:
        """Standard deviation of the trained tokens' weights."""
        count = self.token_count or 1.0
        return math.sqrt(max(self.weight_square_sum / count - (self.weight_sum / count) ** 2, 0.0))


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every process.

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
    """A step's loss or gradient norm is not finite.

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
        traffic: counts what goes through the context-parallel group.
    """

    def __init__(
        self,
        model: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        platform: Platform,
        ranks: Ranks,
        config: Config,
        traffic: Traffic,
    ) -> None:
        self.model, self.optimizer, self.platform, self.ranks = model, optimizer, platform, ranks
        self.weighting, self.z_loss = config.weighting, config.training.z_loss
        group = ContextGroup(ranks.context, ranks.context_size, ranks.context_group, traffic)
        dumped = config.checkpoint.dump_trajectory is not None
        self.weigher = Weigher(config.weighting, config.data.seq_length, group, keeps_rows=dumped)
        self.pipeline = Pipeline(model)
        transformer = model[0].config
        transformer.finalize_model_grads_func = self._finalize
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
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._sums = torch.zeros(len(_TERMS), dtype=torch.float64, device=self.platform.device)
        self._largest = torch.zeros((), device=self.platform.device)
        self.pipeline.run(batches, self._train_forward, forward_only=False)
        loss = self._loss
        if not math.isfinite(loss.weighted_sum):
            if math.isfinite(loss.loss_sum):
                raise DivergedError("weighted loss", loss.weighted_sum)
            raise DivergedError("loss", loss.loss_sum)
        norm = self.optimizer.step()[1] if loss.denominator else 0.0
        if not math.isfinite(norm):
            raise DivergedError("gradient norm", norm)
        return StepResult(
            loss,
            float(norm),
            int(segments),
            context / tokens,
            skipped=not loss.denominator,
            score_seconds=score_seconds,
            weight_max=self._maximum(self._largest) if self.weighting.token_weighting != "none" else 1.0,
        )

    def evaluate(self, batches: Sequence[PackedBatch]) -> PositionLosses:
        """Forward only, every trained token weighing 1; the weights are untouched."""
        on_device = [batch.to(self.platform.device) for batch in batches]
        found = self.pipeline.forward_only(on_device, _evaluation_forward)
        sums = torch.zeros(2, BINS, dtype=torch.float64, device=self.platform.device)
        if self.ranks.reports_loss:
            sums += torch.stack(found).sum(dim=0)
        dist.all_reduce(sums)
        return PositionLosses(sums.cpu())

    def _with_short_losses(self, batches: list[PackedBatch], short: list[PackedBatch]) -> list[PackedBatch]:
        on_device = [batch.to(self.platform.device) for batch in short]
        losses = self.pipeline.token_losses(on_device) if short else []
        if not self.ranks.last_stage:
            return batches
        return self.weigher.fill_in(batches, on_device, losses)

    def _train_forward(self, batches: Iterator[PackedBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        batch = next(batches)
        return model(batch), functools.partial(self._weighted_loss, batch)

    def _weighted_loss(self, batch: PackedBatch, losses: TokenLosses) -> tuple[Tensor, Tensor, Tensor]:
        try:
            weights = self.weigher(batch, losses)
        except NotFiniteError:  # the other processes do not know: they learn it from the sum that all of them get
            weights = Weights(torch.full_like(batch.weights_t, math.nan))
        total, terms = loss_terms(losses, weights.weights_t, batch.trained_t, self.z_loss, weights.scores_t)
        self._sums += terms.stacked()
        self._largest = torch.maximum(self._largest, (weights.weights_t * batch.trained_t).max())
        return total, no_count(total), self._sums

    def _global_facts(self, batches: Sequence[PackedBatch]) -> list[float]:
        """Segments, sums of context over tokens and layers, and tokens x layers of the global batch."""
        counts_layouts = self.ranks.context == 0  # all context-parallel ranks know the same layouts
        mine = [
            sum(batch.layout.segments for batch in batches) * counts_layouts,
            sum(batch.masks.context_sum for batch in batches) * counts_layouts,
            sum(batch.masks.layers * batch.layout.tokens for batch in batches) * counts_layouts,
        ]
        facts = torch.tensor(mine, dtype=torch.float64, device=self.platform.device)
        dist.all_reduce(facts, group=self.ranks.data_context_group)
        return facts.tolist()

    def _finalize(self, model: list[DistributedDataParallel], num_tokens: Tensor | None = None, **options: Any) -> None:
        """Megatron's reductions, then one division by our own float denominator instead of its integer count."""
        finalize_model_grads(model, None, **options)
        sums = self._sums if self.ranks.reports_loss else torch.zeros_like(self._sums)
        self._loss = self._global_loss(sums)
        if self._loss.denominator > 0:
            for chunk in model:
                chunk.scale_gradients(1.0 / self._loss.denominator)

    def _global_loss(self, sums: Tensor) -> GlobalLoss:
        """Of the sums of all processes; every one gets the same, the stages without a loss too."""
        dist.all_reduce(sums)
        by_name = dict(zip(_TERMS, sums.tolist(), strict=True))
        divisor = "weight_sum" if self.weighting.loss_denominator == "weights" else "token_count"
        return GlobalLoss(**by_name, denominator=by_name[divisor])

    def _maximum(self, value: Tensor) -> float:
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()

    def _now(self) -> float:
        if self.platform.device.type == "cuda" and self.weighting.token_weighting == "unfrozen":
            torch.cuda.synchronize()
        return time.perf_counter()


_TERMS = tuple(field.name for field in fields(LossTerms))


def _evaluation_forward(batches: Iterator[PackedBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    batch = next(batches)

    def binned(losses: TokenLosses) -> tuple[Tensor, Tensor, Tensor]:
        loss_t = losses.cross_entropy_t
        return loss_t.sum(), no_count(loss_t), sums_by_position(loss_t, batch.positions_t, batch.trained_t)

    return model(batch), binned
