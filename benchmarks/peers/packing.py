"""Compare the division of documents over ranks with Megatron-LM's: python -m benchmarks.peers.packing --megatron-lm DIR

A step of some rows of 128K tokens on dp x cp ranks; each of the schemes gets the same documents, cut by the window:

    ours           rows of documents end to end; `assign_rows` gives rows to replicas and micro-batches, `plan` the
                   tokens of a row to its ranks (with --balance-batches)
    dp_balanced    Megatron-LM's DpBalancedScheduler: micro-batches of whole documents in their order, each document on
                   all cp ranks
    default_dynamic_cp   Megatron-LM's DefaultDynamicCPScheduler: 1, 2, 4, ... ranks for each document, by its length

Theirs is its own planning code from a checkout of its branch dev. Its documents are padded, as its data sets do, to a
multiple of 2 cp tokens, or of 2 dp cp with the dynamic scheduler; a rank has room for the row's tokens / cp.

    moved          rows of keys and values that ranks receive, in % of an all-gather of all rows within groups of cp;
                   theirs by Transformer Engine's exchange, where every rank of a document gets all of its keys
    padding        tokens that are computed besides those of documents, in % of these
    pairs          attention pairs of the busiest rank over the mean, summed over micro-batches: of the slowest rank in
                   each (as pipeline stages and data-parallel experts wait for it), and of the slowest in the step
    tokens         tokens of the fullest rank over the mean, of documents, in each micro-batch and in the step
    micro_batches  of the step
    ms             processor time of the plan of the step, on one core
"""

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from context_parallel import ONE_DOCUMENT, K, log_normal_rows
from record import Records, parser_of

from benchmarks.peers import commits
from megatron_ext.context_parallel import plan
from megatron_ext.data.rows.balance import assign_rows
from megatron_ext.layout import PackedLayout, build_layout, segment_pairs

ROW = 128 * K
WINDOWS = (ROW, 32 * K, K)
SCHEDULERS = ("dp_balanced", "default_dynamic_cp")


@dataclass(frozen=True)
class Divided:
    """What each rank has in each micro-batch of a step; arrays [micro-batches, ranks]."""

    received: np.ndarray  # rows of keys and values
    pairs: np.ndarray  # attention pairs, of padding too
    tokens: np.ndarray  # padding included


Scheme = Callable[[list[PackedLayout]], Divided]


def ours(layouts: list[PackedLayout], dp: int, cp: int) -> Divided:
    """Assign rows to replicas and micro-batches, and plan each row, as training does."""
    pairs = [layout.attention_pairs() for layout in layouts]
    rows = assign_rows(pairs, dp, len(layouts) // dp)[:, :, 0].T  # [micro-batches, replicas]
    plans = [plan(layout, cp) for layout in layouts]
    received = np.array([cp_plan.rows_moved.sum(axis=0) for cp_plan in plans])[rows].reshape(len(rows), -1)
    by_rank = np.array([cp_plan.pairs for cp_plan in plans])[rows].reshape(len(rows), -1)
    return Divided(received, by_rank, np.full(by_rank.shape, ROW // cp))


class MegatronLM:
    """One of Megatron-LM's schedulers."""

    def __init__(self, name: str, dp: int, cp: int) -> None:
        schedulers = importlib.import_module("megatron.core.datasets.data_schedule").scheduler_map
        self._multiple = 2 * cp * (dp if name == "default_dynamic_cp" else 1)
        self._scheduler: Any = schedulers[name](ROW // cp, cp, dp, None)

    def __call__(self, layouts: list[PackedLayout]) -> Divided:
        """Schedule the segments of all rows; a segment is on the ranks whose lists have it."""
        lengths = np.concatenate([layout.lengths for layout in layouts])
        padded = -(-lengths // self._multiple) * self._multiple
        groups = self._scheduler.get_groups_and_subsamples(list(enumerate(padded.tolist())))
        received, pairs, tokens = np.zeros((3, len(groups), len(groups[0])))
        for number, group in enumerate(groups):
            ranks = np.zeros(len(padded), dtype=np.int64)  # that share each segment
            for rank_segments in group:
                ranks[rank_segments] += 1
            for rank, rank_segments in enumerate(group):
                share = padded[rank_segments] / ranks[rank_segments]
                tokens[number, rank] = share.sum()
                received[number, rank] = (padded[rank_segments] - share).sum()
                pairs[number, rank] = (segment_pairs(padded[rank_segments]) / ranks[rank_segments]).sum()
        return Divided(received, pairs, tokens)


def figures(divided: Divided, rows: int, cp: int) -> dict[str, float]:
    """Return the figures of a step."""
    over = {}
    for name in ("pairs", "tokens"):
        by_rank = getattr(divided, name)
        mean = by_rank.mean(axis=1).sum()
        over[f"{name}_in_each"] = by_rank.max(axis=1).sum() / mean
        over[f"{name}_in_step"] = by_rank.sum(axis=0).max() / mean
    total = rows * ROW
    moved = divided.received.sum() / (total * (cp - 1))
    return {"moved": moved, "padding": divided.tokens.sum() / total - 1, **over, "micro_batches": len(divided.pairs)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megatron-lm", type=Path, metavar="DIR", required=True, help="a checkout of its branch dev")
    parser.add_argument("--dp", type=int, default=2, help="replicas [2]")
    parser.add_argument("--cp", type=int, nargs="+", default=[8, 16], help="ranks of a row [8 16]")
    parser.add_argument("--rows", type=int, default=16, help="of a step [16]")
    parser.add_argument("--steps", type=int, default=4, help="whose mean is taken [4]")
    chosen = parser.parse_args()
    sys.path.insert(0, str(chosen.megatron_lm))
    records = Records("packing", chosen.output, **commits(megatron_lm=chosen.megatron_lm))
    for documents in ("many", "one"):
        for cp in chosen.cp:
            schemes: dict[str, Scheme] = {"ours": partial(ours, dp=chosen.dp, cp=cp)}
            schemes |= {name: MegatronLM(name, chosen.dp, cp) for name in SCHEDULERS}
            for window in WINDOWS:
                steps = [
                    log_normal_rows(ROW, step * chosen.rows, chosen.rows)
                    if documents == "many"
                    else [ONE_DOCUMENT] * chosen.rows
                    for step in range(chosen.steps)
                ]
                for name, scheme in schemes.items():
                    step_figures, began = [], time.process_time()
                    for rows in steps:
                        layouts = [build_layout(ROW, ends, window) for ends in rows]
                        step_figures.append(figures(scheme(layouts), chosen.rows, cp))
                    ms = (time.process_time() - began) * 1e3 / len(steps)
                    means = {
                        figure: np.mean([figures_of_step[figure] for figures_of_step in step_figures])
                        for figure in step_figures[0]
                    }
                    records.add(documents=documents, window=window, dp=chosen.dp, cp=cp, scheme=name, **means, ms=ms)


if __name__ == "__main__":
    main()
