"""Measure communication, balance and planning time of context-parallel plans: python benchmarks/context_parallel.py

    spread   rows moved of 200 rows of documents at window L, as a share of the all-gather of a whole row, next to a
             lower bound for any assignment whose slowest rank has 1.10 of the mean attention pairs, or as many as the
             plan's (benchmarks/lower_bound.py); with --cp-row-cost of NVLink (64) and between
             nodes (570)
    scale    rows of 1M and 4M tokens on 64 to 512 ranks, with the time of each plan
    latent   bytes that latent attention exchanges, as full heads and as the latent (engine/latent_attention.py), and
             the products that the receivers of the latent add, as a share of attention's

Documents are log-normal like FineWeb-Pro's (median 849, mean 1,364 tokens; arXiv 2503.15450, Table 26). A single
document can have most of a row's attention pairs, and then has to be split under any plan.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np
from lower_bound import fewest_rows

from megatron_ext.context_parallel import plan
from megatron_ext.layout import build_layout

K = 1024
KIB_PER_ROW = 1  # keys and values of 4 heads of 64 in bfloat16, one layer
ROWS = 3  # rows of documents tried per window
MANY = 200  # rows of documents of `spread`
SPREAD = ((128 * K, (2, 4, 8, 16, 64)), (512 * K, (2, 4, 8, 16, 64)))
ROW_COSTS = (64.0, 570.0)  # values of --cp-row-cost: NVLink, and between nodes
SCALE = ((1024 * K, (64, 256, 512)), (4096 * K, (64, 256, 512)))
PARTS = ("spread", "scale", "latent")
LATENT, ROTATED, PLAIN, VALUE = 512, 64, 128, 128  # sizes of DeepSeek-V3 and of Moonlight
LATENT_MODELS = (("DeepSeek-V3", 128, 1), ("DeepSeek-V3", 128, 8), ("Moonlight", 16, 1), ("Moonlight", 16, 8))
BALANCE = 1.10

Rows = list[np.ndarray]  # the document ends of each row


def log_normal_rows(row_length: int, first: int = 0, count: int = ROWS) -> Rows:
    """Draw the document ends of rows whose documents have median 849 and mean 1,364 tokens."""
    rows = []
    for seed in range(first, first + count):
        lengths = np.random.default_rng(seed).lognormal(np.log(849), 0.974, size=row_length // 200)
        ends = np.cumsum(np.maximum(lengths.astype(np.int64), 1))
        rows.append(ends[ends < row_length])
    return rows


def spread(policy: str) -> None:
    """Print the distribution of moved rows over rows: some have a document with most of the row's attention pairs."""
    print(
        f"{MANY} rows of documents each, window L: rows moved as a share of an all-gather; bound: what no plan can beat"
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


def latent(policy: str) -> None:
    """Print what one layer exchanges in forward, in bfloat16, for a row of one document and a row of many."""
    print(
        "\nlatent attention, one layer's forward, MiB sent by 8 context-parallel ranks (one tensor-parallel rank each)"
    )
    print(f"{'model':12}{'heads':>6}{'tp':>3}  {'row':14}{'full heads':>11}{'latent':>9}{'ratio':>7}{'products':>10}")
    kinds = (("one, 128K", np.array([], dtype=np.int64)), ("many, 128K", log_normal_rows(128 * K)[0]))
    for (name, heads, tp), (row, ends) in itertools.product(LATENT_MODELS, kinds):
        made = plan(build_layout(128 * K, ends, 128 * K), 8, policy)
        rows, mine = int(made.rows_moved.sum()), heads // tp
        full, small = mine * (PLAIN + ROTATED + VALUE), LATENT + ROTATED
        expanded = sum(len(made.rank(rank).kv_rows) for rank in range(8)) - made.layout.tokens
        products = expanded * LATENT * mine * (PLAIN + VALUE)
        attention = int(made.pairs.sum()) * mine * (PLAIN + ROTATED + VALUE)
        print(
            f"{name:12}{mine:6}{tp:3}  {row:14}{rows * full * 2 / K**2:11.1f}{rows * small * 2 / K**2:9.1f}"
            f"{full / small:7.1f}{products / attention:10.2%}"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="auto", help="of the plans: auto, balanced, zigzag or contiguous")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to do (default: everything)")
    chosen = parser.parse_args()
    for part in (spread, scale, latent):
        if part.__name__ in chosen.parts:
            part(chosen.policy)


if __name__ == "__main__":
    main()
