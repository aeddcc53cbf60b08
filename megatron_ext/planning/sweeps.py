"""What a run would cost with rows of other lengths, and on other numbers of cards; each with its own best layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from megatron_ext.config import Config
from megatron_ext.planning.search import Layout, search, windows
from megatron_ext.planning.step_time import Speeds, step_time, work_of
from megatron_ext.schedule import ScheduleKind

LENGTHS = tuple(2**power for power in range(13, 20))  # 8K .. 512K
FACTORS = (0.25, 0.5, 1, 2, 4)  # of the cards asked for


@dataclass(frozen=True, kw_only=True)
class AtLength:
    """Holds the fastest layout for rows of a length, as many tokens in a step as the run has.

    Attributes:
        length: tokens of a row.
        layout: None where nothing fits.
        seconds: of a step at the moments of the run's schedule, its windows grown or shrunk with the row.
        full: of a step whose window is the whole row.
    """

    length: int
    layout: Layout | None
    seconds: tuple[float, ...] = ()
    full: float = 0.0

    @property
    def saving(self) -> float:
        """The share of the time that the schedule saves."""
        return 1 - mean(self.seconds) / self.full


def by_length(
    config: Config, gpus: int, gpu: str, vocab_size: int, speeds: Speeds, *, offload: bool = True
) -> list[AtLength]:
    """Find the fastest layout for each length; `offload`: as for `search`."""
    tokens = config.data.seq_length * config.data.global_batch_size
    phases = [window / config.data.seq_length for window in windows(config)]
    constant = replace(config.window, window_schedule=ScheduleKind.CONSTANT, window_end=None)
    found = []
    for length in LENGTHS:
        data = replace(config.data, seq_length=length, global_batch_size=max(tokens // length, 1))
        one = replace(config, window=constant, data=data)
        best = search(one, gpus, gpu, vocab_size, speeds, top=1, offload=offload).best
        if not best:
            found.append(AtLength(length=length, layout=None))
            continue

        def seconds(window: int, layout: Layout = best[0]) -> float:
            return step_time(work_of(layout.config, gpus, gpu, vocab_size, window), speeds).total

        own = tuple(seconds(max(round(phase * length), 1)) for phase in phases)
        found.append(AtLength(length=length, layout=best[0], seconds=own, full=seconds(length)))
    return found


@dataclass(frozen=True, kw_only=True)
class AtSize:
    """Holds the fastest layout on a number of cards, for the run as it is and for one whose batch grows with them.

    Attributes:
        gpus: cards.
        strong: the run's own batch; None where no layout divides it or fits.
        weak: a batch as many times the run's as the cards are, for as many tokens in all.
        strong_hours, weak_hours: of the whole run.
    """

    gpus: int
    strong: Layout | None
    weak: Layout | None
    strong_hours: float
    weak_hours: float


def by_gpus(
    config: Config, gpus: int, gpu: str, vocab_size: int, speeds: Speeds, *, offload: bool = True
) -> list[AtSize]:
    """Find the fastest layouts on a quarter to four times the cards; `offload`: as for `search`."""
    found = []
    for factor in FACTORS:
        size, batch = round(gpus * factor), round(config.data.global_batch_size * factor)
        if size < 1:
            continue

        def fastest(rows: int, size: int = size) -> Layout | None:
            one = replace(config, data=replace(config.data, global_batch_size=rows))
            return next(iter(search(one, size, gpu, vocab_size, speeds, top=1, offload=offload).best), None)

        strong, weak = fastest(config.data.global_batch_size), fastest(batch) if batch else None
        found.append(
            AtSize(
                gpus=size,
                strong=strong,
                weak=weak,
                strong_hours=strong.hours if strong else 0.0,
                weak_hours=weak.hours * config.data.global_batch_size / batch if weak else 0.0,
            )
        )
    return found


def describe_lengths(points: Sequence[AtLength]) -> Iterator[str]:
    """Yield a table of step times and savings by the row's length."""
    yield f"{'row':>9} {'s/step':>9} {'full':>9} {'saved':>7}  layout"
    for point in points:
        if point.layout is None:
            yield f"{point.length:>9,}  no layout fits"
            continue
        yield (
            f"{point.length:>9,} {mean(point.seconds):9.3f} {point.full:9.3f} {point.saving:7.1%}  {point.layout.name}"
        )
    yield (
        "as many tokens in a step for each; windows grown or shrunk with the row; full: of a window as long as it; "
        "each row one document"
    )


def describe_sizes(points: Sequence[AtSize], price: float) -> Iterator[str]:
    """Yield a table of hours and cost by the number of cards; `price`: dollars of an hour of one card."""
    yield f"{'cards':>9} {'hours':>9} {'cost':>12}  {'hours, batch x cards':>21} {'cost':>12}"
    for point in points:
        words = [
            f"{hours:>{width},.1f} {f'${hours * point.gpus * price:,.0f}':>12}" if layout else f"{'-':>{width + 13}}"
            for layout, hours, width in (
                (point.strong, point.strong_hours, 9),
                (point.weak, point.weak_hours, 22),
            )
        ]
        yield f"{point.gpus:>9,} {words[0]} {words[1]}"
    yield (
        "left: the run as it is; right: a batch that grows with the cards, for as many tokens in all; "
        "each row one document"
    )
