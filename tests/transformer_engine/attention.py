"""Attention kernels of other packages, exact: in float32, or for float32 in float64, segment by segment.

Legend: t queries, u keys, N query heads, G key heads, H head size, W size of a value head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Which keys each query sees, and the factor of the scores."""

    scale: float
    starts_q: list[int]  # of each segment, its first row
    starts_k: list[int]
    lengths_q: list[int]
    lengths_k: list[int]
    left: int  # how many keys before a query's own; -1 is all
    bottom_right: bool  # whether the last query's own key is the last, instead of the first query's the first

    def hidden(self, queries: int, keys: int) -> Tensor:
        """Return the keys that the queries of a segment do not see, bool [queries, keys]; none sees later ones."""
        shift = keys - queries if self.bottom_right else 0
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] - shift
        hidden = distance > 0
        return hidden if self.left < 0 else hidden | (distance < -self.left)


def attend(
    query_tNH: Tensor, key_uGH: Tensor, value_uGW: Tensor, sink_N: Tensor | None, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Return the output [t, N, W] and the log-sum-exp [N, t]; queries of no segment have 0."""
    wide = torch.float64 if query_tNH.dtype == torch.float32 else torch.float32
    t, heads, _ = query_tNH.shape
    groups = key_uGH.shape[1]
    out = query_tNH.new_zeros(t, heads, value_uGW.shape[-1], dtype=wide)
    totals = query_tNH.new_zeros(heads, t, dtype=wide)
    counts = (segments.starts_q, segments.starts_k, segments.lengths_q, segments.lengths_k)
    for start, first, queries, keys in zip(*counts, strict=True):
        if not queries:
            continue
        rows = torch.arange(start, start + queries)
        query = query_tNH[rows].to(wide).transpose(0, 1)
        key, value = (
            x[first : first + keys].to(wide).repeat_interleave(heads // groups, dim=1).transpose(0, 1)
            for x in (key_uGH, value_uGW)
        )
        scores = query @ key.transpose(1, 2) * segments.scale
        scores = scores.masked_fill(segments.hidden(queries, keys), float("-inf"))
        entries = [scores] if sink_N is None else [scores, sink_N.to(wide).view(-1, 1, 1).expand(-1, queries, 1)]
        total = torch.cat(entries, dim=-1).logsumexp(dim=-1)
        weights = torch.nan_to_num((scores - total[..., None]).exp())  # a query without keys has weights of 0
        out = out.index_copy(0, rows, (weights @ value).transpose(0, 1))
        totals = totals.index_copy(1, rows, total)
    return out.to(query_tNH.dtype), totals.float()


def gradients(inputs: tuple[Tensor | None, ...], segments: Segments, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of queries, keys, values and sinks."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        out, _ = attend(*leaves, segments)  # type: ignore[arg-type]
        computed = iter(torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], grad.to(out.dtype)))
    return [None if leaf is None else next(computed) for leaf in leaves]


class Kernel(torch.autograd.Function):
    """`attend` as one operation, as a kernel is."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value)
        ctx.segments = segments
        return attend(query, key, value, None, segments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*gradients((*ctx.saved_tensors, None), ctx.segments, grads[0])[:3], None)
