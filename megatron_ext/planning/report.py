"""Writes what a search for layouts found: a table, what bounds the first one, and what more of something would buy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from megatron_ext.checkpoint.hf.names import count_active_parameters
from megatron_ext.config import Config
from megatron_ext.planning.flops import utilisation
from megatron_ext.planning.run_plan import gibibytes
from megatron_ext.planning.sampled_rows import SampledRows
from megatron_ext.planning.search import Found, search, windows
from megatron_ext.planning.step_time import Speeds, step_time, work_of


def describe(
    found: Found,
    config: Config,
    gpus: int,
    gpu: str,
    vocab_size: int,
    speeds: Speeds,
    rows: SampledRows | None = None,
    *,
    offload: bool = True,
) -> Iterator[str]:
    """Yield the lines for `found`, what a search of `config` gave with the same rows and the same `offload`."""
    card = speeds.gpu(gpu)
    if not found.best:
        need = f"; the smallest need is {gibibytes(found.larger.memory)}" if found.larger else ""
        yield f"none of {found.tried:,} layouts fits on {gpus} {gpu} of {card.memory:.0f} GiB{need}"
        return
    yield f"{found.tried:,} layouts on {gpus:,} {gpu} of {card.memory:.0f} GiB; the fastest that fit:"
    heads = f"{'s/step':>8} {'tokens/s/GPU':>12} {'MFU':>6} {'memory':>10} {'hours':>8} {'cost':>11}  bound by"
    yield f"{'':>3} {'layout':58} {heads}"
    for number, layout in enumerate(found.best, 1):
        tokens = config.data.global_batch_size * config.data.seq_length
        seconds = layout.full.total
        yield (
            f"{number:>3} {layout.name:58} {seconds:8.2f} {tokens / seconds / gpus:12,.0f} "
            f"{_mfu(layout.config, gpus, gpu, vocab_size, seconds, speeds, rows):6.1%} {gibibytes(layout.memory):>10} "
            f"{layout.hours:8,.1f} {f'${layout.hours * gpus * card.hour:,.0f}':>11}  {layout.full.bound}"
        )
    best = found.best[0]
    yield "s/step, tokens/s and MFU at the last window; hours and cost of the whole run, its windows averaged"
    if rows is not None:
        whole = step_time(work_of(best.config, gpus, gpu, vocab_size, windows(config)[-1]), speeds).total
        yield f"were each row one document, the first would take {whole:.2f} s/step"
    parts = sorted(asdict(best.full).items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {seconds / best.full.total:.0%}" for name, seconds in parts if seconds > 0)
    yield f"\nthe first, at the last window: {shares}"
    saved = 1 - best.seconds / best.full.total
    if len(set(windows(config))) > 1:
        yield f"the window schedule saves {saved:.1%} of the time"
    if found.larger is not None:
        more = found.larger.memory / 0.9 - card.memory * 2**30
        gain = 1 - found.larger.seconds / best.seconds
        yield f"{gibibytes(int(more))} more on each card would allow {found.larger.name}: {gain:.1%} less time"
    else:
        yield "more memory on each card would not make it faster"
    twice = search(config, 2 * gpus, gpu, vocab_size, speeds, rows=rows, top=1, offload=offload)
    if twice.best:
        hours, price = twice.best[0].hours, twice.best[0].hours * 2 * gpus * card.hour
        yield f"{2 * gpus:,} cards: {hours:,.1f} hours with {twice.best[0].name}, ${price:,.0f}"
    else:
        yield f"{2 * gpus:,} cards: no layout divides the {config.data.global_batch_size:,} rows of a step among them"
    yield from _by_window(best.config, gpus, gpu, vocab_size, speeds, rows)


def _mfu(
    config: Config, gpus: int, gpu: str, vocab_size: int, seconds: float, speeds: Speeds, rows: SampledRows | None
) -> float:
    """Return the MFU of a step at the last window, as metrics.jsonl counts it: of the peak in bf16."""
    work = work_of(config, gpus, gpu, vocab_size, windows(config)[-1], rows)
    assert work.context is not None
    parameters, peak = count_active_parameters(config.model, vocab_size), gpus * speeds.gpu(gpu).bf16 * 1e12
    # the keys that a query sees on average are half its context, causal as it is
    return utilisation(config.model, parameters, work.tokens, 2 * work.context, seconds=seconds, peak=peak)


def _by_window(
    config: Config, gpus: int, gpu: str, vocab_size: int, speeds: Speeds, rows: SampledRows | None
) -> Iterator[str]:
    """Yield step times of the first layout by the window's size, for rows of the run's length."""
    seen = sorted(set(windows(config)))
    if len(seen) < 2:
        return
    yield "\nwindow      s/step    attention's share"
    for window in seen:
        time = step_time(work_of(config, gpus, gpu, vocab_size, window, rows), speeds)
        yield f"{window:>8,}  {time.total:8.3f}    {time.attention / time.total:.0%}"
