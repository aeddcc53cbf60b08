"""QK-Clip (arXiv 2507.20534): scale down the query and key matrices of heads whose scores have grown too large.

Let S be the largest score of a head in a measured step, including the softmax scale, and tau the limit. After that
step's update

    gamma = min(1, tau / S)        for each query head
    kappa = sqrt(max gamma)        for each key head, over the query heads that share it
    W_q <- W_q gamma / kappa,      W_k <- W_k kappa

so that each head's scores are multiplied by gamma. A head that does not share its keys gets sqrt(gamma) on both sides,
as in the paper; shared keys are scaled by no more than the least affected head needs, and nothing is ever scaled up. S
is measured on the sampled queries (`attention/health.py`), so scores of other queries may exceed tau.

The scaling applies to the weights that the optimizer updates, master weights or a rank's range of them, right after the
update and before Megatron copies or gathers them to the model weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.engine import compat
from megatron_ext.engine.optimizer import unwrap
from megatron_ext.engine.parallel import Ranks


@dataclass(frozen=True, eq=False)
class _Run:
    """The part of a layer's joint projection that this process's optimizer updates."""

    layer: int  # index in the whole model, from 0
    values: Tensor  # the flattened weight or bias from element `start` on
    start: int
    columns: int  # of the weight; 1 for a bias


class QKClip:
    """Clips the heads of this process to `limit`, tau; the optimizer has no low-precision states.

    Attributes:
        due: float64 [layers, N], the scores by which to clip after the next update; None: no clipping.
    """

    def __init__(
        self,
        model: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        ranks: Ranks,
        config: ModelConfig,
        limit: float,
    ) -> None:
        self.model, self.ranks, self.config, self.limit = model, ranks, config, limit
        if isinstance(optimizer, ChainedOptimizer):
            optimizer = optimizer.chained_optimizers[0]  # the optimizer of the experts comes second
        self.optimizer: Any = optimizer
        self.due: Tensor | None = None
        self._runs: list[_Run] | None = None
        if self.optimizer.optimizer is not None:  # otherwise other ranks update all weights of this process
            self.optimizer.optimizer.register_step_post_hook(self._clip)

    @torch.no_grad()
    def _clip(self, *unused: Any) -> None:
        if self.due is None:
            return
        if self._runs is None:
            self._runs = list(self._find())
        heads = self.config.num_attention_heads // self.ranks.tensor_size
        groups = self.config.num_query_groups // self.ranks.tensor_size
        mine = self.due[:, self.ranks.tensor * heads : (self.ranks.tensor + 1) * heads].float()
        for run in self._runs:
            rows = row_factors(mine[run.layer], self.limit, groups, self.config.head_size)
            factors = rows.repeat_interleave(run.columns)[run.start : run.start + len(run.values)]
            run.values.mul_(factors)

    def _find(self) -> Iterator[_Run]:
        """Yield the parts of the joint projections to scale; needs optimizer states, so at least one update."""
        for chunk in unwrap(self.model):
            for layer in chunk.decoder.layers:
                projection = layer.self_attention.linear_qkv
                for weight in (projection.weight, projection.bias):
                    if weight is not None:
                        for values, start in self._updated(weight):
                            yield _Run(layer.layer_number - 1, values.view(-1), start, weight.numel() // len(weight))

    def _updated(self, weight: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield the part of a weight that the optimizer updates here, and its offset in the flattened weight."""
        optimizer = self.optimizer
        if isinstance(optimizer, DistributedOptimizer):
            for one, start, _ in compat.updated_ranges(optimizer):
                if one is weight:
                    yield compat.optimizer_states(optimizer, weight)["param"], start
        elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
            for weights, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
                yield from ((master, 0) for one, master in zip(weights, masters, strict=True) if one is weight)
        else:
            yield weight.detach(), 0


def row_factors(s_max_n: Tensor, limit: float, groups: int, size: int) -> Tensor:
    """Return the factor of each row of a rank's joint projection; 1 for scores that are not finite.

    Megatron orders the rows by group: the queries of the heads that share a key head, its keys, its values; a head has
    `size` rows. `limit` is tau.
    """
    above = torch.isfinite(s_max_n) & (s_max_n > limit)
    gamma = torch.where(above, limit / s_max_n, 1.0).unflatten(0, (groups, -1))
    kappa = gamma.amax(dim=1, keepdim=True).sqrt()
    return torch.cat([gamma / kappa, kappa, torch.ones_like(kappa)], dim=1).flatten().repeat_interleave(size)
