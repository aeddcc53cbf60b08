"""QK-Clip (arXiv 2507.20534): where a head's scores have grown too large, scale down its query and key matrices.

With S the largest score of a head in a measured step, as the softmax sees it, and a limit tau, after that step's update

    gamma = min(1, tau / S)        for each query head
    kappa = sqrt(max gamma)        for each key head, over the query heads that share it
    W_q <- W_q gamma / kappa,      W_k <- W_k kappa

so that each head's scores are multiplied by gamma. A head with keys of its own has sqrt(gamma) on both sides, as in the
paper; where query heads share keys, the keys are scaled by no more than the head that needs least, and nothing is ever
scaled up. S is that of the sampled queries (`attention/health.py`), so that tau bounds it there, not everywhere.

What is scaled are the weights that the optimizer updates, master weights or a rank's run of them, right behind the
update and before Megatron copies or gathers them to what the model computes with.
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
    """Holds the part of a layer's joint projection that this process's optimizer updates.

    Attributes:
        layer: in the whole model, from 0.
        values: flat; elements `start` and following of the flattened weight or bias.
        columns: of the weight; 1 of a bias.
    """

    layer: int
    values: Tensor
    start: int
    columns: int


class QKClip:
    """Scales the heads of this process.

    Args:
        model: the wrapped chunks of this pipeline stage.
        optimizer: over them; it has no low-precision states.
        ranks: where this process stands.
        config: of the model.
        limit: tau.

    Attributes:
        due: float64 [layers, N], the scores that the next update is followed by a clip for; None: no clip.
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
            optimizer = optimizer.chained_optimizers[0]  # the experts' own comes after it
        self.optimizer: Any = optimizer
        self.due: Tensor | None = None
        self._runs: list[_Run] | None = None
        if self.optimizer.optimizer is not None:  # else all weights of this process are updated by others
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
        """Find what is to be scaled; once the optimizer has made an update, so that its states are there."""
        for chunk in unwrap(self.model):
            for layer in chunk.decoder.layers:
                projection = layer.self_attention.linear_qkv
                for weight in (projection.weight, projection.bias):
                    if weight is not None:
                        for values, start in self._updated(weight):
                            yield _Run(layer.layer_number - 1, values.view(-1), start, weight.numel() // len(weight))

    def _updated(self, weight: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield what the optimizer updates of a weight here, and where in the flattened weight it begins."""
        optimizer = self.optimizer
        if isinstance(optimizer, DistributedOptimizer):
            buckets = (bucket for by_dtype in optimizer.gbuf_ranges for each in by_dtype.values() for bucket in each)
            for bucket in buckets:
                if weight in bucket["param_map"]:
                    start = bucket["param_map"][weight]["param"].start
                    yield compat.optimizer_states(optimizer, weight)["param"], start
        elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
            for weights, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
                yield from ((master, 0) for one, master in zip(weights, masters, strict=True) if one is weight)
        else:
            yield weight.detach(), 0


def row_factors(s_max_n: Tensor, limit: float, groups: int, size: int) -> Tensor:
    """Return what each row of a rank's joint projection is multiplied by; a score that is not finite changes nothing.

    Megatron lays it out group by group: the queries of the heads that share a key head, its keys, its values.

    Args:
        s_max_n: of this rank's query heads.
        limit: tau.
        groups: key heads of this rank.
        size: rows of a head.
    """
    above = torch.isfinite(s_max_n) & (s_max_n > limit)
    gamma = torch.where(above, limit / s_max_n, 1.0).unflatten(0, (groups, -1))
    kappa = gamma.amax(dim=1, keepdim=True).sqrt()
    return torch.cat([gamma / kappa, kappa, torch.ones_like(kappa)], dim=1).flatten().repeat_interleave(size)
