"""Choose how the rows of a micro-batch are split over context-parallel ranks, and how these share attention."""

from dataclasses import dataclass
from functools import cache

from megatron_ext.config import Config
from megatron_ext.context_parallel import PAIRS_PER_ROW, CPPlan, plan
from megatron_ext.context_parallel.exchange import Scheme, copies_of_keys, heads_can_be_exchanged
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.masks import LayerMasks


@dataclass(frozen=True)
class CPOptions:
    """Describes how rows are split over context-parallel ranks."""

    group: CPGroup  # at least two ranks
    policy: str  # a name of `context_parallel.Policy`
    scheme: Scheme | None  # how keys and values are exchanged; None selects the scheme that moves fewer bytes
    heads: int  # of one tensor-parallel rank, as `key_heads`
    key_heads: int
    exchanged_heads: float | None = None  # key heads that an exchanged row is as wide as; None: `key_heads`
    row_cost: float = PAIRS_PER_ROW  # cost of moving a row of keys and values, in attention pairs

    def plans(self, masks: LayerMasks) -> list[CPPlan]:
        """Return one plan per mask, with the same token assignment: the cheapest for all layers together.

        A token is on the same rank in every layer. Each mask in turn decides the assignment and the others follow it.
        """
        layers, of_layers = zip(*masks.by_layers(), strict=True)
        choices = []
        for leading in of_layers:
            first = plan(
                leading.layout, self.group.size, self.policy, left_window=leading.left_window, row_cost=self.row_cost
            )
            choices.append(
                [first if mask is leading else first.under(mask.layout, mask.left_window) for mask in of_layers]
            )
        return min(choices, key=lambda plans: sum(n * p.cost for n, p in zip(layers, plans, strict=True)))

    def choose(self, plan: CPPlan) -> Scheme:
        """Return the scheme for this plan, the same on every rank."""
        if self.scheme is not None:
            return self.scheme
        size = self.group.size
        if not heads_can_be_exchanged(self.heads, self.key_heads, size):
            return Scheme.EXCHANGE
        # Rows per head that leave a rank: queries, keys, values and outputs (Ulysses), or keys and values (exchange).
        key_heads = self.key_heads * copies_of_keys(self.key_heads, size)
        ulysses = plan.layout.tokens * (size - 1) / size * 2 * (self.heads + key_heads)
        exchange = int(plan.rows_moved.sum()) * 2 * (self.exchanged_heads or self.key_heads)
        if ulysses < exchange:
            return Scheme.ULYSSES
        return Scheme.EXCHANGE


def cp_options(config: Config, group: CPGroup) -> CPOptions | None:
    """Return how rows are split over the ranks of a group; None if each process holds whole rows."""
    if group.size == 1:
        return None
    model = config.model
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    scheme = None
    if parallel.cp_scheme != "auto":
        scheme = Scheme(parallel.cp_scheme)
    return CPOptions(
        group=group,
        policy=parallel.cp_policy,
        scheme=scheme,
        heads=model.num_attention_heads // tp,
        key_heads=model.num_query_groups // tp,
        exchanged_heads=model.exchanged_width(tp) / model.key_value_size,
        row_cost=parallel.cp_row_cost,
    )


def planned_cp(config: Config) -> CPOptions | None:
    """Return these options for processes that do not run; equal layouts have equal options, as caches need."""
    return cp_options(config, _planned_group(config.parallel.context_parallel_size))


@cache
def _planned_group(size: int) -> CPGroup:
    return CPGroup(0, size, None)
