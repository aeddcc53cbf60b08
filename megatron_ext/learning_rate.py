"""Compute the learning rate as a pure function of the optimizer step, so that resuming needs no state."""

import math
from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "WSD"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up, then a decay from `peak` to `minimum`."""

    peak: float  # the learning rate after warm-up
    minimum: float  # the learning rate at and after `decay_steps`
    warmup_steps: int  # W; step t < W has peak * (t + 1) / W, so that the first step trains
    decay_steps: int  # the step at which `minimum` is reached, including warm-up
    # `constant` never decays; `WSD` stays at the peak and falls linearly in the last `wsd_steps`
    style: DecayStyle = "cosine"
    wsd_steps: int = 0  # length of the WSD decay
    first_step: int = 0  # the schedule step that corresponds to the run's step 0
    # step t < W has peak * t / W instead, as in transformers and the papers' code: the first rate is 0
    from_zero: bool = False

    def at(self, step: int) -> float:
        """Return the learning rate of the run's 0-based optimizer step."""
        step += self.first_step
        if step < self.warmup_steps:
            if not self.from_zero:
                step += 1
            return self.peak * step / self.warmup_steps
        if self.style == "constant":
            return self.peak
        if step >= self.decay_steps:
            return self.minimum
        start = self.warmup_steps
        if self.style == "WSD":
            start = self.decay_steps - self.wsd_steps
        share = max(step - start, 0) / (self.decay_steps - start)
        height = 1 - share
        if self.style == "cosine":
            height = (1 + math.cos(math.pi * share)) / 2
        return self.minimum + (self.peak - self.minimum) * height
