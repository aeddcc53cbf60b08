"""Mixtures of experts: Megatron-Core's layers, with a load-balancing loss that no layout changes.

For each layer, over the T tokens of a group, each of which goes to k of E experts (arXiv 2101.03961, equations 4 to 6,
with k for 1):

    loss = E sum_e f_e P_e        f_e = choices of expert e / (k T)        P_e = mean of softmax(router logits)_e

It is 1 where all experts are chosen alike, at most E / k. The group is a row (`seq_aux_loss`) or a micro-batch of rows
(`aux_loss`). What is minimised beside the run's own loss is moe_aux_loss_coeff x the sum over layers of the mean over
the global batch's groups. f is counted over the ranks that share the group's tokens, and no gradient goes through it;
each rank has the P of its own tokens. So the loss of a row is the same however its tokens, the layers, the experts and
the other rows are shared out. That of a micro-batch depends on which rows are together.

Megatron's own router knows no rows, and multiplies its loss by a rank's tokens, which its count of tokens then divides
by. Here all gradients are divided once, by the denominator of the weighted loss, which is known to the device before
the first backward pass (`LoadBalance.begin`): the balancing loss is multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class LoadBalance:
    """Holds the factor of a step's balancing losses, and their sum.

    Attributes:
        coefficient: of the loss; 0: it is computed nowhere.
        by_row: a group is a row; else a micro-batch.
        row_length: tokens of a row.
        total: float64 [], this process's part of the sum over layers and groups, without the coefficient; None before
            the first step that begins.
    """

    def __init__(self, coefficient: float, *, by_row: bool, row_length: int) -> None:
        self.coefficient, self.by_row, self.row_length = coefficient, by_row, row_length
        self.total: Tensor | None = None
        self._factor: Tensor | None = None

    def begin(self, denominator: Tensor, groups: int) -> None:
        """Begin a step.

        Args:
            denominator: float64 [] on the device, what all gradients are divided by at the step's end.
            groups: of the global batch: its rows, or its micro-batches.
        """
        self.total = torch.zeros_like(denominator)
        self._factor = (self.coefficient * denominator / groups).float()

    def attach(self, probabilities_tE: Tensor, losses: Tensor) -> Tensor:
        """Return the router's probabilities; their backward pass begins that of the losses [] too."""
        assert self.total is not None
        assert self._factor is not None
        self.total += losses.detach()
        attached: Tensor = MoEAuxLossAutoScaler.apply(probabilities_tE, losses * self._factor)
        return attached


@dataclass(frozen=True)
class Groups:
    """Describes the groups of tokens that are balanced together.

    Attributes:
        tokens: of each group, on all ranks.
        count: groups of the micro-batch.
        of_token: int64 [t], the group of each of this rank's tokens, from 0; None where there is one group.
        shared: the ranks that share the tokens.
    """

    tokens: int
    count: int
    of_token: Tensor | None
    shared: dist.ProcessGroup


def balance_losses(logits_tE: Tensor, chosen_tE: Tensor, choices: int, groups: Groups) -> Tensor:
    """Return this rank's part of the sum of all groups' losses: float32 []; over the ranks they add up.

    Args:
        logits_tE: the router's, for this rank's tokens.
        chosen_tE: bool, which experts each token goes to.
        choices: k, of each token.
        groups: whose tokens these are.
    """
    experts = logits_tE.shape[1]
    of_token = groups.of_token
    if of_token is None:
        chosen_gE = chosen_tE.sum(dim=0, dtype=torch.float32)[None]
    else:  # sums of whole numbers, in whatever order
        chosen_gE = chosen_tE.new_zeros(groups.count, experts, dtype=torch.float32)
        chosen_gE.index_add_(0, of_token, chosen_tE.float())
    if groups.shared.size() > 1:
        dist.all_reduce(chosen_gE, group=groups.shared)
    scores_tE = torch.softmax(logits_tE, dim=-1, dtype=torch.float32)
    weighed = scores_tE * (chosen_gE if of_token is None else chosen_gE[of_token])
    return weighed.sum() * (experts / (choices * groups.tokens**2))


class BalancedRouter(TopKRouter):
    """Adds the balancing loss of our rows to Megatron's router.

    Attributes:
        rows_t: the row of each token of the call to come, as `PackedBatch` has it.
    """

    rows_t: Tensor | None = None

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Return the weights [t, E] of each token's experts, 0 for others, and bool [t, E], which they are."""
        probabilities_tE, chosen_tE = super().routing(logits, padding_mask)
        balance = self.config.packed_balance
        # neither where nothing is trained nor in the first of the two passes of a layer that is recomputed
        if self.training and torch.is_grad_enabled() and balance.coefficient:
            logits_tE = logits.flatten(0, -2)
            losses = balance_losses(logits_tE, chosen_tE, self.topk, self._groups(len(logits_tE)))
            probabilities_tE = balance.attach(probabilities_tE, losses)
        return probabilities_tE, chosen_tE

    def _groups(self, tokens: int) -> Groups:
        """Group this rank's tokens: those of a context-parallel rank, or under sequence parallelism a part of them."""
        balance, everyone = self.config.packed_balance, self.tp_cp_group
        whole = tokens * everyone.size()
        if not balance.by_row or self.rows_t is None:
            return Groups(whole, 1, None, everyone)
        first = tokens * self.tp_group.rank()
        mine = self.rows_t[first : first + tokens]
        return Groups(balance.row_length, whole // balance.row_length, mine, everyone)


class ExpertLayer(TransformerLayer):
    """Passes the row of each token to its router, also when activations are recomputed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.recompute_experts = config.recompute_granularity == "selective" and "mlp" in config.recompute_modules

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return the residual stream [t, 1, D] after the layer, and no context: nothing else is attended to."""
        hidden_t1D, context = self._forward_attention(*args, **kwargs)
        normed_t1D = self._forward_pre_mlp_layernorm(hidden_t1D)
        rows_t = kwargs["packed_seq_params"].rows_t

        def mixture(tokens_t1D: Tensor) -> Any:
            self.mlp.router.rows_t = rows_t
            return self.mlp(tokens_t1D)

        mixed = (
            tensor_parallel.checkpoint(mixture, False, normed_t1D) if self.recompute_experts else mixture(normed_t1D)
        )
        return self._forward_post_mlp(mixed, hidden_t1D), context
