"""Print the progress of training: a live bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

_BAR = "{desc} |{bar:8}| {percentage:3.0f}% {postfix} [{elapsed} < {remaining}]"
_SMOOTHING = 0.1  # weight of the newest step's time; steps slow down as the window grows, so old times must decay


class Progress:
    """Shows step, loss, gradient norm, learning rate, window, tokens/s and the remaining time on stderr or `stream`.

    On a terminal it is one live line. Otherwise (Slurm's log files) it prints a plain line at the first and the last
    step, and in between whenever `every_steps` steps or `every_seconds` seconds have passed. A resumed run starts after
    `first_step` of `total_steps` steps. If not `enabled` (ranks other than 0), every method is a no-op.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        enabled: bool = True,
        *,
        every_steps: int = 10,
        every_seconds: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._enabled = enabled
        self._total = total_steps
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._done = first_step
        self._line_done: int | None = None  # completed steps when the last plain line was written
        self._line_time = self._step_end = time.monotonic()
        self._seconds_per_step: float | None = None
        self._bar: tqdm[Any] | None = None
        if enabled and self._stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                file=self._stream,
                bar_format=_BAR,
                smoothing=_SMOOTHING,
                dynamic_ncols=True,
                desc=f"step {first_step:,}/{total_steps:,}",
            )

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step's `step` (0-based), `lm_loss`, `grad_norm`, `learning_rate`, `window` and `tokens_per_s`."""
        if not self._enabled:
            return
        done = int(record["step"]) + 1
        now = time.monotonic()
        newest = (now - self._step_end) / max(1, done - self._done)
        old = self._seconds_per_step
        self._seconds_per_step = newest if old is None else old + _SMOOTHING * (newest - old)
        self._step_end, self._done = now, done
        if self._bar is None:
            self._plain_line(record)
            return
        self._bar.set_description_str(f"step {done:,}/{self._total:,}", refresh=False)
        self._bar.set_postfix_str(_figures(record), refresh=False)
        self._bar.update(done - self._bar.n)

    def note(self, text: str) -> None:
        """Print a separate line above the bar."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the bar's line; safe to call twice."""
        if self._bar is not None:
            self._bar.close()

    def _plain_line(self, record: Mapping[str, Any]) -> None:
        """Print a line if one is due; one line per step would make a log file unreadable."""
        now, done = self._step_end, self._done
        due = (
            self._line_done is None
            or done >= self._total
            or done - self._line_done >= self._every_steps
            or now - self._line_time >= self._every_seconds
        )
        if not due:
            return
        self._line_done, self._line_time = done, now
        left = (self._seconds_per_step or 0.0) * max(0, self._total - done)
        text = f"step {done:,}/{self._total:,} | {_figures(record)} | {tqdm.format_interval(round(left))} left"
        print(text, file=self._stream, flush=True)


def _figures(record: Mapping[str, Any]) -> str:
    loss, norm, rate = record["lm_loss"], record["grad_norm"], record["learning_rate"]
    window, speed = record["window"], record["tokens_per_s"]
    return f"loss {loss:.4f} | norm {norm:.3g} | lr {rate:.1e} | window {window:,} | {speed:,.0f} tokens/s"
