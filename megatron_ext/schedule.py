"""Compute the context-window schedule of SkyLadder (arXiv 2503.15450): window_at(step), a pure function.

T_x = (end - start) / rate is the length of the expansion in steps; after it the window is `end`:

    constant         end
    linear           start + floor(rate * t)
    stepwise         linear rounded down to a multiple of `round_to`, or (aligned) to end / 2^k
    sinusoidal       start + (end - start) * sin(pi/2 * t/T_x)
    exponential      start * (end/start) ** (t/T_x)
    cosine           start + (end - start) * (1 - cos(pi/2 * t/T_x))
    logarithmic      start * (end/start) ** (log(1+t) / log(1+T_x))
    continual        start until `switch_step`, then end
    long_to_short    end + start - linear(t)
    cyclic_jump      `cycles` ramps of T_x steps, each from `start` up
    cyclic_gradual   2 * cycles ramps of T_x steps, up, down, up, ..., ending with an upward ramp

The cycles of `cyclic_gradual` end in a half, so that the window rises to `end` and stays there: 1.5 cycles are up,
down, up (the paper's Table 22 has 4.5, 2.5, 1.5).

Every value is floored to an integer and clamped to [start, end]. Rates and shares are exact fractions, not the
nearest float: 0.29 tokens per step are 29 tokens after 100 steps, not 28.99..., and 0.1111111111111111 is 1/9.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from operator import itemgetter

from megatron_ext.errors import UserError


class ScheduleKind(StrEnum):
    """Window schedules, by their names in `--window-schedule`."""

    CONSTANT = "constant"
    LINEAR = "linear"
    STEPWISE = "stepwise"
    SINUSOIDAL = "sinusoidal"
    EXPONENTIAL = "exponential"
    COSINE = "cosine"
    LOGARITHMIC = "logarithmic"
    CONTINUAL = "continual"
    LONG_TO_SHORT = "long_to_short"
    CYCLIC_JUMP = "cyclic_jump"
    CYCLIC_GRADUAL = "cyclic_gradual"


_CYCLIC = (ScheduleKind.CYCLIC_JUMP, ScheduleKind.CYCLIC_GRADUAL)


@dataclass(frozen=True)
class WindowSchedule:
    """Computes the window of each step. Build it with `build_schedule`, which checks the values."""

    kind: ScheduleKind  # the curve
    start: int  # w_s, the smallest window, in tokens
    end: int  # w_e, the window after the expansion, in tokens
    rate: Fraction  # a, the tokens of window gained per step, exactly
    round_to: int = 1024  # `stepwise` rounds down to a multiple of this many tokens
    aligned: bool = False  # `stepwise` rounds down to end / 2^k instead
    switch_step: int = 0  # the first step of `continual` with the window `end`
    cycles: float = 1  # number of cycles of the cyclic schedules; for `cyclic_gradual` it ends in a half

    @cached_property
    def ramp_steps(self) -> Fraction:
        """T_x, the steps of one ramp from start to end (not always an integer)."""
        if self.end <= self.start:
            return Fraction(0)
        return (self.end - self.start) / self.rate

    @cached_property
    def expansion_steps(self) -> int:
        """The first step from which the window is always `end`."""
        if self.kind is ScheduleKind.CONSTANT or self.start == self.end:
            return 0
        if self.kind is ScheduleKind.CONTINUAL:
            return self.switch_step
        ramps = {ScheduleKind.CYCLIC_JUMP: self.cycles, ScheduleKind.CYCLIC_GRADUAL: 2 * self.cycles}.get(self.kind, 1)
        return math.ceil(Fraction(ramps) * self.ramp_steps)

    def window_at(self, step: int) -> int:
        """Return the window in tokens at the 0-based optimizer step.

        Raises:
            ValueError: the step is negative.
        """
        if step < 0:
            raise ValueError(f"step: got {step}, needs >= 0 (steps count from 0)")
        if step >= self.expansion_steps:
            return self.end
        window = self._curve(step)
        if isinstance(window, float):  # 32 * 1024**0.3 is 256, but floats give slightly less
            window *= 1 + 1e-12
        return min(max(math.floor(window), self.start), self.end)

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (window, number of steps) for each run of equal windows in the steps first..end-1, in order."""
        for window, parts in groupby(self._monotone_runs(first, end), key=itemgetter(0)):
            yield window, sum(steps for _, steps in parts)

    def _monotone_runs(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield runs that also end at each turn; between two turns the window is monotone: few steps are evaluated."""
        while first < end:
            turn = end
            if first < self.expansion_steps:
                turn = min(end, self.expansion_steps)
                if self.kind in _CYCLIC:  # up to the next ramp
                    turn = min(turn, math.ceil((first // self.ramp_steps + 1) * self.ramp_steps))
            window = self.window_at(first)
            most = 1
            while first + most < turn and self.window_at(first + most) == window:
                most *= 2
            low = first + most // 2 + 1
            high = min(first + most, turn)
            stop = low + bisect_left(range(low, high), True, key=lambda step: self.window_at(step) != window)
            yield window, stop - first
            first = stop

    def _curve(self, t: int) -> float | Fraction:
        """Return the window of step t, during the expansion, before it is floored and clamped."""
        start = self.start
        end = self.end
        rise = self.end - self.start
        linear = start + math.floor(t * self.rate)
        progress = t / float(self.ramp_steps)
        match self.kind:
            case ScheduleKind.LINEAR:
                return linear
            case ScheduleKind.STEPWISE if self.aligned:
                return max(window for window in _halvings(end) if window <= linear)
            case ScheduleKind.STEPWISE:
                return self.round_to * (linear // self.round_to)
            case ScheduleKind.SINUSOIDAL:
                return start + rise * math.sin(math.pi / 2 * progress)
            case ScheduleKind.EXPONENTIAL:
                return start * (end / start) ** progress
            case ScheduleKind.COSINE:
                return start + rise * (1 - math.cos(math.pi / 2 * progress))
            case ScheduleKind.LOGARITHMIC:
                return start * (end / start) ** (math.log1p(t) / math.log1p(self.ramp_steps))
            case ScheduleKind.LONG_TO_SHORT:
                return end + start - linear
            case ScheduleKind.CYCLIC_JUMP:
                return start + t * self.rate % rise
            case ScheduleKind.CYCLIC_GRADUAL:
                ramp, within = divmod(t * self.rate, rise)
                return start + within if ramp % 2 == 0 else end - within
        return start  # continual


def build_schedule(
    kind: str | ScheduleKind = "linear",
    *,
    start: int = 32,
    end: int,
    rate: float | None = None,
    expansion_fraction: float | None = None,
    total_steps: int | None = None,
    round_to: int = 1024,
    aligned: bool = False,
    switch_step: int | None = None,
    cycles: float | None = None,
) -> WindowSchedule:
    """Check the values and build the schedule.

    Args:
        start: w_s in tokens, 1..end.
        end: w_e in tokens, usually the row length.
        rate: a, tokens of window per optimizer step, so that T_x = (end - start) / rate.
            Default: the paper's 1/8, if `expansion_fraction` is not given either.
        expansion_fraction: T_x / total_steps, in (0, 1]; the alternative to `rate`.
        total_steps: required with `expansion_fraction`.
        round_to: the step of `stepwise`, in tokens.
        aligned: `stepwise` uses end / 2^k, so that windows divide the row.
        switch_step: required by `continual`.
        cycles: 1, 2, ... for `cyclic_jump` (default 1); 0.5, 1.5, 2.5, ... for `cyclic_gradual` (default 0.5, a
            single ramp).

    Raises:
        UserError: a value out of range, both `rate` and `expansion_fraction`, or a missing value that the kind
            requires.
    """
    if kind not in list(ScheduleKind):
        raise UserError(f"window_schedule: got {kind!r}, needs one of {', '.join(ScheduleKind)}")
    kind = ScheduleKind(kind)
    if not 1 <= start <= end:
        raise UserError(f"window_start: got {start}, needs 1..{end} (window_end); lower it or raise window_end")
    exact_rate = _exact_rate(end - start, rate, expansion_fraction, total_steps)
    if round_to < 1:
        raise UserError(f"window_round_to: got {round_to}, needs >= 1 token")
    if kind is ScheduleKind.STEPWISE and aligned and start not in _halvings(end):
        lower = [window for window in _halvings(end) if window <= start]
        near = max(lower, default=min(_halvings(end)))
        raise UserError(f"window_start: got {start}, window_aligned needs window_end {end} / 2^k; use {near}")
    if kind is ScheduleKind.CONTINUAL and (switch_step is None or switch_step < 0):
        raise UserError(f"window_switch_step: got {switch_step}, the continual schedule needs a step >= 0")
    # the last half cycle of `cyclic_gradual` is an upward ramp, so that the window ends at `end`
    half = 0.5 if kind is ScheduleKind.CYCLIC_GRADUAL else 0.0
    if cycles is None:
        cycles = 1 - half
    if kind in _CYCLIC and not (0 < cycles < math.inf and float(cycles - half).is_integer()):
        raise UserError(f"window_cycles: got {cycles:g}, {kind} needs {1 - half:g}, {2 - half:g}, {3 - half:g}, ...")
    return WindowSchedule(kind, start, end, exact_rate, round_to, aligned, switch_step or 0, cycles)


def _exact_rate(rise: int, rate: float | None, expansion_fraction: float | None, total_steps: int | None) -> Fraction:
    """Return the tokens of window gained per step from the arguments of `build_schedule`; `rise` is end - start."""
    if expansion_fraction is None:
        if rate is None:
            rate = 1 / 8
        # also rejects a rate so small that the number of ramp steps overflows a float
        if not (rate > 0 or rise == 0) or not math.isfinite(rate) or (rate and math.isinf(rise / rate)):
            raise UserError(f"window_rate: got {rate}, needs a finite number > 0 (tokens per step, e.g. 0.125)")
        return _exact(rate)
    if rate is not None:
        raise UserError(
            f"window_rate: got {rate} beside window_expansion_fraction {expansion_fraction}; give only one of the two"
        )
    if not 0 < expansion_fraction <= 1:
        raise UserError(f"window_expansion_fraction: got {expansion_fraction}, needs (0, 1], e.g. 0.64")
    if total_steps is None or total_steps < 1:
        raise UserError(f"total_steps: got {total_steps}, window_expansion_fraction needs it to be >= 1")
    return rise / (_exact(expansion_fraction) * total_steps)


def _exact(number: float) -> Fraction:
    """Return the fraction that this float stands for: 7/100 for 0.07, 1/9 for 0.111..., else the shortest decimal."""
    near = Fraction(number).limit_denominator(1000)
    if float(near) == number:
        return near
    return Fraction(repr(float(number)))


def _halvings(end: int) -> list[int]:
    """List end / 2^k while it is an integer."""
    windows = [end]
    while windows[-1] % 2 == 0:
        windows.append(windows[-1] // 2)
    return windows
