"""The tensors that attention is computed from."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Queries, keys and values of packed rows; G divides N.

    Attributes:
        query_tNH, key_uGH: queries and keys.
        value_uGW: values. W is at most H; `PerCall` makes it equal for kernels that need it.
        sink_N: for each query head, the logit of one more softmax entry, which adds nothing to the output; None for a
            plain softmax.
    """

    query_tNH: Tensor
    key_uGH: Tensor
    value_uGW: Tensor
    sink_N: Tensor | None = None
