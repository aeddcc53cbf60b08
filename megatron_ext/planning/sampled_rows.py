"""Estimate from a sample of rows: the effective context, the imbalance between ranks, and what they exchange.

The rows are the run's own or drawn ones, laid out and distributed by the code that training uses. They are read once
and results are cached, because a search needs them for hundreds of layouts.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_ext.arrays import Float64
from megatron_ext.config import Config
from megatron_ext.context_parallel.choice import CPOptions
from megatron_ext.context_parallel.exchange import Scheme
from megatron_ext.data.row import TokenRow
from megatron_ext.masks import LayerMasks

MOST_ROWS = 256  # most rows read
TOKENS = 2**24  # total tokens of these rows, unless two batches have more
SHARED_TOKENS = 2**20  # tokens of the rows that are planned for each number of ranks; at least two rows
BATCHES = 8  # resampled from the rows


class AttentionLoad(NamedTuple):
    """What the cost of attention depends on besides sizes."""

    context: float  # C, the effective context in tokens: a token sees C / 2 keys on average
    exchanged: float  # keys that the busiest context-parallel rank moves, as a fraction of all other ranks' keys
    ulysses: float = 0.0  # fraction of attention in which these ranks exchange tokens for heads, and no keys
    imbalance: float = 1.0  # attention of the slowest rank over the mean


class SharedAttention(NamedTuple):
    """The means over layers of what context-parallel ranks exchange, and of their imbalance, as in `AttentionLoad`."""

    exchanged: float = 0.0
    ulysses: float = 0.0
    imbalance: float = 1.0


def shared_attention(options: CPOptions | None, masks: LayerMasks) -> SharedAttention:
    """Plan rows for the ranks of `options`; None if each process holds whole rows."""
    if options is None:
        return SharedAttention()
    size = options.group.size
    tokens = masks.by_kind[0].layout.tokens
    layers = [number for number, _ in masks.by_layers()]
    moved = np.zeros((size, size))
    pairs = np.zeros(size)
    ulysses = 0
    for number, plan in zip(layers, options.plans(masks), strict=True):
        if options.choose(plan) is Scheme.ULYSSES:
            ulysses += number
            pairs += number * plan.pairs.mean()  # every rank has as many heads of all tokens
        else:
            moved += number * plan.rows_moved
            pairs += number * plan.pairs
    busiest = max(moved.sum(axis=0).max(), moved.sum(axis=1).max()) / sum(layers)
    return SharedAttention(
        exchanged=float(busiest / (tokens - tokens // size)),
        ulysses=ulysses / sum(layers),
        imbalance=float(pairs.max() / pairs.mean()),
    )


class SampledRows:
    """Estimates for one configuration's masks and batches, under any layout; `row_at` returns a row by its sample."""

    def __init__(self, config: Config, row_at: Callable[[int], TokenRow]) -> None:
        data = config.data
        self._config = config
        self._options = config.mask_options()
        # the policy needs only the document borders, so the tokens are not kept
        count = min(MOST_ROWS, max(TOKENS // data.seq_length, 2 * data.global_batch_size))
        self._ends = [np.asarray(row_at(sample).document_ends) for sample in range(count)]
        self._costs_at = cache(self._costs)
        self._shared_at = cache(self._shared)
        self._imbalance_at = cache(self._imbalance)

    def load(self, window: int, cp: CPOptions | None, replicas: int) -> AttentionLoad:
        """Return the cost of attention under a window: the means over tokens, layers and rows.

        Args:
            window: in tokens.
            cp: of the layout; None if each process holds whole rows.
            replicas: data-parallel ranks, each of which has rows of its own.
        """
        tokens = self._options.num_layers * self._config.data.seq_length
        context = float(self._costs_at(window).mean() / tokens)
        shared = self._shared_at(window, cp)
        imbalance = shared.imbalance * self._imbalance_at(window, replicas)
        return AttentionLoad(context, shared.exchanged, shared.ulysses, imbalance)

    def _costs(self, window: int) -> Float64:
        """Return each row's attention cost, as `LayerMasks.context_sum`."""
        length = self._config.data.seq_length
        return np.array([self._options.at(length, [ends], window).context_sum for ends in self._ends], dtype=np.float64)

    def _imbalance(self, window: int, replicas: int) -> float:
        """Return the attention of the most expensive replica over the mean, averaged over batches drawn from the rows.

        Rows are in order; with `balance_batches` they are distributed back and forth from the most expensive on, which
        tests compare with `assign_rows`.
        """
        data = self._config.data
        costs = self._costs_at(window)
        batches = np.random.default_rng(0).choice(costs, size=(BATCHES, data.global_batch_size))
        if data.balance_batches:
            batches = -np.sort(-batches, axis=1)
        assigned = batches.reshape(BATCHES, -1, replicas)  # one row to each replica in turn
        if data.balance_batches:
            assigned[:, 1::2] = assigned[:, 1::2, ::-1]
        loads = assigned.sum(axis=1)
        return float((loads.max(axis=1) / loads.mean(axis=1)).mean())

    def _shared(self, window: int, cp: CPOptions | None) -> SharedAttention:
        """Plan some rows for the ranks of a layout; return the means."""
        length = self._config.data.seq_length
        rows = self._ends[: max(SHARED_TOKENS // length, 2)]
        by_row = [shared_attention(cp, self._options.at(length, [ends], window)) for ends in rows]
        return SharedAttention(*np.mean(by_row, axis=0).tolist())
