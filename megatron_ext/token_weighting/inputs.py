"""Check the losses and masks passed to `weigh`, and turn them into tensors on one device.

Legend: R rows, L tokens of a row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from megatron_ext.errors import UserError
from megatron_ext.token_weighting.scores import Score

Given = Tensor | ArrayLike


@dataclass(frozen=True)
class Inputs:
    """The losses and masks of one call, on the device of its long_loss.

    Attributes:
        losses: float64 [R, L], by argument name; those that the score needs.
        trained_RL: bool [R, L].
        same_RL: bool [R, L]: the two contexts coincide, so the two losses are equal.
    """

    losses: Mapping[str, Tensor]
    trained_RL: Tensor
    same_RL: Tensor

    def pmi(self) -> Tensor:
        """Return the argument of the score: the PMI if it needs two losses, otherwise the single loss or entropy.

        Returns:
            float64 [R, L], 0 for untrained tokens and where both contexts are the same.
        """
        first_RL, *second = self.losses.values()
        pmi_RL = second[0] - first_RL if second else first_RL
        return pmi_RL.masked_fill(~self.trained_RL | self.same_RL, 0.0)


def read(
    score: Score,
    long_loss: Given,
    short_loss: Given | None,
    entropy: Given | None,
    trained: Given | None,
    same_context: Given | None,
) -> Inputs:
    """Check arguments of `weigh` and convert them to tensors.

    Raises:
        UserError: an argument that the score needs is missing, an unused argument is given, or a shape or dtype does
            not fit.
    """
    if short_loss is None and "short_loss" in score.reads:
        raise UserError(f"short_loss: got None, score {score.value} compares two losses; give the second one")
    if entropy is None and "entropy" in score.reads:
        raise UserError(f"entropy: got None, score {score.value} needs it, in nats, [rows, tokens]")
    if entropy is not None and "entropy" not in score.reads:
        raise UserError(f"entropy: score {score.value} does not read it; leave it out or use score mile")
    if same_context is not None and "short_loss" not in score.reads:
        raise UserError(f"same_context: score {score.value} reads no short context; leave it out")
    long_RL = _losses(long_loss)
    if long_RL.ndim != 2 or not long_RL.numel():
        raise UserError(f"long_loss: got shape {list(long_RL.shape)}, needs [rows, tokens], at least one of each")
    losses = {"long_loss": long_RL}
    for name, values in {"short_loss": short_loss, "entropy": entropy}.items():
        if values is not None:
            losses[name] = _fit(name, _losses(values), long_RL)
    masks = {}
    for name, given, default in (("trained", trained, True), ("same_context", same_context, False)):
        if given is None:
            masks[name] = torch.full_like(long_RL, default, dtype=torch.bool)
            continue
        mask = given if isinstance(given, Tensor) else torch.from_numpy(np.array(given))
        if mask.dtype != torch.bool:
            dtype = str(mask.dtype).removeprefix("torch.")
            raise UserError(f"{name}: got {dtype}, needs bool; compare it with 0 first")
        masks[name] = _fit(name, mask, long_RL)
    return Inputs({name: losses[name] for name in score.reads}, masks["trained"], masks["same_context"])


def row_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """Return a seed for each row, from a single seed or one per row.

    Raises:
        UserError: the number of seeds differs from the number of rows, or a seed is not an integer in 0 .. 2^64-1.
    """
    try:
        seeds = [seed] * rows if isinstance(seed, (int, float, np.number)) else list(seed)
        numbers = [operator.index(each) for each in seeds]
    except TypeError:
        raise UserError(f"seed: got {seed}, needs an integer, or one per row") from None
    if len(numbers) != rows:
        raise UserError(f"seed: got {len(numbers)} seeds for {rows} rows; give one for all or one per row")
    for number in numbers:
        if not 0 <= number < 2**64:
            raise UserError(f"seed: got {number}, needs 0 <= seed < 2^64")
    return numbers


def _losses(values: Given) -> Tensor:
    if isinstance(values, Tensor):
        return values.double()
    return torch.from_numpy(np.array(values, dtype=np.float64))


def _fit(name: str, values: Tensor, long_RL: Tensor) -> Tensor:
    if values.shape != long_RL.shape:
        raise UserError(f"{name}: got shape {list(values.shape)}, needs long_loss's {list(long_RL.shape)}")
    return values.to(long_RL.device)
