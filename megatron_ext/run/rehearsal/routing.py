"""Set the number of tokens of each expert, which the router cannot compute on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.config import Config
from megatron_ext.errors import UserError

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Routing:
    """An assumed routing: balanced over all ranks, or with a higher load on one rank's experts.

    Attributes:
        experts: E, per layer.
        chosen: k, per token.
        first, here: the first of the rehearsed rank's experts, and their number.
        load: tokens of the rehearsed rank over the mean of all ranks; the other ranks share the rest equally.
    """

    experts: int
    chosen: int
    first: int
    here: int
    load: float = 1.0

    def counts(self, tokens: int) -> Counts:
        """Return int64 [E], the number of a rank's tokens that go to each expert."""
        total = tokens * self.chosen
        if self.load == 1:
            return _alike(total, self.experts)
        mine = round(self.load * total * self.here / self.experts)
        others = _alike(total - mine, self.experts - self.here)
        return np.concatenate([others[: self.first], _alike(mine, self.here), others[self.first :]])

    def __str__(self) -> str:
        return f"{self.load:g} times the mean of tokens" if self.load != 1 else "tokens go to all experts alike"


def routing_of(config: Config, expert_rank: int, load: float) -> Routing | None:
    """Return the assumed routing of a rank's rehearsal; None for a model without experts."""
    experts = config.model.num_experts
    if experts is None:
        return None
    here = experts // config.parallel.expert_model_parallel_size
    return Routing(experts, config.model.moe_router_topk, expert_rank * here, here, load)


def check_load(load: float, config: Config) -> None:
    """Check that a routing with this load exists.

    Raises:
        UserError: experts that are not sharded over ranks, a load below the mean, or more tokens than there are.
    """
    model, ranks = config.model, config.parallel.expert_model_parallel_size
    if load == 1:
        return
    if model.num_experts is None or ranks == 1:
        raise UserError(
            f"expert_load: got {load:g} with expert_model_parallel_size {ranks}, where every rank has all "
            "experts and gets all of its tokens; leave it out"
        )
    most = min(ranks, model.num_experts / model.moe_router_topk)
    if not 1 <= load <= most:
        raise UserError(
            f"expert_load: got {load:g}, needs 1..{most:g}, times the mean of tokens: {ranks} ranks share the experts, "
            f"of which each token goes to {model.moe_router_topk} of {model.num_experts}"
        )


def _alike(total: int, parts: int) -> Counts:
    counts = np.full(parts, total // parts, dtype=np.int64)
    counts[: total % parts] += 1
    return counts
