"""Mixtures of experts: Megatron-Core's layers, with a load-balancing loss that is independent of the parallel layout.

For each layer and the T tokens of a group, each routed to k of E experts (arXiv 2101.03961, equations 4 to 6, with k
instead of 1):

    loss = E sum_e f_e P_e        f_e = choices of expert e / (k T)        P_e = mean of softmax(router logits)_e

With sigmoid scores s it is DeepSeek-V3's loss (arXiv 2412.19437, equations 17 to 20): P_e is the mean of s_e / sum s,
and f_e counts the k largest scores of each token, which the expert bias and groups may not choose.

The loss is 1 if all experts are chosen equally often, at most E / k. A group is a row (`seq_aux_loss`) or a micro-batch
of rows (`aux_loss`). The term added to the run's loss is moe_aux_loss_coeff x the sum over layers of the mean over the
global batch's groups. f is counted over the ranks that share the group's tokens and has no gradient; each rank computes
P for its own tokens. So the loss of a row does not depend on the distribution of its tokens, layers, experts or other
rows. The loss of a micro-batch depends on which rows it contains.

Megatron's router does not distinguish rows; it multiplies its loss by the number of tokens of a rank, and Megatron
later divides by the token count. Here all gradients are divided once, by the denominator of the weighted loss, which is
known on the device before the first backward pass (`LoadBalance.begin`); the balancing loss is multiplied by it.

The expert bias (arXiv 2412.19437, section 2.1.2) is a buffer of each router, equal on all ranks. Routers count the
tokens of each expert in a step; at its end Megatron's `finalize_model_grads` sums the counts over data-, context- and
tensor-parallel ranks, and adds moe_router_bias_update_rate to the bias of each expert with fewer tokens than the mean
and subtracts it from those with more. `Stepper` undoes this if the step changes no weight.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


@dataclass(eq=False)
class LoadBalance:
    """The factor of a step's balancing losses, and their sum."""

    coefficient: float  # of the loss; 0 disables it
    by_row: bool  # whether a group is a row of `row_length` tokens; otherwise it is a micro-batch
    row_length: int
    # float64 [], this process's part of the sum over layers and groups, without the coefficient
    total: Tensor | None = None
    factor: Tensor | None = None  # float32 []

    def begin(self, denominator: Tensor, groups: int) -> None:
        """Begin a step, whose global batch has a number of groups.

        All gradients are divided by the denominator, float64 [] on the device, at the end of the step.
        """
        self.total = torch.zeros_like(denominator)
        self.factor = (self.coefficient * denominator / groups).float()

    def attach(self, probabilities_tE: Tensor, losses: Tensor) -> Tensor:
        """Return the router's probabilities; their backward pass also starts the backward pass of the losses []."""
        assert self.total is not None
        assert self.factor is not None
        self.total += losses.detach()
        attached: Tensor = MoEAuxLossAutoScaler.apply(probabilities_tE, losses * self.factor)
        return attached


def balance_losses(
    scores_tE: Tensor,
    chosen_tE: Tensor,
    choices: int,
    group_tokens: int,
    shared: dist.ProcessGroup,
    rows_t: Tensor | None = None,
) -> Tensor:
    """Return this rank's part of the sum of all groups' losses, float32 []; the sum over the ranks is the total.

    Args:
        scores_tE: float32, the scores of this rank's tokens, of sum 1 for each.
        chosen_tE: bool, the experts of each token that f counts; there are k `choices` per token.
        group_tokens: tokens of each group, on all ranks.
        shared: the ranks that share the tokens.
        rows_t: int64, the group of each of these tokens, from 0; None if there is one group.
    """
    tokens, experts = scores_tE.shape
    if rows_t is None:
        chosen_gE = chosen_tE.sum(dim=0, dtype=torch.float32)[None]
    else:  # sums of integers, exact in any order
        chosen_gE = chosen_tE.new_zeros(tokens * shared.size() // group_tokens, experts, dtype=torch.float32)
        chosen_gE.index_add_(0, rows_t, chosen_tE.float())
    if shared.size() > 1:
        dist.all_reduce(chosen_gE, group=shared)
    counts = chosen_gE  # [1, E]
    if rows_t is not None:
        counts = chosen_gE[rows_t]  # [t, E], of each token's group
    weighed = scores_tE * counts
    return weighed.sum() * (experts / (choices * group_tokens**2))


class BalancedRouter(TopKRouter):
    """Adds the load-balancing loss to Megatron's router, and counts the tokens of its experts in float32."""

    rows_t: Tensor | None = None  # the row of each token in the next call, as in `PackedBatch`
    expert_bias: Tensor | None  # float32 [E]
    local_tokens_per_expert: Tensor | None  # float32 [E], since the last step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_expert_bias = False  # disables Megatron's own count, which is compiled, and not only for training

    def _apply(self, *args: Any, **kwargs: Any) -> "BalancedRouter":
        """Convert the weights; bias and counts stay float32, because bf16 counts up to 256 only."""
        bias = self.expert_bias
        super()._apply(*args, **kwargs)
        if bias is not None:
            self.expert_bias = bias.to(self.weight.device)
            self.local_tokens_per_expert = torch.zeros_like(self.expert_bias)
        return self

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Return the expert weights [t, E] of each token, 0 for experts not chosen, and the choice, bool [t, E]."""
        probabilities_tE, chosen_tE = super().routing(logits, padding_mask)
        if self.topk == 1:  # the weights of a token's experts have sum 1, but Megatron does not normalize a single one
            probabilities_tE = chosen_tE.type_as(logits) * (self.config.moe_router_topk_scaling_factor or 1.0)
        # not in evaluation, nor in the first of the two passes of a recomputed layer
        if not (self.training and torch.is_grad_enabled()):
            return probabilities_tE, chosen_tE
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert += chosen_tE.sum(dim=0)
        balance = self.config.packed_balance
        if balance.coefficient:
            scores_tE, counted_tE = self._scores(logits.flatten(0, -2), chosen_tE)
            tokens = len(scores_tE)  # of a context-parallel rank, or with sequence parallelism a part of them
            group_tokens = tokens * self.tp_cp_group.size()
            rows_t = None
            if balance.by_row and self.rows_t is not None:
                group_tokens = balance.row_length
                first = tokens * self.tp_group.rank()
                rows_t = self.rows_t[first : first + tokens]
            losses = balance_losses(scores_tE, counted_tE, self.topk, group_tokens, self.tp_cp_group, rows_t)
            probabilities_tE = balance.attach(probabilities_tE, losses)
        return probabilities_tE, chosen_tE

    def _scores(self, logits_tE: Tensor, chosen_tE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of which P is the mean, float32 [t, E], and the experts that f counts, bool [t, E]."""
        if self.score_function == "softmax":
            return torch.softmax(logits_tE, dim=-1, dtype=torch.float32), chosen_tE
        scores_tE = logits_tE.float().sigmoid()
        best_tE = torch.zeros_like(chosen_tE).scatter_(1, scores_tE.topk(self.topk).indices, True)
        return scores_tE / scores_tE.sum(dim=-1, keepdim=True), best_tE


def expert_output(linear: Any) -> type:
    """Return a linear layer that copies its output: Megatron adds an expert's bias in place, refused for a view."""

    class ExpertOutput(linear):
        def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(input_)
            return output.clone(), bias

    return ExpertOutput


class ExpertLayer(TransformerLayer):
    """Passes the row of each token to its router, also during recomputation."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        # if the experts had another width than the config, Megatron would give them a deep copy of it
        dense_width = config.ffn_hidden_size
        config.ffn_hidden_size = config.moe_ffn_hidden_size
        super().__init__(config, *args, **kwargs)
        config.ffn_hidden_size = dense_width  # of the layers without experts; read only while they are built
        self.recompute_experts = config.recompute_granularity == "selective" and "mlp" in config.recompute_modules

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return the residual stream [t, 1, D] after the layer, and None as the context of cross-attention."""
        hidden_t1D, context = self._forward_attention(*args, **kwargs)
        normed_t1D = self._forward_pre_mlp_layernorm(hidden_t1D)
        rows_t = kwargs["packed_seq_params"].batch.rows_t

        def mixture(tokens_t1D: Tensor) -> Any:
            self.mlp.router.rows_t = rows_t
            return self.mlp(tokens_t1D)

        if self.recompute_experts:
            mixed = tensor_parallel.checkpoint(mixture, False, normed_t1D)
        else:
            mixed = mixture(normed_t1D)
        return self._forward_post_mlp(mixed, hidden_t1D), context
