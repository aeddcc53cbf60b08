"""What each context-parallel scheme would send, by heads: python benchmarks/cp_schemes.py

Rows of 128K tokens on 8 ranks: one document, and 200 rows of documents (log-normal like FineWeb-Pro's). MiB per layer
and forward pass in bfloat16, heads of 128; backward sends as much again. Of each plan (`auto`, as a run makes it):

    exchange    keys and values to the queries: what `--cp-scheme exchange` sends
    mixed       the least that any choice between keys and queries could send: for each pair of ranks every interval of
                keys either goes to the queries, or every piece of queries that sees it goes to the keys and its output
                comes back with a log-sum-exp per head. A minimum vertex cover by maximum flow. Balance is not asked
                for: an implementation that keeps the ranks even sends more
    whole       without merging: a piece goes with its own keys and values to the one rank that holds all keys before
                it, and its output comes back, where that is fewer bytes and that rank stays within 1.10 of the mean
                attention pairs
    ulysses     what `--cp-scheme ulysses` sends; - where heads do not divide
    auto        what the default takes

Then what of it is at home, that is, can be computed while keys and values travel.

N query heads and G key heads are those of one tensor-parallel rank.
"""

from __future__ import annotations

import argparse

import networkx
import numpy as np
from context_parallel import K, log_normal_rows

from megatron_ext.attention.exchange import ContextGroup, Traffic, pieces_at_home
from megatron_ext.attention.interface import Scheme
from megatron_ext.batch import ContextOptions
from megatron_ext.context_parallel import CPPlan, plan
from megatron_ext.context_parallel.exchange_plan import UNEVEN
from megatron_ext.layout import build_layout, segment_pairs

HEAD = 128
HEADS = ((32, 32), (16, 16), (12, 12), (16, 8), (32, 8), (32, 4), (12, 1), (4, 1))  # N, G
MIB = 2 * HEAD / 2**20  # of a row of one head in bfloat16


def mixed_rows(made: CPPlan, heads: int, key_heads: int) -> float:
    """Bound the rows of one head that the plan's attention needs to send, keys or queries, as above."""
    key_weight, query_weight = 2 * key_heads, heads * (2 + 2 / HEAD)  # a float32 log-sum-exp is two bfloat16
    total = 0.0
    for needer in range(made.cp_size):
        for holder in range(made.cp_size):
            if made.rows_moved[holder, needer]:
                total += _cheapest(_needs(made, holder, needer), key_weight, query_weight)
    return total


def _needs(made: CPPlan, holder: int, needer: int) -> list[tuple[int, int, int, int]]:
    """List (piece of queries, its length, piece of keys, its length): no window, so a piece sees all or nothing."""
    found = []
    for query in made.pieces_of(needer):
        for key in made.pieces_of(holder):
            if made.piece_segment[query] == made.piece_segment[key] and key < query:
                lengths = (made.piece_end - made.piece_start)[[query, key]]
                found.append((int(query), int(lengths[0]), int(key), int(lengths[1])))
    return found


def _cheapest(needs: list[tuple[int, int, int, int]], key_weight: float, query_weight: float) -> float:
    graph = networkx.DiGraph()
    for query, query_length, key, key_length in needs:
        graph.add_edge("source", ("key", key), capacity=key_weight * key_length)
        graph.add_edge(("query", query), "sink", capacity=query_weight * query_length)
        graph.add_edge(("key", key), ("query", query))
    return float(networkx.maximum_flow_value(graph, "source", "sink"))


def whole_rows(made: CPPlan, heads: int, key_heads: int) -> float:
    """Count the rows of one head that `whole` sends, as above."""
    pairs, limit = made.pairs.astype(float), UNEVEN * made.pairs.mean()
    total = float(made.rows_moved.sum()) * 2 * key_heads
    first = made.layout.cu_seqlens[made.piece_segment]
    start, length = made.piece_start - first, made.piece_end - made.piece_start
    for piece in np.flatnonzero(start):
        holders = set(made.piece_rank[np.flatnonzero(made.piece_segment == made.piece_segment[piece])[0] : piece])
        saved = 2 * key_heads * start[piece] - 2 * (heads + key_heads) * length[piece]
        if len(holders) == 1 and saved > 0:  # a neighbour of the segment is never on the piece's own rank
            (holder,) = holders
            work = segment_pairs(start[piece] + length[piece]) - segment_pairs(start[piece])
            if pairs[holder] + work <= limit:
                pairs[holder] += work
                pairs[made.piece_rank[piece]] -= work
                total -= saved
    return total


def at_home(made: CPPlan) -> np.ndarray:
    """Say of each rank what share of its tokens and of its pairs is at home, and in how many runs its rows divide."""
    found = []
    for rank in range(made.cp_size):
        mine = made.rank(rank)
        home, lengths = pieces_at_home(mine), np.diff(mine.cu_seqlens_q)
        keys = np.diff(mine.cu_seqlens_kv)
        pairs = segment_pairs(keys) - segment_pairs(keys - lengths)
        runs = 1 + np.count_nonzero(home[1:] != home[:-1])
        found.append((lengths[home].sum() / lengths.sum(), pairs[home].sum() / pairs.sum(), runs))
    return np.array(found)


def main() -> None:
    """Print a line for each number of heads and kind of row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128 * K, help="tokens of a row")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=200, help="rows of documents")
    chosen = parser.parse_args()
    kinds = {
        "one document": [np.array([], dtype=np.int64)],
        "documents": log_normal_rows(chosen.length, first=100, count=chosen.rows),
    }
    print(
        f"{'row':14}{'N':>4}{'G':>4} |{'exchange':>10}{'mixed':>10}{'':>7}{'whole':>10}"
        f"{'ulysses':>10}{'auto':>10}   MiB per layer"
    )
    for name, rows in kinds.items():
        plans = [plan(build_layout(chosen.length, ends, chosen.length), chosen.ranks) for ends in rows]
        for heads, key_heads in HEADS:
            group = ContextGroup(0, chosen.ranks, None, Traffic())
            options = ContextOptions(group=group, policy="auto", scheme=None, heads=heads, key_heads=key_heads)
            exchange = np.array([int(made.rows_moved.sum()) * 2 * key_heads for made in plans]) * MIB
            mixed = np.array([mixed_rows(made, heads, key_heads) for made in plans]) * MIB
            everything = chosen.length * (chosen.ranks - 1) / chosen.ranks * 2 * (heads + key_heads) * MIB
            ulysses = np.array([options.choose(made) is Scheme.ULYSSES for made in plans])
            legal = heads % chosen.ranks == 0 and key_heads % chosen.ranks == 0
            whole = np.array([whole_rows(made, heads, key_heads) for made in plans]) * MIB
            shown = f"{everything:.1f}" if legal else "-"
            print(
                f"{name:14}{heads:4}{key_heads:4} |{exchange.mean():10.1f}{mixed.mean():10.1f}"
                f"{mixed.mean() / exchange.mean() - 1:7.1%}{whole.mean():10.1f}{shown:>10}"
                f"{np.where(ulysses, everything, exchange).mean():10.1f}",
                flush=True,
            )
        tokens, pairs, runs = np.concatenate([at_home(made) for made in plans]).T
        print(f"{name}: at home {tokens.mean():.0%} of a rank's tokens, {pairs.mean():.0%} of its pairs; ", end="")
        print(f"its rows divide into {runs.mean():.1f} runs, {runs.max():.0f} at most")


if __name__ == "__main__":
    main()
