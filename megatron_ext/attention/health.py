"""Measure attention statistics of each layer and head, in float32, on sampled queries of a micro-batch.

Query i sees keys j with scores s_ij = q_i . k_j and attention p_ij = softmax_j(scale * s_ij). The statistics are

    entropy     -sum_j p_ij ln p_ij, in nats
    first       p_i of the first token of i's segment; 0 where a sliding window hides it
    distance    sum_j p_ij (i - j), in tokens
    largest     max_j s_ij

They are computed from queries and keys after norms and rotary embedding, without the learned sinks of --softmax-type.
Context-parallel ranks gather the few sampled queries; each rank computes the attention of all of them to its own keys,
and the partial results are merged as in flash decoding, by rescaling sums of exp(scale * (s_ij - max_j s_ij)) to one
maximum. The result does not depend on how tokens and heads are distributed.

    segment   a a a a a b b b        a sample of queries   1 3 6
    rank 0    a a . . a . b .        holds keys 0 1 4 6    query 1 sees 0 1     3 sees 0 1     6 sees 6
    rank 1    . . a a . b . b        holds keys 2 3 5 7          1 sees none    3 sees 2 3     6 sees 5

Legend: Q sampled queries; C context-parallel ranks; other letters as in the rest of the package.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.arrays import Int64
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.device import to_device
from megatron_ext.masks import AttentionMask, LayerMasks

SINK = 0.3  # a first token with more attention than this is a sink (arXiv 2410.10781)
_DRAW = 0xA77E  # separates this random stream from others of the same seed
_SCORES = 1 << 25  # scores in memory at a time: 128 MiB in float32


def sample_queries(seed: int, step: int, tokens: int, count: int) -> Int64:
    """Sample `count` of the T tokens of a step's first micro-batch, in ascending order."""
    random = np.random.default_rng([seed, step, _DRAW])
    return np.sort(random.choice(tokens, min(count, tokens), replace=False))


def visible_from(mask: AttentionMask, queries: Int64) -> Tensor:
    """Return the first token of each query's segment and the first key that it sees; int64 [2, Q]."""
    starts = queries - mask.layout.positions()[queries]
    return torch.from_numpy(np.stack([starts, mask.first_keys()[queries]]))


@dataclass(frozen=True, eq=False)
class Probe:
    """Measures sampled queries of a micro-batch in the layers of this process, in one forward pass."""

    context: CPGroup
    counts: tuple[int, ...]  # number of queries on each rank
    rows_q: Tensor  # int64, this rank's queries, as indices into its own tokens
    tokens_Q: Tensor  # int64, the queries as indices into all T tokens, rank 0's first
    tokens_t: Tensor  # int64, this rank's tokens as indices into the T tokens
    visible: tuple[Tensor, ...]  # by kind of layer as in `LayerMasks`, what `visible_from` returns
    # by layer, counted from 1: the result of `find`, and the softmax scale
    by_layer: dict[int, tuple[Tensor, float]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, queries: Int64, masks: LayerMasks, by_rank: Sequence[Int64], context: CPGroup) -> "Probe":
        """Distribute the queries, int64 [Q], to the ranks that hold their tokens; `by_rank` has each rank's tokens."""
        rows = [np.flatnonzero(np.isin(tokens, queries)) for tokens in by_rank]
        sampled = [tokens[places] for tokens, places in zip(by_rank, rows, strict=True)]
        sampled_Q = np.concatenate(sampled)
        return cls(
            context=context,
            counts=tuple(map(len, sampled)),
            rows_q=torch.from_numpy(rows[context.rank]),
            tokens_Q=torch.from_numpy(sampled_Q),
            tokens_t=torch.from_numpy(by_rank[context.rank]),
            visible=tuple(visible_from(mask, sampled_Q) for mask in masks.by_kind),
        )

    @torch.no_grad()
    def observe(self, layer_number: int, local: bool, query_tNH: Tensor, key_tGH: Tensor, scale: float) -> None:
        """Measure a layer (counted from 1) at its first forward pass; recomputation in backward is ignored.

        The queries and keys belong to this rank's tokens, after rotary embedding.
        """
        if layer_number in self.by_layer:
            return
        shape = query_tNH.shape[1:]
        query_qNH = query_tNH.index_select(0, self.rows_q).float()
        gathered = self.context.gather(query_qNH.flatten(), [count * shape.numel() for count in self.counts])
        query_QNH = gathered.unflatten(0, (-1, *shape))
        statistics = find(query_QNH, key_tGH, self.tokens_Q, self.tokens_t, self.visible[local], scale)
        self.by_layer[layer_number] = statistics, scale

    def measured(self) -> tuple[list[int], Tensor]:
        """Return the layers measured here, ascending, and their statistics as in `by_head`, float64 [6, layers, N].

        Collective: all context-parallel ranks call this together and get the same result. The next pass is measured
        anew.
        """
        layers = sorted(self.by_layer)
        statistics, scales = zip(*(self.by_layer.pop(layer) for layer in layers), strict=True)
        of_rank = torch.stack(statistics, dim=1)  # [5, layers, Q, N]
        ranks = self.context.size
        gathered = self.context.gather(of_rank.flatten(), [of_rank.numel()] * ranks)
        of_ranks = gathered.unflatten(0, (ranks, *of_rank.shape)).transpose(0, 1).double()
        scale = to_device(scales, of_rank.device)[:, None, None]
        return layers, by_head(of_ranks, scale)


def by_head(statistics_5CQN: Tensor, scale: Tensor | float) -> Tensor:
    """Merge the results of `find` on all ranks, and reduce all queries of a head; [6, ..., N].

    The rows are ordered like the fields of `AttentionHealth`, but the second row is the mean attention on the first
    token, which `of_layers` converts to the share of sinks.
    """
    largest_of_rank, *sums = statistics_5CQN
    largest = largest_of_rank.amax(dim=0)
    shift = torch.where(largest_of_rank == -torch.inf, 0.0, scale * (largest_of_rank - largest))
    total, product, first, distance = (shift.exp() * sum_of_rank for sum_of_rank in sums)
    product = (product + shift * total).sum(dim=0)
    total = total.sum(dim=0)
    first = first.sum(dim=0) / total
    return torch.stack(
        [
            (total.log() - product / total).mean(dim=-2),
            first.mean(dim=-2),
            (first > SINK).to(first.dtype).mean(dim=-2),
            largest.amax(dim=-2),
            (scale * largest).amax(dim=-2),
            (distance.sum(dim=0) / total).mean(dim=-2),
        ]
    )


def find(
    query_QNH: Tensor, key_tGH: Tensor, tokens_Q: Tensor, tokens_t: Tensor, visible_2Q: Tensor, scale: float
) -> Tensor:
    """Compute the statistics of the sampled queries (float32) over this rank's keys, a block of queries at a time.

    `tokens_Q` and `tokens_t` are the token indices of queries and keys, `visible_2Q` is the result of `visible_from`.

    Returns:
        [5, Q, N]. With x_ij = scale * (s_ij - largest_i) and e_ij = exp(x_ij), which is at most 1: the largest
        max_j s_ij, -inf if no key here is visible; sum_j e_ij; sum_j e_ij x_ij; e_ij of the segment's first token, 0 if
        it is not visible here; sum_j e_ij (i - j).
    """
    queries, heads, _ = query_QNH.shape
    tokens, groups, _ = key_tGH.shape
    key_GHt = key_tGH.float().permute(1, 2, 0)
    size = max(1, _SCORES // (heads * tokens))
    blocks = []
    for first_query in range(0, queries, size):
        block = slice(first_query, first_query + size)
        token_b1 = tokens_Q[block, None]
        start_b1, first_b1 = visible_2Q[:, block, None]
        hidden_b1t = ((tokens_t < first_b1) | (tokens_t > token_b1))[:, None]
        query_GbnH = query_QNH[block].unflatten(1, (groups, -1)).transpose(0, 1)  # n = N / G
        score_Gbnt = (query_GbnH.flatten(1, 2) @ key_GHt).unflatten(1, query_GbnH.shape[1:3])
        score_bNt = score_Gbnt.transpose(0, 1).flatten(1, 2).masked_fill(hidden_b1t, -torch.inf)
        largest = score_bNt.amax(dim=-1)
        x_bNt = scale * (score_bNt - torch.where(largest == -torch.inf, 0.0, largest)[..., None])
        e_bNt = x_bNt.exp()
        statistics = [
            largest,
            e_bNt.sum(dim=-1),
            (e_bNt * x_bNt.masked_fill(hidden_b1t, 0.0)).sum(dim=-1),
            (e_bNt * (tokens_t == start_b1)[:, None]).sum(dim=-1),
            (e_bNt * (token_b1 - tokens_t)[:, None]).sum(dim=-1),
        ]
        blocks.append(torch.stack(statistics))
    return torch.cat(blocks, dim=1)


class AttentionHealth(NamedTuple):
    """Attention statistics of a step for each layer; means over sampled queries and heads."""

    entropy: list[float]  # in nats
    # share of heads whose mean attention on the first token of a query's segment is above `SINK`, as defined in arXiv
    # 2410.10781
    sink_share: list[float]
    sink_pairs: list[float]  # share of (head, query) pairs with more than `SINK` attention on that token
    s_max: list[float]  # the largest q . k (arXiv 2503.15450), a lower bound of the maximum over all queries
    s_max_scaled: list[float]  # the same times the softmax scale, 1/sqrt(H) by default
    distance: list[float]  # to the attended tokens

    @classmethod
    def of(cls, values: Sequence[float]) -> "AttentionHealth":
        """Build from the flattened result of `of_layers`."""
        return cls(*np.reshape(values, (len(cls._fields), -1)).tolist())


def of_layers(heads: Tensor) -> Tensor:
    """Reduce float64 [6, layers, N], as returned by `by_head`, to the fields of `AttentionHealth`."""
    entropy, first, pairs, s_max, s_max_scaled, distance = heads
    return torch.stack(
        [
            entropy.mean(dim=-1),
            (first > SINK).to(first.dtype).mean(dim=-1),
            pairs.mean(dim=-1),
            s_max.amax(dim=-1),
            s_max_scaled.amax(dim=-1),
            distance.mean(dim=-1),
        ]
    )
