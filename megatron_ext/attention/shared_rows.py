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
from megatron_ext.context_parallel.group import CPGroup
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
    context: CPGroup  # the ranks; counts the bytes that this one sends

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
        _, heads, size = query_tNH.shape
        _, key_heads, value_size = value_tGW.shape
        if value_size > size:
            raise UserError(f"attend: got values of {value_size}, needs at most the keys' {size}")
        ranks = self.plan.cp_size
        if isinstance(self.call.exchange, HeadExchange) and not heads_can_be_exchanged(heads, key_heads, ranks):
            raise UserError(
                f"attend: got {heads} query and {key_heads} key heads, needs multiples of {ranks} (ranks) under the "
                "scheme ulysses, of keys or a divisor; take the scheme exchange"
            )
        if scale is None:
            scale = size**-0.5
        kernel = _select(backend, query_tNH.device, query_tNH.dtype, size, value_size)
        return self.call.run(kernel, QKV(query_tNH, key_tGH, value_tGW), scale)


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
    if window is None:
        window = row_length
    if window < 1:
        raise UserError(f"window: got {window}, needs >= 1 token, or None for no window")
    _check_name("window_mask", window_mask, get_args(WindowMask))
    _check_name("scheme", scheme, tuple(Scheme))
    ends = [np.asarray(row, dtype=np.int64) for row in document_ends]
    mask = MaskOptions(document_mask=True, window_mask=window_mask).at(row_length, ends, window).scheduled
    context = CPGroup(rank=0, size=1, group=None)
    if group is None:
        scheme = Scheme.EXCHANGE
    else:
        context = CPGroup(dist.get_rank(group), dist.get_world_size(group), group)
    cp_plan = plan(mask.layout, context.size, policy, left_window=mask.left_window)
    tokens = cp_plan.rows[context.rank]
    device = torch.device(device)
    return SharedRows(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(mask.layout.positions()[tokens]).to(device),
        plan=cp_plan,
        call=moved(AttentionCall.of_plan(cp_plan, context, Scheme(scheme)), device),
        context=context,
    )


def _check_name(option: str, name: str, allowed: Sequence[str]) -> None:
    if name not in allowed:
        raise UserError(f"{option}: got {name!r}, needs one of {', '.join(allowed)}")
