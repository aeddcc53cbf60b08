"""Measure communication, balance and planning time of context-parallel plans: python benchmarks/context_parallel.py

    spread   rows moved of 200 rows of documents at the full window, as a share of the all-gather of a whole row: mean,
             quantiles, the worst, and the share of rows above 5 %; next to a lower bound for any assignment whose
             slowest rank has 1.10 of the mean attention pairs, or as many as the plan's (benchmarks/lower_bound.py);
             with --cp-row-cost of NVLink (64) and between nodes (570)
    scale    rows of 1M and 4M tokens on 64 to 512 ranks, with the processor time of each plan (the best of three)
    bound    rows of 128K tokens of 1, 2 and 4 equal documents on 8 and 16 ranks: MiB that all ranks of a layer send in
             forward in bfloat16 by `balanced` and by Ulysses, next to what any plan of the same balance must send: of
             keys and values alone, and if queries and outputs may move, too (benchmarks/lower_bound.py)
    long     the same share on 8 ranks for rows of 128K with the long documents of long-context recipes
    latent   MiB that one layer of latent attention sends in forward on 8 ranks, as full heads and as the latent
             (engine/latent_attention.py), and the products that the receivers of the latent add, as a share of
             attention's

Documents are log-normal like FineWeb-Pro's (median 849, mean 1,364 tokens; arXiv 2503.15450, Table 26). A single
document can have most of a row's attention pairs, and then has to be split under any plan.
"""

import itertools
import time
from typing import NamedTuple

import numpy as np
from lower_bound import fewest_rows, least_cost
from record import Records, parser_of

from megatron_ext.context_parallel import plan
from megatron_ext.context_parallel.exchange import copies_of_keys, heads_can_be_exchanged
from megatron_ext.layout import build_layout

K = 1024
ROWS = 200  # rows of documents of `spread`
LONG_ROWS = 10  # of `long`, those with short documents
LONG_COUNTS = (1, 2, 4, 8, 16)  # equal documents of a row
ROW_COSTS = (64.0, 570.0)  # values of --cp-row-cost: NVLink, and between nodes
BALANCE = 1.10
# sizes of DeepSeek-V3 and of Moonlight
LATENT = 512
ROTATED = 64
PLAIN = 128
VALUE = 128
LATENT_MODELS = (("DeepSeek-V3", 128, 1), ("DeepSeek-V3", 128, 8), ("Moonlight", 16, 1), ("Moonlight", 16, 8))
ONE_DOCUMENT = np.array([], dtype=np.int64)


class Sizes(NamedTuple):
    """What a layer moves of a token, in numbers."""

    heads: int
    key_heads: int
    key: int  # keys and values, or the latent
    query: int  # queries and outputs
    heads_key: int  # a key and a value of one head, as Ulysses moves them
    shared: bool  # whether all heads see the same keys


MODELS = {
    "GQA 32:8, heads of 128": Sizes(32, 8, 2 * 8 * 128, 2 * 32 * 128, 2 * 128, False),
    "DeepSeek-V3": Sizes(
        128, 128, LATENT + ROTATED, 128 * (PLAIN + ROTATED + VALUE), PLAIN + ROTATED + VALUE, shared=True
    ),
}


def log_normal_rows(row_length: int, first: int = 0, count: int = 1) -> list[np.ndarray]:
    """Draw the document ends of rows whose documents have median 849 and mean 1,364 tokens."""
    rows = []
    for seed in range(first, first + count):
        lengths = np.random.default_rng(seed).lognormal(np.log(849), 0.974, size=row_length // 200)
        ends = np.cumsum(np.maximum(lengths.astype(np.int64), 1))
        rows.append(ends[ends < row_length])
    return rows


def spread(records: Records) -> None:
    """Record the distribution of moved rows over rows: some have a document with most of the row's attention pairs."""
    for row_length in (128 * K, 512 * K):
        layouts = [build_layout(row_length, ends, row_length) for ends in log_normal_rows(row_length, 100, ROWS)]
        for cp_size, row_cost in itertools.product((2, 4, 8, 16, 64), ROW_COSTS):
            plans = [plan(layout, cp_size, row_cost=row_cost) for layout in layouts]
            balances = [float(cp_plan.pairs.max() / cp_plan.pairs.mean()) for cp_plan in plans]
            fewest = [fewest_rows(layout, cp_size, even) for layout, even in zip(layouts, balances, strict=True)]
            fixed = [fewest_rows(layout, cp_size, BALANCE) for layout in layouts]
            rows_by_plan = {"plan": [cp_plan.rows_moved.sum() for cp_plan in plans], "bound at its balance": fewest}
            for name, rows in {**rows_by_plan, f"bound at {BALANCE:.2f}": fixed}.items():
                shares = np.array(rows) / ((cp_size - 1) * row_length)
                p50, p90 = np.quantile(shares, (0.5, 0.9))
                figures = {"mean": shares.mean(), "p50": p50, "p90": p90, "worst": shares.max()}
                figures["above_5_percent"] = np.mean(shares > 0.05)
                if name == "plan":
                    figures["worst_balance"] = max(balances)
                records.add(row=row_length, cp=cp_size, row_cost=row_cost, of=name, **figures)


def long(records: Records) -> None:
    """Record what 8 ranks move of rows of 128K with long documents."""
    row, cp_size = 128 * K, 8
    kinds = {f"{count} of {row // count // K}K": [np.arange(row // count, row, row // count)] for count in LONG_COUNTS}
    half = np.array([64 * K])
    kinds["1 of 64K, then many"] = [np.append(half, 64 * K + ends) for ends in log_normal_rows(64 * K, 100, LONG_ROWS)]
    for documents, rows in kinds.items():
        moved = [plan(build_layout(row, ends, row), cp_size).rows_moved.sum() for ends in rows]
        records.add(documents=documents, row=row, cp=cp_size, mean=np.mean(moved) / ((cp_size - 1) * row))


def scale(records: Records) -> None:
    """Record plans of long rows on many ranks: time, rows moved and balance."""
    windows = (32, 8 * K, 128 * K, None)
    for row_length in (1024 * K, 4096 * K):
        kinds = (("many", log_normal_rows(row_length)[0]), ("one", ONE_DOCUMENT))
        for (documents, ends), cp_size, window in itertools.product(kinds, (64, 256, 512), windows):
            seconds = []
            for _ in range(3):
                began = time.process_time()
                layout = build_layout(row_length, ends, window or row_length)
                cp_plan = plan(layout, cp_size)
                cp_plan.of_rank(cp_size - 1)
                seconds.append(time.process_time() - began)
            moved = cp_plan.rows_moved
            gathered = (cp_size - 1) * row_length
            records.add(
                documents=documents,
                row=row_length,
                cp=cp_size,
                window=window or row_length,
                plan_ms=min(seconds) * 1e3,
                balance=cp_plan.pairs.max() / cp_plan.pairs.mean(),
                moved=moved.sum() / gathered,
                bound=fewest_rows(layout, cp_size, BALANCE) / gathered,
                rows_of_busiest_rank=int(max(moved.sum(axis=0).max(), moved.sum(axis=1).max())),
            )


def latent(records: Records) -> None:
    """Record what one layer exchanges in forward, in bfloat16, for a row of one document and a row of many."""
    kinds = (("one", ONE_DOCUMENT), ("many", log_normal_rows(128 * K)[0]))
    for (model, all_heads, tp), (documents, ends) in itertools.product(LATENT_MODELS, kinds):
        cp_plan = plan(build_layout(128 * K, ends, 128 * K), 8)
        rows = int(cp_plan.rows_moved.sum())
        heads = all_heads // tp
        sizes = {"full_heads": heads * (PLAIN + ROTATED + VALUE), "latent": LATENT + ROTATED}
        mib = {f"{name}_mib": rows * size * 2 / K**2 for name, size in sizes.items()}
        expanded = sum(len(cp_plan.of_rank(rank).kv_rows) for rank in range(8)) - cp_plan.layout.tokens
        products = expanded * LATENT * heads * (PLAIN + VALUE)
        attention = int(cp_plan.pairs.sum()) * heads * (PLAIN + ROTATED + VALUE)
        records.add(model=model, tp=tp, heads=heads, documents=documents, **mib, products=products / attention)


def bound(records: Records) -> None:
    """Record what a layer sends if rows are a few equal documents, and what any plan of the same balance must send."""
    for (model, sizes), cp_size, documents in itertools.product(MODELS.items(), (8, 16), (1, 2, 4)):
        ends = np.arange(1, documents) * (128 * K // documents)
        layout = build_layout(128 * K, ends, 128 * K)
        cp_plan = plan(layout, cp_size, "balanced")
        balance = float(cp_plan.pairs.max() / cp_plan.pairs.mean())
        sent = {"exchange": int(cp_plan.rows_moved.sum()) * sizes.key}
        if heads_can_be_exchanged(sizes.heads, sizes.key_heads, cp_size):
            keys = sizes.heads_key * sizes.key_heads * copies_of_keys(sizes.key_heads, cp_size)
            sent["ulysses"] = layout.tokens * (cp_size - 1) // cp_size * (sizes.query + keys)
        sent["bound_keys"] = fewest_rows(layout, cp_size, balance) * sizes.key
        sent["bound"] = least_cost(layout, cp_size, balance, sizes.key, sizes.query, together=sizes.shared)
        mib = {name: numbers * 2 / K**2 for name, numbers in sent.items()}
        gathered = (cp_size - 1) * layout.tokens * sizes.key * 2 / K**2
        records.add(model=model, cp=cp_size, documents=documents, balance=balance, all_gather=gathered, **mib)


PARTS = {"spread": spread, "long": long, "scale": scale, "bound": bound, "latent": latent}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="[all]")
    chosen = parser.parse_args()
    for part in chosen.parts:
        PARTS[part](Records(part, chosen.output))


if __name__ == "__main__":
    main()
