"""Measure how steadily a run trains: the four figures of the SkyLadder paper, over the given steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import UserError
from megatron_ext.monitoring.runs import Run, at_common_steps

VOLATILITY_SPAN = 10  # the paper's L[t-9..t]


def stability(losses: npt.ArrayLike, gradient_norms: npt.ArrayLike) -> dict[str, float]:
    """Compute the four figures of at least 10 consecutive steps; lower is steadier.

    L_t is the training loss in nats and G_t the gradient norm before clipping, t = 1..n:

        volatility       mean over t >= 10 of Std(L[t-9..t]), the population standard deviation
        smoothness       mean over t >= 2 of |L_t - L_{t-1}|
        loss ratio       mean over t >= 2 of L_t / min(L_1..L_{t-1}); below 1 if the loss falls at every step
        min(norm, 1)     mean of min(G_t, 1)
    """
    loss = np.asarray(losses, dtype=np.float64)
    return {
        "volatility": np.lib.stride_tricks.sliding_window_view(loss, VOLATILITY_SPAN).std(axis=1).mean(),
        "smoothness": np.abs(np.diff(loss)).mean(),
        "loss ratio": (loss[1:] / np.minimum.accumulate(loss)[:-1]).mean(),
        "min(norm, 1)": np.minimum(gradient_norms, 1.0).mean(),
    }


def stability_between(run: Run, first: int, end: int) -> dict[str, float]:
    """Compute the stability figures of steps `first` to `end` - 1, ignoring steps that are not finite.

    Raises:
        UserError: fewer than 10 of these steps are recorded.
    """
    steps, losses, norms = at_common_steps(run.curve("lm_loss"), run.curve("grad_norm"))
    chosen = (steps >= first) & (steps < end)
    if np.count_nonzero(chosen) < VOLATILITY_SPAN:
        raise UserError(
            f"stability_steps: got {first} {end}, of which {run.folder} has {np.count_nonzero(chosen)} finite steps, "
            f"needs {VOLATILITY_SPAN}; its last step is {run.steps - 1}"
        )
    return stability(losses[chosen], norms[chosen])
