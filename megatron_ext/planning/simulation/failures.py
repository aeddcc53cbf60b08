"""How much of a run's time is progress: steps, failures, checkpoints and restarts, one failure after the other.

    steps   1 2 3 S 4 5 6 S 7 8 x              S a save, x a failure: 7 and 8 are lost
                                  R R 7 8 9 S    R the restart

Between two failures nothing is left to chance, so the time of every step and save is a running sum, and a failure is a
search in it: a run costs as many operations as it has failures. An event library would step through its millions of
steps.

Failures come at a constant rate (exponential), during saves and restarts too: then the restart begins anew. For
synchronous saves the expected time is Daly's, M e^(R/M) (e^((tau + d)/M) - 1) T / tau (Future Generation Computer
Systems 22, 2006), and the best interval about Young's sqrt(2 d M): M the job's mean time between failures, d a save's
seconds, R a restart's, T the work, tau the work between two saves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_ext.arrays import Float64


@dataclass(frozen=True, kw_only=True)
class Saves:
    """Says what a checkpoint costs.

    Attributes:
        stall: seconds for which training stops.
        write: seconds from the beginning of a save until the checkpoint is complete; `stall` where it is synchronous.
    """

    stall: float
    write: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Holds what became of a run that was drawn several times, on average.

    Attributes:
        interval: steps between two saves; `work`: seconds of steps between them.
        seconds: from its first step to its last; inf where the run gets nowhere.
        progress: seconds of steps that counted.
        saving: seconds that training stopped for saves that lasted.
        redone: seconds of steps and saves that a failure undid.
        restarting: seconds of restarts.
        failures: their number.
    """

    interval: int
    work: float
    seconds: float
    progress: float
    saving: float
    redone: float
    restarting: float
    failures: float

    @property
    def goodput(self) -> float:
        """The share of the time that is progress; 0 where the run gets nowhere."""
        return self.progress / self.seconds


MOST_FAILURES_IN_A_ROW = 10_000  # without a new checkpoint: such a run gets nowhere


def run_through(
    steps: Float64, interval: int, saves: Saves, *, mtbf: float, restart: float, seed: int, draws: int
) -> Outcome:
    """Run all steps through to the end, `draws` times.

    Args:
        steps: float64 [n], the seconds of each.
        interval: steps between two saves.
        saves: what each costs; the next one waits until the one before is complete.
        mtbf: seconds between failures of the job, on average; inf for none.
        restart: seconds from a failure to the next step.
        seed: of the failures.
        draws: of the failures.
    """
    count = len(steps)
    saved_after = np.arange(interval, count + 1, interval)  # steps done when each save begins
    pause = np.zeros(count)  # seconds that training stops after a step
    pause[saved_after - 1] = saves.stall
    between = np.diff(np.cumsum(steps)[saved_after - 1])
    pause[saved_after[1:] - 1] += np.maximum(saves.write - saves.stall - between, 0.0)
    clock = np.concatenate([[0.0], np.cumsum(steps + pause)])  # seconds at which each step begins, without failures
    paused = np.concatenate([[0.0], np.cumsum(pause)])
    complete = clock[saved_after] - saves.stall + saves.write
    chance = np.random.default_rng(seed)
    seconds = redone = restarting = saving = 0.0
    done = failures = in_a_row = ended = 0
    while ended < draws and in_a_row <= MOST_FAILURES_IN_A_ROW:
        left, runs = clock[count] - clock[done], chance.exponential(mtbf) if math.isfinite(mtbf) else math.inf
        if runs >= left:
            seconds, saving = seconds + left, saving + paused[count] - paused[done]
            done, ended, in_a_row = 0, ended + 1, 0
            continue
        at = clock[done] + runs
        kept = int(np.searchsorted(complete, at, side="right"))
        safe = max(int(saved_after[kept - 1]), done) if kept else done
        saving += paused[safe] - paused[done]
        redone += at - clock[safe]
        seconds += runs
        failures, in_a_row = failures + 1, 0 if safe > done else in_a_row + 1
        done = safe
        down = chance.exponential(mtbf)
        while down < restart and in_a_row <= MOST_FAILURES_IN_A_ROW:  # a failure during a restart begins it anew
            seconds, restarting = seconds + down, restarting + down
            failures, in_a_row = failures + 1, in_a_row + 1
            down = chance.exponential(mtbf)
        seconds, restarting = seconds + restart, restarting + restart
    progress = float(steps.sum())
    return Outcome(
        interval=interval,
        work=interval * progress / count,
        seconds=float(seconds / draws) if ended == draws else math.inf,
        progress=progress,
        saving=float(saving / draws),
        redone=float(redone / draws),
        restarting=restarting / draws,
        failures=failures / draws,
    )


def young(save: float, mtbf: float) -> float:
    """Return about the best seconds of work between two saves of so many seconds: sqrt(2 d M)."""
    return math.sqrt(2 * save * mtbf)


def enough_draws(work: float, mtbf: float) -> int:
    """Return how often to draw a run of so many seconds to see about 400 failures: at least 20, at most 20,000."""
    return min(max(math.ceil(400 * mtbf / work), 20), 20_000)


def intervals_around(best: float, most: int) -> list[int]:
    """List numbers of steps around a best one, an eighth to eight times it in factors of about 1.4, up to `most`."""
    around = [round(best * 2 ** (power / 2)) for power in range(-6, 7)]
    return sorted({min(max(steps, 1), most) for steps in around})
