"""How evenly rows of real lengths are dealt to 8 data-parallel ranks of 16 micro-batches at 64K.

A row costs its attention pairs under the window and the document mask, plus a linear term that all rows share (pairs
per token that the matrices of Llama-3-8B are worth). Worst rank and worst slot against the mean, in order and dealt.

python benchmarks/balance.py [--novels DIR]
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_ext.data.rows.balance import deal_rows
from megatron_ext.layout import build_layout

LENGTH, RANKS, MICRO_BATCHES = 65_536, 8, 16
GOAL = 1.05
BYTES_PER_TOKEN = 4  # about, of English prose and of Python
# 6.98e9 parameters of 32 layers: 2 x 6.98e9 operations a token against 32 x 4 x 4096 a pair
PAIRS_PER_TOKEN = 2 * 6.98e9 / (32 * 4 * 4096)


def novels(folder: Path) -> list[int]:
    return [file.stat().st_size // BYTES_PER_TOKEN for file in sorted(folder.glob("*.txt"))]


def standard_library() -> list[int]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    sizes = [file.stat().st_size // BYTES_PER_TOKEN for file in files if "site-packages" not in file.parts]
    return [size for size in sizes if size]


def log_normal(count: int) -> list[int]:
    """FineWeb-Pro's median 849 and mean 1,364 (arXiv 2503.15450, Table 26)."""
    return (1 + np.random.default_rng(0).lognormal(np.log(849), 0.974, count)).astype(int).tolist()


def batches(lengths: list[int], window: int, number: int) -> Iterator[np.ndarray]:
    """Costs of the rows of global batches: documents in random order, concatenated and cut."""
    chance = np.random.default_rng(1)
    rows = RANKS * MICRO_BATCHES
    for _ in range(number):
        ends: list[int] = []
        while not ends or ends[-1] < rows * LENGTH:
            drawn = chance.permutation(lengths)
            ends.extend((np.cumsum(drawn) + (ends[-1] if ends else 0)).tolist())
        borders = np.array(ends)
        costs = []
        for row in range(rows):
            inside = borders[(borders > row * LENGTH) & (borders <= (row + 1) * LENGTH)] - row * LENGTH
            costs.append(build_layout(LENGTH, inside, window).attention_pairs() + PAIRS_PER_TOKEN * LENGTH)
        yield np.array(costs)


def worst(costs: np.ndarray, dealt: np.ndarray) -> tuple[float, float]:
    """Compare the dearest rank with the mean, and each slot's dearest micro-batch with its mean, on average."""
    slots = costs[dealt].sum(axis=2)
    ranks = slots.sum(axis=1)
    return float(ranks.max() / ranks.mean()), float((slots.max(axis=0) / slots.mean(axis=0)).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, metavar="DIR", help="folder of .txt files, one document each")
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args()
    prose = novels(options.novels) if options.novels else []
    mixes = {"log-normal": log_normal(20_000), "standard library": standard_library()}
    if prose:
        mixes |= {"novels": prose, "novels + standard library": prose + standard_library()}
    met = True
    print(f"{'documents':28}{'window':>8}{'rank, in order':>16}{'dealt':>8}{'slot, in order':>16}{'dealt':>8}{'ms':>7}")
    for name, lengths in mixes.items():
        for window in (1024, 8192, LENGTH):
            found, milliseconds = [], []
            for costs in batches(lengths, window, options.batches):
                in_order = np.arange(len(costs)).reshape(MICRO_BATCHES, RANKS, 1).transpose(1, 0, 2)
                began = time.perf_counter()
                dealt = deal_rows(costs, RANKS, MICRO_BATCHES)
                milliseconds.append(1e3 * (time.perf_counter() - began))
                found.append((*worst(costs, in_order), *worst(costs, dealt)))
            rank, slot, rank_dealt, slot_dealt = np.array(found).max(axis=0)
            met &= bool(rank_dealt <= GOAL)
            print(
                f"{name:28}{window:8}{rank:16.3f}{rank_dealt:8.3f}{slot:16.3f}{slot_dealt:8.3f}"
                f"{np.median(milliseconds):7.1f}"
            )
    print(f"goal: worst rank at most {GOAL} x the mean: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
