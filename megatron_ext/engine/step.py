"""Run one optimizer step over one global batch: forward and backward, update, result; also validation.

`launch` does not synchronize with the device: sums, division, clipping and the loss are computed on the device and
returned as tensors, which the caller reads later in one copy. Exceptions: a process without trained tokens of its own
checks whether others have some; a step that may be refused (`accepts`) is read before its update; the dispatcher of
experts needs the number of tokens of each, and ranks that share experts the number of short contexts of the others.

Within `_forward_backward`, Megatron's schedule determines the order. It calls

    forward     for each micro-batch and model chunk; the last stage adds the terms of its loss to the sums
    finalize    once, after the last backward pass: sums over all processes, then one division of the gradients
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron_ext.attention.health import AttentionHealth, Probe, of_layers
from megatron_ext.batch import PackedBatch, StepBatches
from megatron_ext.config import Config
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.device import AsyncHostCopy, to_device
from megatron_ext.engine.experts import LoadBalance
from megatron_ext.engine.optimizer import clip_and_update, squared_gradient_norm
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.platform import Platform
from megatron_ext.errors import DivergedError
from megatron_ext.evaluation.by_position import BINS, sums_by_position
from megatron_ext.loss import LossTerms, Number, TokenLosses, loss_terms
from megatron_ext.token_weighting.weigher import Weigher


class Outcome(Enum):
    """What a step did to the weights."""

    UPDATED = auto()
    NO_TOKENS = auto()  # unchanged: the global batch has no trained token
    REFUSED = auto()  # unchanged: a process did not accept the step


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    terms: LossTerms[float]  # summed over all ranks and micro-batches, before the update
    denominator: float  # divisor of the weighted sum
    grad_norm: float  # before clipping; 0 if there was nothing to train
    segments: int  # number in the global batch
    effective_context: float  # twice the mean number of keys that a token may see, over tokens and layers
    score_seconds: float  # duration of the short-context pass
    weight_max: float  # largest weight of a token
    # load-balancing loss of experts, without its coefficient: the mean over rows, or over micro-batches, of its sum
    # over layers
    moe_aux_loss: float
    outcome: Outcome = Outcome.UPDATED
    attention: AttentionHealth | None = None  # None if not measured

    @property
    def train_loss(self) -> float:
        """The minimized loss; 0 if no token is trained."""
        if not self.denominator:
            return 0.0
        return self.terms.weighted_sum / self.denominator

    @property
    def lm_loss(self) -> float:
        """Mean cross-entropy over the trained tokens; 0 if there are none."""
        return self.terms.loss_sum / (self.terms.token_count or 1.0)

    @property
    def weight_std(self) -> float:
        """Standard deviation of the trained tokens' weights; 0 if there are none."""
        count = self.terms.token_count or 1.0
        # rounding can make the variance of equal weights slightly negative
        return math.sqrt(max(self.terms.weight_square_sum / count - (self.terms.weight_sum / count) ** 2, 0.0))

    def divergence(self) -> DivergedError | None:
        """Return the error for a loss or a gradient norm that is not finite; None if both are."""
        terms = self.terms
        values = {"loss": terms.loss_sum, "weighted loss": terms.weighted_sum, "gradient norm": self.grad_norm}
        return next((DivergedError(what, value) for what, value in values.items() if not math.isfinite(value)), None)


@dataclass(frozen=True, eq=False)
class PendingStep:
    """A step in flight: launched, results not yet read."""

    values: Mapping[str, Tensor]  # on the device, the same on every process
    stepper: "Stepper"
    score_times: tuple[Any, Any]  # begin and end of the short-context pass, of `_now`
    outcome: Outcome

    def result(self, values: Mapping[str, list[float]] | None = None) -> StepResult:
        """Return the result of the step, given `values` on the host; without them, wait for the device.

        The weights have already been changed, whatever the loss: check `StepResult.divergence` before saving or
        validating.
        """
        if values is None:
            values = AsyncHostCopy(self.values).values()
        *sums, balance = values["sums"]
        terms: LossTerms[float] = LossTerms(*sums)
        segments, context, tokens = values["facts"]
        begin, end = self.score_times
        attention = None
        if "attention" in values:
            attention = AttentionHealth.of(values["attention"])
        return StepResult(
            terms=terms,
            denominator=self.stepper.denominator(terms),
            grad_norm=values["squared_norm"][0] ** 0.5,
            segments=int(segments),
            effective_context=context / tokens,
            outcome=self.outcome,
            score_seconds=end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3,
            weight_max=values["weight_max"][0],
            attention=attention,
            moe_aux_loss=balance / self.stepper.groups,
        )


def _now(device: torch.device) -> Any:
    """Return the current time in seconds, or on CUDA an event of it, without synchronizing the host."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Stepper:
    """Runs optimizer steps and validation with Megatron's pipeline schedule over packed batches.

    `model` has the wrapped chunks of this pipeline stage; the ranks in `context` share each row.
    """

    def __init__(
        self,
        model: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        platform: Platform,
        ranks: Ranks,
        config: Config,
        context: CPGroup,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.platform = platform
        self.ranks = ranks
        self.weighting = config.weighting
        self.z_loss = config.training.z_loss
        self.by_weights = config.weighting.loss_denominator == "weights"
        dumped = config.checkpoint.dump_trajectory is not None
        self.weigher = Weigher(config.weighting, config.data.seq_length, context, keeps_rows=dumped)
        self.layers = config.model.num_layers
        self.heads = config.model.num_attention_heads
        self.pipeline = Pipeline(model, ranks.expert_group)
        self.groups = config.data.global_batch_size  # over which the load-balancing loss is averaged
        if not config.balances_rows:
            self.groups //= config.data.micro_batch_size
        self.balance: LoadBalance = model[0].config.packed_balance
        self.expert_biases = [
            buffer for chunk in model for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")
        ]
        transformer = model[0].config
        transformer.grad_scale_func = optimizer.scale_loss
        if model[0].ddp_config.overlap_grad_reduce:
            transformer.no_sync_func = one_or_all([chunk.no_sync for chunk in model])

    def denominator(self, terms: LossTerms[Number]) -> Number:
        """Return the divisor of the weighted sum: the sum of weights, or the number of trained tokens."""
        if self.by_weights:
            return terms.weight_sum
        return terms.token_count

    def launch(self, step: StepBatches, accepts: Callable[[StepResult], bool] | None = None) -> PendingStep:
        """Launch forward, backward and update of this rank's micro-batches.

        `accepts` returns, given the result, whether the weights may change; the host waits for it. If any process
        refuses, weights and optimizer stay unchanged on all, and the gradients stay in their buffers.
        """
        device = self.platform.device
        trained = sum(batch.total_weight if self.by_weights else batch.total_trained for batch in step.train)
        facts = self._global_facts(step.train, trained)
        batches = [batch.to(device) for batch in step.train]
        score_begin = _now(device)
        if self.weighting.token_weighting == "unfrozen" and self.weighting.needs_short_losses:
            short = [batch.to(device) for batch in step.short]
            losses = self.pipeline.forward_only(short, spare=[replace(batch, probe=None) for batch in batches])
            if self.ranks.last_stage:
                batches = self.weigher.fill_in(batches, short, losses)
        score_times = score_begin, _now(device)
        if self.balance.coefficient:
            self.balance.begin(facts[-1], self.groups)
        biases = [bias.clone() for bias in self.expert_biases]
        sums, largest_weight = self._forward_backward(batches)
        values = {"sums": sums, "facts": facts[:-1], "weight_max": largest_weight}
        if step.attention_measured:
            values["attention"] = of_layers(self._attention_by_head(batches[0].probe))
        if trained or facts[-1].item():
            outcome = Outcome.UPDATED
            squared_norm = squared_gradient_norm(self.optimizer, device)
        else:  # the gradient is zero, but momentum and weight decay would still change the weights
            outcome = Outcome.NO_TOKENS
            squared_norm = torch.zeros((), device=device)
        launched = PendingStep(values | {"squared_norm": squared_norm}, self, score_times, outcome)
        if outcome is Outcome.UPDATED and accepts is not None:
            refusals = to_device([float(not accepts(launched.result()))], device)
            dist.all_reduce(refusals)
            if refusals.item():
                launched = replace(launched, outcome=Outcome.REFUSED)
        if launched.outcome is Outcome.UPDATED:
            clip_and_update(self.optimizer, squared_norm)
        else:  # Megatron has already updated the biases
            for bias, before in zip(self.expert_biases, biases, strict=True):
                bias.copy_(before)
        return launched

    def _attention_by_head(self, probe: Probe | None) -> Tensor:
        """Combine the statistics of the layers and heads of all processes; float64 [6, layers, N].

        Each head of a layer is on one tensor-parallel rank of one pipeline stage, so a sum over processes combines
        them.
        """
        ranks = self.ranks
        by_head = torch.zeros(6, self.layers, self.heads, dtype=torch.float64, device=self.platform.device)
        if probe is not None and probe.by_layer:  # a pipeline stage may have no layer
            layers, measured = probe.measured()
            if ranks.context == 0:  # all context-parallel ranks have the same values
                first = ranks.tensor * measured.shape[-1]
                for number, layer in enumerate(layers):
                    by_head[:, layer - 1, first : first + measured.shape[-1]] = measured[:, number]
        dist.all_reduce(by_head)
        return by_head

    def evaluate(self, batches: Sequence[PackedBatch]) -> Tensor:
        """Sum the unweighted losses of the trained tokens by position, in evaluation mode; float64 [2, BINS], host."""
        on_device = [batch.to(self.platform.device) for batch in batches]
        by_batch = self.pipeline.forward_only(
            on_device,
            lambda batch, losses: sums_by_position(losses.cross_entropy_t, batch.positions_t, batch.trained_t),
        )
        sums = torch.zeros(2, BINS, dtype=torch.float64, device=self.platform.device)
        if self.ranks.reports_loss:
            sums += torch.stack(by_batch).sum(dim=0)
        dist.all_reduce(sums)
        return sums.cpu()

    def _forward_backward(self, batches: Sequence[PackedBatch]) -> tuple[Tensor, Tensor]:
        """Compute the global batch's gradients in their buffers.

        Returns:
            The sums of its loss, float64, in the order of `LossTerms`, followed by the load-balancing loss; and the
            largest weight of a token, float32 [].
        """
        device = self.platform.device
        sums = torch.zeros(len(LossTerms._fields) + 1, dtype=torch.float64, device=device)
        weighted = self.weighting.token_weighting != "none"
        largest = torch.full((), 0.0 if weighted else 1.0, device=device)

        def weighted_loss(batch: PackedBatch, losses: TokenLosses) -> tuple[Tensor, None]:
            weights_t, scores_t = self.weigher(batch, losses)
            total, terms = loss_terms(losses, weights_t, batch.trained_t, self.z_loss, scores_t)
            sums[:-1].add_(torch.stack(terms))
            if weighted:
                largest.copy_(torch.maximum(largest, (weights_t * batch.trained_t).max()))
            return total, None

        def finalize(model: list[DistributedDataParallel], num_tokens: Tensor | None = None, **options: Any) -> None:
            # None disables Megatron's division by an integer count of tokens, which does not support weights
            finalize_model_grads(model, None, **options)
            if not self.ranks.reports_loss:  # all processes get the same sums, including stages that compute no loss
                sums[:-1].zero_()
            if self.balance.total is not None:
                sums[-1].copy_(self.balance.total)
            dist.all_reduce(sums)
            denominator = self.denominator(LossTerms(*sums[:-1].unbind()))
            factor = torch.where(denominator > 0, 1.0 / denominator, 1.0).float()
            for chunk in model:
                chunk.scale_gradients(factor)

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model[0].config.finalize_model_grads_func = finalize
        self.pipeline.run(batches, weighted_loss)
        if weighted:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return sums, largest

    def _global_facts(self, batches: Sequence[PackedBatch], trained: float) -> Tensor:
        """Sum segments, context over tokens and layers, tokens x layers, and `trained` over the global batch."""
        counts = [
            sum(batch.layout.segments for batch in batches),
            sum(batch.masks.context_sum for batch in batches),
            sum(len(batch.masks.is_local_layer) * batch.layout.tokens for batch in batches),
            trained,
        ]
        if self.ranks.context > 0:  # all context-parallel ranks have the same layouts
            counts = [0] * len(counts)
        facts = to_device([float(count) for count in counts], self.platform.device)
        dist.all_reduce(facts, group=self.ranks.data_context_group)
        return facts


class Pipeline:
    """Runs the model chunks of this pipeline stage, wrapped or not.

    The ranks in `experts`, which together hold all experts, run the same number of forward passes.
    """

    def __init__(self, model: Sequence[nn.Module], experts: dist.ProcessGroup | None = None) -> None:
        self.model = list(model)
        self.experts = experts
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

        def forward(iterator: Iterator[PackedBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
            batch = next(iterator)

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
        value_of: Callable[[PackedBatch, TokenLosses], Tensor] = lambda batch, losses: losses.cross_entropy_t,
        spare: Sequence[PackedBatch] = (),
    ) -> list[Tensor]:
        """Return the value of each micro-batch on the last stage, without gradients and in evaluation mode.

        The default is -log p(label), float32, of the tokens that the batch requests. Other stages return []. Nothing is
        run without batches, unless ranks that share experts have some: this rank then runs a `spare` one and discards
        the result.
        """
        filled = list(batches)
        passes = len(batches)
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
        values = self.run(
            filled, lambda batch, losses: (losses.cross_entropy_t.sum(), value_of(batch, losses)), forward_only=True
        )
        for chunk in self.model:
            chunk.train()
        return values[: len(batches)]


def one_or_all(items: list[Any]) -> Any:
    """Return the item if there is only one, else the list, as Megatron expects."""
    if len(items) == 1:
        return items[0]
    return items
