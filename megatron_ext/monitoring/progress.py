"""Print the progress of training: a live bar on a terminal, plain lines in a log file."""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

EVERY_SECONDS = 10.0
_BAR = "{desc} |{bar:8}| {percentage:3.0f}% {postfix} [{elapsed} < {remaining}]"


def print_above(text: str, stream: TextIO | None = None) -> None:
    """Print a line on stderr or `stream`, above a progress bar; a terminal that is gone or a full disk ends nothing."""
    stream = stream or sys.stderr
    with contextlib.suppress(OSError):
        tqdm.write(text, file=stream)
        stream.flush()


class Progress:
    """Shows step, loss, gradient norm, learning rate, window, tokens/s and the remaining time on stderr or `stream`.

    On a terminal it is one live line. Otherwise (Slurm's log files) it prints a plain line at the first and the last
    step, and in between whenever `every_steps` steps or `EVERY_SECONDS` have passed. A resumed run starts after
    `first_step` of `total_steps` steps. If not `enabled` (ranks other than 0), every method is a no-op.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        enabled: bool = True,
        *,
        every_steps: int = 10,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._enabled = enabled
        self._total = total_steps
        self._every_steps = every_steps
        self._line_step = first_step  # step of the last plain line
        self._line_time = time.monotonic()
        self._next_line = first_step + 1
        self._bar: tqdm[Any] | None = None
        if enabled and self._stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                file=self._stream,
                bar_format=_BAR,
                smoothing=0.1,  # steps slow down as the window grows, so old times must decay
                dynamic_ncols=True,
                desc=f"step {first_step:,}/{total_steps:,}",
            )

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step's `step` (0-based), `lm_loss`, `grad_norm`, `learning_rate`, `window` and `tokens_per_s`."""
        if not self._enabled:
            return
        done = record["step"] + 1
        step = f"step {done:,}/{self._total:,}"
        figures = (
            "loss {lm_loss:.4f} | norm {grad_norm:.3g} | lr {learning_rate:.1e} | window {window:,} | "
            "{tokens_per_s:,.0f} tokens/s"
        ).format_map(record)
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_description_str(step, refresh=False)
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(done - self._bar.n)
        elif done >= min(self._next_line, self._total) or now - self._line_time >= EVERY_SECONDS:
            seconds = (self._total - done) * (now - self._line_time) / (done - self._line_step)
            self.note(f"{step} | {figures} | {tqdm.format_interval(round(seconds))} left")
            self._line_step = done
            self._line_time = now
            self._next_line = done + self._every_steps

    def note(self, text: str) -> None:
        """Print a separate line, on a terminal above the bar."""
        if self._enabled:
            print_above(text, self._stream)

    def close(self) -> None:
        """End the bar's line; safe to call twice."""
        if self._bar is not None:
            self._bar.close()
