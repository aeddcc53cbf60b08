"""What a context-parallel plan moves, how even it is and what it costs: python benchmarks/context_parallel.py

For rows of 32K, 128K and 512K tokens on 2 to 64 ranks, over a linear window schedule and at windows that do not
divide the row:

    documents   rows of documents, log-normal like FineWeb-Pro's (median 849, mean 1,364 tokens; arXiv 2503.15450,
                Table 26), document mask on
    novels      rows of real books, document mask on (--novels DIR with *.txt; tokens are taken as bytes / 4)
    one         rows of one document: the window's grid alone

Each line gives, over the schedule: attention pairs of the worst rank over the mean (the worst window, and the mean);
rows of keys and values moved, as a share of (a), the all-gather of the whole row, which moves (cp - 1) T rows; MiB
per layer, at 1 KiB a row; and (b), every segment padded to a multiple of 2 cp and zigzagged, whose ring moves as
much as an all-gather of the padded row: the tokens it wastes and the attention pairs of its ranks over our mean.
Then (spread) the rows moved of 200 other rows of documents at window L, beside what no assignment can beat whose
slowest rank has 1.10 of the mean pairs, or as many as the plan's (megatron_ext/context_parallel/lower_bound.py says
why): a single document can hold most of a row's attention pairs, and must then be shared out whatever the plan. Once
for NVLink and once for --cp-row-cost 570, between nodes. Then (scale) rows of 1M and 4M tokens on 64 to 512 ranks, with
the time of each plan. Then the goals, and (times) the time of `plan` with the lists of one rank.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_ext.context_parallel import plan
from megatron_ext.context_parallel.lower_bound import fewest_rows
from megatron_ext.layout import PackedLayout, build_layout, segment_pairs
from megatron_ext.schedule import build_schedule

K = 1024
LENGTHS = (32 * K, 128 * K, 512 * K)
SIZES = (2, 4, 8, 16, 32, 64)
KIB_PER_ROW = 1  # keys and values of 4 heads of 64 in bfloat16, one layer
ROWS = 3  # rows of documents tried per window
MANY = 200  # rows of documents of `spread`
SPREAD = ((128 * K, (2, 4, 8, 16, 64)), (512 * K, (2, 4, 8, 16, 64)))
ROW_COSTS = (64.0, 570.0)  # of --cp-row-cost: NVLink, and between nodes
SCALE = ((1024 * K, (64, 256, 512)), (4096 * K, (64, 256, 512)))
PARTS = ("schedules", "spread", "scale", "times")
BALANCE = 1.10
REPEATS = 5

Rows = list[np.ndarray]  # the document ends of each row


def log_normal_rows(row_length: int, first: int = 0, count: int = ROWS) -> Rows:
    """Draw the document ends of rows whose documents have median 849 and mean 1,364 tokens."""
    rows = []
    for seed in range(first, first + count):
        lengths = np.random.default_rng(seed).lognormal(np.log(849), 0.974, size=row_length // 200)
        ends = np.cumsum(np.maximum(lengths.astype(np.int64), 1))
        rows.append(ends[ends < row_length])
    return rows


def novel_rows(folder: Path, row_length: int) -> Rows:
    """Find the document ends of rows cut from the books of a folder, one after the other in a shuffled order."""
    lengths = np.array([path.stat().st_size // 4 for path in sorted(folder.glob("*.txt"))], dtype=np.int64)
    ends = np.cumsum(np.random.default_rng(0).permutation(lengths))
    starts = np.arange(min(ROWS, int(ends[-1]) // row_length)) * row_length
    return [ends[(ends > start) & (ends < start + row_length)] - start for start in starts]


def windows_of(end: int, count: int) -> list[int]:
    """List windows of a linear schedule from 32 to `end`, at evenly spaced steps."""
    schedule = build_schedule("linear", start=32, end=end)
    steps = np.linspace(0, schedule.expansion_steps, count).astype(int)
    return [schedule.window_at(int(step)) for step in steps]


def odd_windows(row_length: int) -> list[int]:
    """List windows that divide no row."""
    return [window for window in (33, 517, 4100, 12289, int(0.65 * row_length)) if window < row_length]


@dataclass
class Measured:
    """One entry per window and row."""

    window: list[int] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    wasted: list[float] = field(default_factory=list)
    padded_pairs: list[float] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)

    def add(self, window: int, layout: PackedLayout, cp_size: int, policy: str) -> None:
        """Plan one layout and note what comes of it."""
        made = plan(layout, cp_size, policy)
        padded = -(-layout.lengths // (2 * cp_size)) * 2 * cp_size
        self.window.append(window)
        self.balance.append(made.pairs.max() / made.pairs.mean())
        self.moved.append(made.rows_moved.sum() / ((cp_size - 1) * layout.tokens))
        self.wasted.append(padded.sum() / layout.tokens - 1)
        self.padded_pairs.append(segment_pairs(padded).sum() / made.pairs.sum())
        self.policies.append(made.policy.value)


def measure(rows: Rows, row_length: int, cp_size: int, windows: list[int], policy: str) -> Measured:
    """Plan all rows at all windows."""
    measured = Measured()
    for window in windows:
        for ends in rows:
            measured.add(window, build_layout(row_length, ends, window), cp_size, policy)
    return measured


HEADER = (
    f"{'rows':10}{'L':>6}{'cp':>4} | {'balance':>8}{'at':>8}{'mean':>7} | {'moved':>7}{'worst':>8}{'at':>8}"
    f"{'MiB':>9}{'(a) MiB':>9} | {'(b) waste':>9}{'worst':>7}{'pairs':>7} | policies"
)


def line(name: str, row_length: int, cp_size: int, over: Measured, everywhere: Measured) -> str:
    """Write a line of the table: `over` the schedule, and the worst of `everywhere`."""
    uneven, most = int(np.argmax(everywhere.balance)), int(np.argmax(everywhere.moved))
    gathered = (cp_size - 1) * row_length * KIB_PER_ROW / K
    used = {name: over.policies.count(name) for name in sorted(set(over.policies))}
    return (
        f"{name:10}{row_length // K:5}K{cp_size:4} | {everywhere.balance[uneven]:8.3f}{everywhere.window[uneven]:8}"
        f"{np.mean(over.balance):7.3f} | {np.mean(over.moved):7.2%}{everywhere.moved[most]:8.2%}"
        f"{everywhere.window[most]:8}{np.mean(over.moved) * gathered:9.1f}{gathered:9.0f} | "
        f"{np.mean(over.wasted):9.1%}{max(everywhere.wasted):7.0%}{np.mean(over.padded_pairs):7.2f} | "
        + " ".join(f"{name}:{count}" for name, count in used.items())
    )


def document_goals(row_length: int, cp_size: int, everywhere: Measured) -> Iterator[tuple[str, bool]]:
    """Check at every window balance and at most 5 % of (a), together, for L >= 128K and cp <= 16."""
    if row_length < 128 * K or cp_size > 16:
        return
    balance, moved = max(everywhere.balance), max(everywhere.moved)
    yield f"balance {balance:.3f} <= 1.10, moved {moved:.2%} <= 5%", balance <= BALANCE and moved <= 0.05


def one_goals(short: Measured, over: Measured, everywhere: Measured) -> Iterator[tuple[str, bool]]:
    """Check means over windows: at most 10 % of (a) up to L/cp, 45 % over the whole expansion; and balance always."""
    moved_short, moved, balance = np.mean(short.moved), np.mean(over.moved), max(everywhere.balance)
    good = moved_short <= 0.10 and moved <= 0.45 and balance <= BALANCE
    yield f"to L/cp {moved_short:.2%} <= 10%, whole {moved:.2%} <= 45%, balance {balance:.3f} <= 1.10", bool(good)


def joined(*parts: Measured) -> Measured:
    """Join the entries of several."""
    names = ("window", "balance", "moved", "wasted", "padded_pairs", "policies")
    return Measured(*([entry for part in parts for entry in getattr(part, name)] for name in names))


def compare(rows_name: str, rows: Rows, row_length: int, count: int, policy: str) -> list[tuple[str, bool]]:
    """Print the lines of rows of one sort and length; returns the goals with whether each is met."""
    goals = []
    for cp_size in SIZES:
        over = measure(rows, row_length, cp_size, windows_of(row_length, count), policy)
        short = measure(rows, row_length, cp_size, windows_of(row_length // cp_size, count), policy)
        odd = measure(rows, row_length, cp_size, odd_windows(row_length), policy)
        everywhere = joined(over, short, odd)
        print(line(rows_name, row_length, cp_size, over, everywhere), flush=True)
        if rows_name == "novels":  # there are no goals for them
            continue
        one = rows_name == "one"
        checked = one_goals(short, over, everywhere) if one else document_goals(row_length, cp_size, everywhere)
        goals += [(f"{rows_name} {row_length // K}K cp {cp_size}: {text}", good) for text, good in checked]
    return goals


def spread(policy: str) -> None:
    """Print how the rows moved differ between rows: some hold a document with most of the row's attention pairs."""
    print(
        f"\n{MANY} other rows of documents each, window L: rows moved as a share of (a); bound: what no plan can beat"
    )
    print(
        f"{'L':>5}{'cp':>4}{'row cost':>9}  {'':22}{'mean':>7}{'p50':>8}{'p90':>8}{'worst':>8}{'above 5%':>9}  balance"
    )
    for row_length, sizes in SPREAD:
        layouts = [build_layout(row_length, ends, row_length) for ends in log_normal_rows(row_length, 100, MANY)]
        for cp_size, row_cost in itertools.product(sizes, ROW_COSTS):
            gathered = (cp_size - 1) * row_length
            plans = [plan(layout, cp_size, policy, row_cost=row_cost) for layout in layouts]
            balance = [float(made.pairs.max() / made.pairs.mean()) for made in plans]
            shares = {
                "plan": [made.rows_moved.sum() for made in plans],
                "bound at its balance": [
                    fewest_rows(layout, cp_size, even) for layout, even in zip(layouts, balance, strict=True)
                ],
                "bound at 1.10": [fewest_rows(layout, cp_size, BALANCE) for layout in layouts],
            }
            for name, rows in shares.items():
                moved = np.array(rows) / gathered
                middle, high = np.quantile(moved, (0.5, 0.9))
                print(
                    f"{row_length // K:4}K{cp_size:4}{row_cost:9.0f}  {name:22}"
                    f"{moved.mean():7.2%}{middle:8.2%}{high:8.2%}"
                    f"{moved.max():8.2%}{np.mean(moved > 0.05):9.0%}"
                    + (f"  {max(balance):.3f} at most" if name == "plan" else ""),
                    flush=True,
                )


def scale(policy: str) -> None:
    """Print plans of long rows on many ranks: time, bytes of a layer and balance."""
    print("\nlong rows on many ranks; ms: layout and plan, and the lists of one rank, processor time, the best of some")
    print(
        f"{'rows':10}{'L':>6}{'cp':>5}{'window':>9} |{'plan ms':>9}{'lists ms':>9} | {'balance':>7} |"
        f"{'moved':>8}{'bound':>8}{'MiB':>10}{'busiest rank':>13}"
    )
    for row_length, sizes in SCALE:
        kinds = (("documents", log_normal_rows(row_length)[0]), ("one", np.array([], dtype=np.int64)))
        for (name, ends), cp_size, window in itertools.product(kinds, sizes, (32, 8 * K, 128 * K, row_length)):
            planned, listed = [], []
            for _ in range(3):
                began = time.process_time()
                layout = build_layout(row_length, ends, window)
                made = plan(layout, cp_size, policy)
                between = time.process_time()
                made.rank(cp_size - 1)
                planned.append(between - began)
                listed.append(time.process_time() - between)
            moved, gathered = made.rows_moved, (cp_size - 1) * row_length
            busiest = max(moved.sum(axis=0).max(), moved.sum(axis=1).max())
            best, lists = min(planned) * 1e3, min(listed) * 1e3
            even, bound = made.pairs.max() / made.pairs.mean(), fewest_rows(layout, cp_size, BALANCE)
            print(
                f"{name:10}{row_length // K:5}K{cp_size:5}{window:9} |{best:9.1f}{lists:9.1f} | "
                f"{even:7.3f} |{moved.sum() / gathered:8.2%}{bound / gathered:8.2%}"
                f"{moved.sum() * KIB_PER_ROW / K:10.1f}{busiest * KIB_PER_ROW / K:9.1f} MiB",
                flush=True,
            )


def best_milliseconds(ends: np.ndarray, window: int, policy: str) -> float:
    """Time plan() and the lists of one of 64 ranks, for a new layout of 512K tokens: processor time, best of some."""
    times = []
    for _ in range(REPEATS):
        layout = build_layout(512 * K, ends, window)
        began = time.process_time()
        plan(layout, 64, policy).rank(63)
        times.append(time.process_time() - began)
    return min(times) * 1e3


def time_plans(count: int, policy: str) -> list[tuple[str, bool]]:
    """Time plans at all windows; returns the goals for the worst one and for window 32."""
    windows = sorted({1, 8, 32, *windows_of(512 * K, count), *windows_of(8 * K, count), *odd_windows(512 * K)})
    goals = []
    for name, ends in (("documents", log_normal_rows(512 * K)[0]), ("one", np.array([], dtype=np.int64))):
        times = {window: best_milliseconds(ends, window, policy) for window in windows}
        worst = max(times, key=lambda window: times[window])
        goals += [
            (f"{name} 512K cp 64, window {worst} (the worst): {times[worst]:.1f} ms <= 50 ms", times[worst] <= 50),
            (f"{name} 512K cp 64, window 32: {times[32]:.1f} ms <= 20 ms", times[32] <= 20),
        ]
    return goals


def rows_to_compare(row_length: int, novels: Path | None) -> Iterator[tuple[str, Rows]]:
    """Yield the rows to compare, by name."""
    yield "documents", log_normal_rows(row_length)
    if novels is not None and any(novels.glob("*.txt")):
        yield "novels", novel_rows(novels, row_length)
    yield "one", [np.array([], dtype=np.int64)]


def main() -> None:
    """Print the tables, the goals and the times; exit status 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, metavar="DIR", help="a folder of books as .txt; left out without it")
    parser.add_argument("--windows", type=int, default=48, help="windows sampled per schedule")
    parser.add_argument("--policy", default="auto", help="of the plans: auto, balanced, zigzag or contiguous")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to do (default: everything)")
    chosen = parser.parse_args()
    if chosen.novels is None:
        print("novels: left out, no --novels DIR was given")
    elif not any(chosen.novels.glob("*.txt")):
        print(f"novels: left out, no *.txt in {chosen.novels}")
    goals: list[tuple[str, bool]] = []
    if "schedules" in chosen.parts:
        print(HEADER)
        for row_length in LENGTHS:
            for name, rows in rows_to_compare(row_length, chosen.novels):
                goals += compare(name, rows, row_length, chosen.windows, chosen.policy)
    if "spread" in chosen.parts:
        spread(chosen.policy)
    if "scale" in chosen.parts:
        scale(chosen.policy)
    if "times" in chosen.parts:
        goals += time_plans(chosen.windows, chosen.policy)
    for text, good in goals:
        print(f"{'met   ' if good else 'MISSED'} {text}")
    raise SystemExit(0 if all(good for _, good in goals) else 1)


if __name__ == "__main__":
    main()
