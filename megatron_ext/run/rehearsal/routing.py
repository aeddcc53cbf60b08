"""State the number of tokens of each expert, which fake tensors cannot know: the router would compute it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.config import Config
from megatron_ext.errors import UserError

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Routing:
    """States a routing: every rank's tokens go to the experts alike, or more of them to one rank's.

    Attributes:
        experts: E, of a layer.
        chosen: k, of each token.
        first, here: the first of the rehearsed rank's experts, and how many it has.
        load: how many times the mean of all ranks' tokens come to the rehearsed rank; the others share the rest alike.
    """

    experts: int
    chosen: int
    first: int
    here: int
    load: float = 1.0

    def counts(self, tokens: int) -> Counts:
        """Return int64 [E], how many of a rank's tokens go to each expert."""
        total = tokens * self.chosen
        if self.load == 1:
            return _alike(total, self.experts)
        mine = round(self.load * total * self.here / self.experts)
        others = _alike(total - mine, self.experts - self.here)
        return np.concatenate([others[: self.first], _alike(mine, self.here), others[self.first :]])

    def __str__(self) -> str:
        return f"{self.load:g} times the mean of tokens" if self.load != 1 else "tokens go to all experts alike"


def routing_of(config: Config, expert_rank: int, load: float) -> Routing | None:
    """Return what a rank's rehearsal states; None for a model without experts."""
    experts = config.model.num_experts
    if experts is None:
        return None
    here = experts // config.parallel.expert_model_parallel_size
    return Routing(experts, config.model.moe_router_topk, expert_rank * here, here, load)


def check_load(load: float, config: Config) -> None:
    """Refuse a load that no routing has.

    Raises:
        UserError: experts that are not spread over ranks, less than the mean, or more tokens than there are.
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
