"""Compare communication, balance and planning time of context-parallel schemes: python -m benchmarks.peers.plans

Rows of 128K tokens: documents (log-normal like FineWeb-Pro's; the mean of some rows) and one document, under several
windows, on 8 and 16 ranks. For each scheme:

    moved       rows of keys and values that ranks receive, as a share of an all-gather's (cp - 1) T
    most        rows received by the busiest rank
    balance     attention pairs of the busiest rank over the mean
    tokens      tokens computed by the ranks, over the row's: above 1 is padding
    ms          processor time of one rank's plan, also over ours

The schemes:

    ours            `plan` with "auto" and the lists of one rank
    MagiAttention   its dispatch solver and the remote keys by one rank's attention solver, by its own code in Python
                    (its default; its optional C++ backend is not measured), with its default chunks and with chunks of
                    512. The time excludes its slices, transfer tables and communication between processes.
                    --magi-attention DIR
    Automodel       NeMo Automodel's needed-only exchange of contiguous shards, by its own functions: where no
                    segment spans three ranks a left halo, of one size for all; else an all-to-all of unequal parts. Its
                    plan is for documents; it is given the segments of the window. --automodel DIR
    Llama-3         ranges by ring-flash-attention's `llama3_flash_attn_prepare_cu_seqlens`: contiguous shards, keys
                    and values all gathered. --ring-flash-attention DIR
    TE, ring        Transformer Engine's rule for packed rows: each segment is padded to a multiple of 2 cp and
                    assigned in zigzag, all keys and values are sent around the ring; computed, not executed
"""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from context_parallel import ONE_DOCUMENT, K, log_normal_rows
from record import Records, parser_of, processor_seconds

from benchmarks.peers import absent, commits, package
from megatron_ext.context_parallel import plan
from megatron_ext.layout import PackedLayout, build_layout, segment_pairs

ROW = 128 * K
CASES = (("many", ROW), ("many", 8 * K), ("many", K), ("one", 32 * K), ("one", ROW))  # documents and window
CHUNKS_OF_A_RANK = 8  # MagiAttention's default


Scheme = Callable[[PackedLayout, int], dict[str, float]]  # of a layout and cp: its figures


def figures(received: np.ndarray, pairs: np.ndarray, tokens: int) -> dict[str, float]:
    """Return the figures from the rows that each rank receives and its pairs, [cp] each, and the tokens of all."""
    shares = {"moved": received.sum() / ((len(received) - 1) * ROW), "most": received.max()}
    return shares | {"balance": pairs.max() / pairs.mean(), "tokens": tokens / ROW}


def ours(layout: PackedLayout, cp_size: int) -> dict[str, float]:
    """Plan as training does."""
    cp_plan = plan(layout, cp_size)
    return figures(cp_plan.rows_moved.sum(axis=0), cp_plan.pairs, layout.tokens)


def padded_ring(layout: PackedLayout, cp_size: int) -> dict[str, float]:
    """Pad each segment to a multiple of 2 cp, assign it in zigzag, and send all keys and values around."""
    padded = -(-layout.lengths // (2 * cp_size)) * 2 * cp_size
    total = int(padded.sum())
    tokens_of_rank = total // cp_size
    pairs = np.full(cp_size, segment_pairs(padded).sum() / cp_size)
    return figures(np.full(cp_size, total - tokens_of_rank), pairs, total)


def pairs_of(queries: torch.Tensor, keys: torch.Tensor) -> int:
    """Count the pairs of ranges whose last keys are their queries, from the borders of both, [ranges + 1] each."""
    q = np.diff(queries.numpy()).astype(np.int64)
    k = np.diff(keys.numpy()).astype(np.int64)
    return int((segment_pairs(k) - segment_pairs(k - q)).sum())


class Llama3:
    """Contiguous shards whose keys and values are all gathered; ranges by ring-flash-attention's own function."""

    def __init__(self, folder: Path) -> None:
        absent("flash_attn", "flash_attn.flash_attn_interface")
        package("ring_flash_attn", folder / "ring_flash_attn")
        module = importlib.import_module("ring_flash_attn.llama3_flash_attn_varlen")
        self._prepare = module.llama3_flash_attn_prepare_cu_seqlens

    def plan(self, layout: PackedLayout, cp_size: int, ranks: Iterable[int]) -> list[Any]:
        """Return for some ranks: borders of queries, of keys, the longest of both, and the slice of keys."""
        return [self._prepare(torch.from_numpy(layout.cu_seqlens), True, rank, cp_size) for rank in ranks]

    def __call__(self, layout: PackedLayout, cp_size: int) -> dict[str, float]:
        """Count pairs of each rank's ranges; every rank receives the keys of all others."""
        pairs = [pairs_of(queries, keys) for queries, keys, *_ in self.plan(layout, cp_size, range(cp_size))]
        received = layout.tokens - layout.tokens // cp_size
        return figures(np.full(cp_size, received), np.array(pairs), layout.tokens)


class Automodel:
    """Contiguous shards that receive only the keys of documents that begin on earlier ranks."""

    def __init__(self, folder: Path) -> None:
        name = "nemo_automodel"
        for part in ("", ".components", ".components.distributed", ".components.distributed.blockdiag_cp"):
            package(name + part, folder / (name + part).replace(".", "/"))
        self._exchange = importlib.import_module(f"{name}.components.distributed.blockdiag_cp.exchange")
        self._kernels = importlib.import_module(f"{name}.components.distributed.blockdiag_cp.kernels")

    def plan(self, layout: PackedLayout, cp_size: int, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """Plan the exchange as every rank does, then some ranks' parts; return each (rows received, pairs)."""
        segment_of_token = torch.repeat_interleave(torch.arange(layout.segments), torch.from_numpy(layout.lengths)) + 1
        tokens_of_rank = layout.tokens // cp_size
        cpu = torch.device("cpu")
        whole = self._exchange._compute_blockdiag_kv_plan(segment_of_token, cp_size, tokens_of_rank, cpu)
        received_and_pairs = []
        for rank in ranks:
            if whole["use_halo"]:
                received = max(whole["recv"])
            else:
                _, parts, _ = self._exchange._needed_kv_a2a_plan(whole, rank, cp_size, tokens_of_rank, cpu)
                received = sum(parts) - parts[rank]
            borders = self._kernels._varlen_seg_for_rank(segment_of_token, rank * tokens_of_rank, tokens_of_rank, cpu)
            received_and_pairs.append((received, pairs_of(borders["cu_q"], borders["cu_k"])))
        return received_and_pairs

    def __call__(self, layout: PackedLayout, cp_size: int) -> dict[str, float]:
        """Plan for all ranks."""
        received_and_pairs = np.array(self.plan(layout, cp_size, range(cp_size)))
        return figures(received_and_pairs[:, 0], received_and_pairs[:, 1], layout.tokens)


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
        self._ranges = common.AttnRanges
        self._causal = common.AttnMaskType.CAUSAL

    def plan(self, layout: PackedLayout, cp_size: int, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """Assign chunks as every rank does, then find some ranks' remote keys; return each (rows received, pairs)."""
        borders = layout.cu_seqlens.tolist()
        segments = self._ranges.from_ranges(list(itertools.pairwise(borders)))
        common = {"q_ranges": segments, "k_ranges": segments, "attn_mask_type": [self._causal] * layout.segments}
        meta, _ = self._make.make_dispatch_meta_from_qk_ranges(
            **common,
            total_seqlen_q=layout.tokens,
            total_seqlen_k=layout.tokens,
            chunk_size=self._chunk or layout.tokens // (CHUNKS_OF_A_RANK * cp_size),
            cp_size=cp_size,
            cp_rank=0,
            dispatch_config=self._config,
            is_same_source=True,
            is_q_permutable=True,
            is_k_permutable=True,
        )
        buckets = self._make.make_bucket_per_rank_from_qk_ranges(**common, dispatch_meta=meta)
        received_and_pairs = []
        for rank in ranks:
            host = meta.host_ranges_per_rank[rank].merge()
            lacking = buckets[rank].k_ranges.find_hole_ranges(host, is_other_merged=True)
            received_and_pairs.append((lacking.total_seqlen, buckets[rank].area))
        return received_and_pairs

    def __call__(self, layout: PackedLayout, cp_size: int) -> dict[str, float]:
        """Plan for all ranks."""
        received_and_pairs = np.array(self.plan(layout, cp_size, range(cp_size)))
        return figures(received_and_pairs[:, 0], received_and_pairs[:, 1], layout.tokens)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--magi-attention", type=Path, metavar="DIR", help="a checkout of SandAI-org/MagiAttention")
    parser.add_argument("--automodel", type=Path, metavar="DIR", help="a checkout or unpacked wheel of NeMo Automodel")
    parser.add_argument("--ring-flash-attention", type=Path, metavar="DIR", help="a checkout of it by zhuzilin")
    parser.add_argument("--rows", type=int, default=4, help="rows of documents [4]")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16], help="sizes of context-parallel groups [8 16]")
    parser.add_argument("--rounds", type=int, default=5, help="of timing, of which the least counts [5]")
    chosen = parser.parse_args()
    schemes: dict[str, Scheme] = {"ours": ours}
    if chosen.magi_attention:
        schemes["MagiAttention"] = Magi(chosen.magi_attention, None)
        schemes["MagiAttention, 512"] = Magi(chosen.magi_attention, 512)
    if chosen.automodel:
        schemes["Automodel"] = Automodel(chosen.automodel)
    if chosen.ring_flash_attention:
        schemes["Llama-3 all-gather"] = Llama3(chosen.ring_flash_attention)
    schemes["TE, ring"] = padded_ring
    peers = commits(
        magi_attention=chosen.magi_attention,
        automodel=chosen.automodel,
        ring_flash_attention=chosen.ring_flash_attention,
    )
    records = Records("plans", chosen.output, **peers)
    for cp_size, (documents, window) in itertools.product(chosen.ranks, CASES):
        rows = log_normal_rows(ROW, count=chosen.rows) if documents == "many" else [ONE_DOCUMENT]
        layouts = [build_layout(ROW, ends, window) for ends in rows]

        def our_rank(ends: np.ndarray = rows[0], window: int = window, cp_size: int = cp_size) -> object:
            return plan(build_layout(ROW, ends, window), cp_size).of_rank(0)  # a run makes the layout too

        work: dict[str, Callable[[], object]] = {"ours": our_rank}
        peers_with_plan = {
            name: scheme for name, scheme in schemes.items() if isinstance(scheme, Magi | Automodel | Llama3)
        }
        work |= {name: partial(scheme.plan, layouts[0], cp_size, range(1)) for name, scheme in peers_with_plan.items()}
        seconds = processor_seconds(work, chosen.rounds)
        for name, scheme in schemes.items():
            costs = [scheme(layout, cp_size) for layout in layouts]
            means = {figure: np.mean([cost[figure] for cost in costs]) for figure in costs[0]}
            times = {"ms": seconds[name] * 1e3, "over_ours": seconds[name] / seconds["ours"]} if name in seconds else {}
            records.add(documents=documents, window=window, cp=cp_size, scheme=name, **means, **times)


if __name__ == "__main__":
    main()
