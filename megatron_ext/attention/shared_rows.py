"""Attention over packed rows that several processes share, usable in any model without Megatron or configuration.

    rows = share_rows(4096, [[700, 3000, 4096]], window=1024, group=dist.group.WORLD)
    hidden = model.embed(tokens[rows.tokens])                    # this rank's tokens; other layers need no change
    out_tNH = rows.attend(query_tNH, key_tGH, value_tGW)         # exact and differentiable, across ranks

Any document ends and any window are supported: `context_parallel.plan` assigns tokens to ranks,
`context_parallel.exchange` sends keys and values to the ranks whose queries see them, and a backend computes attention.
All ranks pass the same arguments.

Legend: T tokens of all rows, t = T / ranks tokens of this rank, N query heads, G key heads, H head size,
W size of a value head, at most H.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.attention.backends import select
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.context_parallel import CPPlan, Policy, plan
from megatron_ext.context_parallel.exchange import QKV, HeadExchange, Scheme, heads_can_be_exchanged
from megatron_ext.context_parallel.group import ContextGroup
from megatron_ext.device import moved
from megatron_ext.errors import UserError
from megatron_ext.masks import MaskOptions, WindowMask

_select = cache(select)  # selects and logs a backend once for each kind of tensor


@dataclass(frozen=True, eq=False)
class SharedRows:
    """One rank's share of packed rows; created by `share_rows`."""

    tokens: Tensor  # int64 [t], the tokens of this rank, as indices into the T tokens of all rows concatenated
    positions: Tensor  # int32 [t], each token's position within its segment, for rotary embedding
    plan: CPPlan  # the assignment of tokens to ranks and the keys that each rank fetches
    call: AttentionCall  # of this rank
    context: ContextGroup  # the ranks; counts the bytes that this one sends

    def attend(
        self,
        query_tNH: Tensor,
        key_tGH: Tensor,
        value_tGW: Tensor,
        *,
        scale: float | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """Compute the attention of this rank's queries to all keys that they see, on any rank; [t, N, W].

        Collective in forward and backward. The gradients of keys and values are returned to the ranks that hold them.

        Args:
            query_tNH, key_tGH, value_tGW: queries, keys and values of this rank's tokens, in the order of `tokens`; G
                divides N.
            scale: multiplies the dot products before the softmax; 1 / sqrt(H) by default.
            backend: a value of `--attention-backend`.

        Raises:
            UserError: wrong number of tokens or heads, values wider than keys, or no backend supports the tensors.
        """
        counts = [len(x) for x in (query_tNH, key_tGH, value_tGW)]
        if counts != [len(self.tokens)] * 3:
            raise UserError(
                f"attend: got {', '.join(map(str, counts))} tokens of queries, keys and values, "
                f"needs the {len(self.tokens)} of this rank: index by `tokens`"
            )
        if value_tGW.shape[2] > key_tGH.shape[2]:
            raise UserError(f"attend: got values of {value_tGW.shape[2]}, needs at most the keys' {key_tGH.shape[2]}")
        ranks = self.plan.cp_size
        heads = query_tNH.shape[1]
        key_heads = key_tGH.shape[1]
        if isinstance(self.call.exchange, HeadExchange) and not heads_can_be_exchanged(heads, key_heads, ranks):
            raise UserError(
                f"attend: got {heads} query and {key_heads} key heads, needs multiples of {ranks} (ranks) under the "
                "scheme ulysses, of keys or a divisor; take the scheme exchange"
            )
        sizes = query_tNH.shape[-1], value_tGW.shape[-1]
        chosen = _select(backend, query_tNH.device, query_tNH.dtype, *sizes)
        factor = query_tNH.shape[-1] ** -0.5 if scale is None else scale
        return self.call.run(chosen, QKV(query_tNH, key_tGH, value_tGW), factor)


def share_rows(
    row_length: int,
    document_ends: Sequence[Sequence[int] | npt.NDArray[np.integer]],
    window: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    window_mask: WindowMask = "grid",
    policy: str = Policy.AUTO,
    scheme: str = Scheme.EXCHANGE,
    device: torch.device | str = "cpu",
) -> SharedRows:
    """Distribute packed rows over the ranks of a group.

    Args:
        row_length: L, tokens of each row.
        document_ends: for each row, the exclusive ends of its documents, which bound attention; an empty list for no
            bounds.
        window: w, bound on attention in tokens; None for none.
        group: the ranks that share the rows; None for a process that holds all of them.
        window_mask: how the window bounds attention: `grid`, `sliding` or `sliding_w` (masks.py).
        policy: a name of `context_parallel.Policy`.
        scheme: `exchange` moves keys and values; `ulysses` exchanges tokens for heads and needs numbers of heads
            divisible by the number of ranks, or a number of key heads that divides it.

    Raises:
        UserError: no rows, a window or document end out of range, T not divisible by the ranks, or an unknown name.
    """
    if not document_ends:
        raise UserError("document_ends: got no rows, needs a list of ends for each, [[]] for one row without any")
    if window is not None and window < 1:
        raise UserError(f"window: got {window}, needs >= 1 token, or None for no window")
    for name, given, known in (("window_mask", window_mask, get_args(WindowMask)), ("scheme", scheme, tuple(Scheme))):
        if given not in known:
            raise UserError(f"{name}: got {given!r}, needs one of {', '.join(known)}")
    options = MaskOptions(document_mask=True, window_mask=window_mask)
    ends = [np.asarray(row, dtype=np.int64) for row in document_ends]
    mask = options.at(row_length, ends, row_length if window is None else window).scheduled
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    context = ContextGroup(rank, size, group)
    made = plan(mask.layout, size, policy, left_window=mask.left_window)
    call = AttentionCall.of_plan(made, context, Scheme(scheme) if group is not None else Scheme.EXCHANGE)
    tokens = made.rows[rank]
    there = torch.device(device)
    return SharedRows(
        tokens=torch.from_numpy(tokens).to(there),
        positions=torch.from_numpy(mask.layout.positions()[tokens]).to(there),
        plan=made,
        call=moved(call, there),
        context=context,
    )
