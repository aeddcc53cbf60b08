"""Compare communication, balance and planning time of context-parallel schemes: python -m benchmarks.peers.plans

Rows of 128K tokens: documents (log-normal like FineWeb-Pro's; the mean of some rows) and one document, under several
windows, on 8 and 16 ranks. For each scheme:

    moved       rows of keys and values that ranks receive, in percent of an all-gather's (cp - 1) T
    most        rows received by the busiest rank
    balance     attention pairs of the busiest rank over the mean
    tokens      tokens computed by the ranks, over the row's: above 1 is padding
    ms          processor time of one rank's plan

The schemes:

    ours            `plan` with "auto" and the lists of one rank
    MagiAttention   its dispatch solver and the remote keys by one rank's attention solver, by its own code in Python
                    (its default; its optional C++ backend is not measured), with its default chunks and with chunks of
                    512. The time excludes its slices, transfer tables and communication between processes.
                    --magi-attention DIR
    Llama-3         ranges by ring-flash-attention's `llama3_flash_attn_prepare_cu_seqlens`: contiguous shards, keys
                    and values all gathered. --ring-flash-attention DIR
    TE, ring        Transformer Engine's rule for packed rows: each segment is padded to a multiple of 2 cp and
                    assigned in zigzag, all keys and values are sent around the ring; computed, not executed
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.context_parallel import K, log_normal_rows
from benchmarks.peers.checkouts import absent, heading, package
from benchmarks.record import processor_seconds
from megatron_ext.context_parallel import plan
from megatron_ext.layout import PackedLayout, build_layout, segment_pairs

CASES = (
    ("documents", 128 * K),
    ("documents", 8 * K),
    ("documents", K),
    ("one", 32 * K),
    ("one", 128 * K),
)
CHUNKS_OF_A_RANK = 8  # MagiAttention's default


@dataclass(frozen=True)
class Found:
    """The cost of a scheme for one layout.

    Attributes:
        received: int64 [cp], rows of keys and values that each rank receives.
        pairs: [cp], attention pairs of each rank.
        tokens: total tokens computed by all ranks.
    """

    received: np.ndarray
    pairs: np.ndarray
    tokens: int

    def figures(self, row_tokens: int) -> np.ndarray:
        """Return moved, most, balance and tokens as above."""
        gathered = (len(self.received) - 1) * row_tokens
        balance = self.pairs.max() / self.pairs.mean()
        return np.array([self.received.sum() / gathered, self.received.max(), balance, self.tokens / row_tokens])


Scheme = Callable[[PackedLayout, int], Found]


def ours(layout: PackedLayout, cp_size: int) -> Found:
    """Plan as training does."""
    made = plan(layout, cp_size)
    return Found(made.rows_moved.sum(axis=0), made.pairs, layout.tokens)


def padded_ring(layout: PackedLayout, cp_size: int) -> Found:
    """Pad each segment to a multiple of 2 cp, assign it in zigzag, and send all keys and values around."""
    padded = -(-layout.lengths // (2 * cp_size)) * 2 * cp_size
    total = int(padded.sum())
    each = total // cp_size
    pairs = np.full(cp_size, segment_pairs(padded).sum() / cp_size)
    return Found(np.full(cp_size, total - each), pairs, total)


class Llama3:
    """Contiguous shards whose keys and values are all gathered; ranges by ring-flash-attention's own function."""

    def __init__(self, folder: Path) -> None:
        absent("flash_attn", "flash_attn.flash_attn_interface")
        package("ring_flash_attn", folder / "ring_flash_attn")
        module = importlib.import_module("ring_flash_attn.llama3_flash_attn_varlen")
        self._prepare = module.llama3_flash_attn_prepare_cu_seqlens

    def ranges(self, layout: PackedLayout, cp_size: int, rank: int) -> Any:
        """Return borders of queries, of keys, the longest of both, and the slice of keys of one rank."""
        return self._prepare(torch.from_numpy(layout.cu_seqlens), True, rank, cp_size)

    def __call__(self, layout: PackedLayout, cp_size: int) -> Found:
        """Count pairs of each rank's ranges; every rank receives the keys of all others."""
        pairs = []
        for rank in range(cp_size):
            queries, keys, *_ = self.ranges(layout, cp_size, rank)
            q, k = np.diff(queries.numpy()).astype(np.int64), np.diff(keys.numpy()).astype(np.int64)
            pairs.append(int((segment_pairs(k) - segment_pairs(k - q)).sum()))
        others = layout.tokens - layout.tokens // cp_size
        return Found(np.full(cp_size, others), np.array(pairs), layout.tokens)


class Magi:
    """MagiAttention's solvers from a checkout, without its kernels."""

    def __init__(self, folder: Path, chunk: int | None) -> None:
        absent("debugpy")
        torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0  # profiler markers that require CUDA
        if "magi_attention" not in sys.modules:
            package("magi_attention", folder / "magi_attention")
        self._chunk = chunk
        self._make = importlib.import_module("magi_attention.meta._make_dispatch_meta")
        self._config = importlib.import_module("magi_attention.meta.solver.dispatch_solver").DispatchConfig()
        common = importlib.import_module("magi_attention.common")
        self._ranges, self._causal = common.AttnRanges, common.AttnMaskType.CAUSAL

    def plan(self, layout: PackedLayout, cp_size: int, ranks: Iterator[int] | range) -> list[tuple[int, int]]:
        """Assign chunks as every rank does, then find some ranks' remote keys; return each (rows received, pairs)."""
        borders = layout.cu_seqlens.tolist()
        segments = self._ranges.from_ranges(list(itertools.pairwise(borders)))
        masks = [self._causal] * layout.segments
        chunk = self._chunk or layout.tokens // (CHUNKS_OF_A_RANK * cp_size)
        meta, _ = self._make.make_dispatch_meta_from_qk_ranges(
            q_ranges=segments,
            k_ranges=segments,
            attn_mask_type=masks,
            total_seqlen_q=layout.tokens,
            total_seqlen_k=layout.tokens,
            chunk_size=chunk,
            cp_size=cp_size,
            cp_rank=0,
            dispatch_config=self._config,
            is_same_source=True,
            is_q_permutable=True,
            is_k_permutable=True,
        )
        buckets = self._make.make_bucket_per_rank_from_qk_ranges(
            q_ranges=segments, k_ranges=segments, attn_mask_type=masks, dispatch_meta=meta
        )
        found = []
        for rank in ranks:
            host = meta.host_ranges_per_rank[rank].merge()
            lacking = buckets[rank].k_ranges.find_hole_ranges(host, is_other_merged=True)
            found.append((lacking.total_seqlen, buckets[rank].area))
        return found

    def __call__(self, layout: PackedLayout, cp_size: int) -> Found:
        """Plan for all ranks."""
        found = np.array(self.plan(layout, cp_size, range(cp_size)))
        return Found(found[:, 0], found[:, 1], layout.tokens)


def planning(
    schemes: dict[str, Scheme], ends: np.ndarray, window: int, cp_size: int
) -> dict[str, Callable[[], object]]:
    """Return one rank's planning work for a row, for each available scheme; ours includes the layout."""
    layout = build_layout(128 * K, ends, window)
    timed: dict[str, Callable[[], object]] = {}
    for name, scheme in schemes.items():
        if scheme is ours:
            timed[name] = lambda: plan(build_layout(128 * K, ends, window), cp_size).rank(0)
        elif isinstance(scheme, Magi):
            timed[name] = partial(scheme.plan, layout, cp_size, range(1))
        elif isinstance(scheme, Llama3):
            timed[name] = partial(scheme.ranges, layout, cp_size, 0)
    return timed


def table(schemes: dict[str, Scheme], rows: int, sizes: list[int], rounds: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield (
        f"{'row':10}{'window':>8}{'cp':>4}  {'scheme':22}{'moved':>8}{'most':>9}{'balance':>9}{'tokens':>8}{'ms':>9}"
        f"   moved, ms: times ours"
    )
    for cp_size in sizes:
        for kind, window in CASES:
            ends = log_normal_rows(128 * K, count=rows) if kind == "documents" else [np.array([], dtype=np.int64)]
            layouts = [build_layout(128 * K, each, window) for each in ends]
            seconds = processor_seconds(planning(schemes, ends[0], window, cp_size), rounds)
            first: np.ndarray | None = None
            for name, scheme in schemes.items():
                mean = np.mean([scheme(layout, cp_size).figures(128 * K) for layout in layouts], axis=0)
                first = mean if first is None else first
                more = f"{mean[0] / first[0]:.2f}" if first[0] else "-"
                ms, slower = ("-", "-")
                if name in seconds:
                    ms, slower = f"{seconds[name] * 1e3:.2f}", f"{seconds[name] / seconds['ours']:.2f}"
                yield (
                    f"{kind:10}{window:8}{cp_size:4}  {name:22}{mean[0]:8.2%}{mean[1]:9.0f}{mean[2]:9.3f}{mean[3]:8.3f}"
                    f"{ms:>9}   {more}, {slower}"
                )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--magi-attention", type=Path, metavar="DIR", help="a checkout of SandAI-org/MagiAttention")
    parser.add_argument("--ring-flash-attention", type=Path, metavar="DIR", help="a checkout of it by zhuzilin")
    parser.add_argument("--rows", type=int, default=4, help="rows of documents [4]")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16], help="sizes of context-parallel groups [8 16]")
    parser.add_argument("--rounds", type=int, default=5, help="of timing, of which the least counts [5]")
    chosen = parser.parse_args()
    schemes: dict[str, Scheme] = {"ours": ours}
    if chosen.magi_attention:
        schemes["MagiAttention"] = Magi(chosen.magi_attention, None)
        schemes["MagiAttention, 512"] = Magi(chosen.magi_attention, 512)
    if chosen.ring_flash_attention:
        schemes["Llama-3 all-gather"] = Llama3(chosen.ring_flash_attention)
    schemes["TE, ring"] = padded_ring
    print(heading("plans", MagiAttention=chosen.magi_attention, ring_flash_attention=chosen.ring_flash_attention))
    for text in table(schemes, chosen.rows, chosen.ranks, chosen.rounds):
        print(text, flush=True)


if __name__ == "__main__":
    main()
