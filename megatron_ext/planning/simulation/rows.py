"""What a step's rows cost each rank: attention by the segments it computes, keys and values that it receives.

The rows are the ones that the trainer draws for that step, dealt out as it deals them, cut by the window and shared
out by the plan that it would make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.arrays import Float64, Int64
from megatron_ext.attention.exchange import ContextGroup, Traffic
from megatron_ext.attention.interface import Scheme
from megatron_ext.batch import ContextOptions
from megatron_ext.config import Config
from megatron_ext.data.rows.balance import deal_rows
from megatron_ext.masks import LayerMasks

DocumentEnds = Callable[[int], npt.NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class RowCosts:
    """Holds what one optimizer step's micro-batches ask of each context-parallel rank, averaged over layers.

    Attributes:
        context: float64 [M, R, cp], keys that a query sees on average, of each of M micro-batches of R replicas.
        exchanged: float64 [M, R, cp], keys and values received, as a share of all that the other ranks hold.
    """

    context: Float64
    exchanged: Float64


def row_costs(config: Config, world: int, ends_of: DocumentEnds, step: int, window: int, most_rows: int) -> RowCosts:
    """Weigh the rows of a step.

    Args:
        config: the run's.
        world: cards.
        ends_of: the document ends of a sample.
        step: counted from 0; it says which samples these are.
        window: of that step.
        most_rows: where a global batch has more, it is drawn from the first so many of its rows.
    """
    data, options = config.data, config.mask_options()
    replicas, micros = config.data_parallel_size(world), config.microbatches(world)
    first = data.first_sample + step * data.global_batch_size
    known = min(data.global_batch_size, most_rows)
    rows = np.arange(data.global_batch_size)
    if known < len(rows):
        chance = np.random.default_rng((config.training.seed, step))
        rows = chance.permuted(rows % known)
    ends = [ends_of(first + row) for row in range(known)]

    def masks_of(group: Int64) -> LayerMasks:
        return options.at(data.seq_length, [ends[row] for row in group], window)

    if data.balance_batches:
        costs = np.array([masks_of(np.array([row])).context_sum for row in range(known)], dtype=np.float64)
        dealt = deal_rows(costs[rows], replicas, micros).transpose(1, 0, 2)
    else:
        dealt = np.arange(len(rows)).reshape(micros, replicas, data.micro_batch_size)
    groups, place = np.unique(rows[dealt].reshape(micros * replicas, -1), axis=0, return_inverse=True)
    context = context_options(config)
    weighed = np.array([_weigh(masks_of(group), context) for group in groups])  # [groups, 2, cp]
    shape = (micros, replicas, context.group.size)
    return RowCosts(*(weighed[place.ravel(), kind].reshape(shape) for kind in (0, 1)))


def context_options(config: Config) -> ContextOptions:
    """Say how the run shares rows out, as one of its ranks would; there is no process group."""
    parallel, model = config.parallel, config.model
    tp = parallel.tensor_model_parallel_size
    return ContextOptions(
        group=ContextGroup(0, parallel.context_parallel_size, None, Traffic()),
        policy=parallel.cp_policy,
        scheme=None if parallel.cp_scheme == "auto" else Scheme(parallel.cp_scheme),
        heads=model.num_attention_heads // tp,
        key_heads=max(model.num_query_groups // tp, 1),
        row_cost=parallel.cp_row_cost,
    )


def _weigh(masks: LayerMasks, context: ContextOptions) -> tuple[Float64, Float64]:
    """Return mean keys and received shares of each rank, float64 [cp], averaged over layers."""
    cp, tokens = context.group.size, masks.widest.tokens
    pairs, received = np.zeros(cp), np.zeros(cp)
    if cp == 1:
        pairs[0] = sum(layers * mask.layout.attention_pairs(mask.reach) for layers, mask in masks.by_layers())
        return pairs / (masks.layers * tokens), received
    plans = context.plans(masks)
    for (layers, _), plan in zip(masks.by_layers(), plans, strict=True):
        if context.choose(plan) is Scheme.ULYSSES:  # a part of the heads, of all tokens
            pairs += layers * plan.pairs.mean()
            received += layers * tokens / cp * (cp - 1) / cp * (context.heads + context.key_heads) / context.key_heads
        else:
            pairs += layers * plan.pairs
            received += layers * plan.rows_moved.sum(axis=0)
    own = tokens / cp
    return pairs / (masks.layers * own), received / (masks.layers * (tokens - own))
