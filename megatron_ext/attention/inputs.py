"""The tensors that attention is computed from."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Queries, keys and values of packed rows; G divides N."""

    query_tNH: Tensor
    key_uGH: Tensor
    value_uGW: Tensor  # W is at most H; `PerCall` makes it equal for kernels that need it
    # for each query head, the logit of one more softmax entry, which adds nothing to the output; None for a plain
    # softmax
    sink_N: Tensor | None = None
