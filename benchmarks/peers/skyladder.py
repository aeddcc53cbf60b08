"""Compare layouts and resuming with SkyLadder's own code: python -m benchmarks.peers.skyladder --skyladder DIR

    layout    from a row's tokens to the segment lengths, from document ends and the window's grid: its
              `get_fragment_lens_fixed_length_intramask`, and ours, which either gets the ends (our datasets have
              them) or searches for them as its function does
    resume    from nothing to the first row of a run that resumes after N rows: its iterator, which draws the previous
              rows again one by one, and ours, in which every row is a function of its number. Rows of 8K

Processor time, the minimum over alternating rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.context_parallel import K, log_normal_rows
from benchmarks.peers.checkouts import heading, package
from benchmarks.record import processor_seconds
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.layout import build_layout

END = 2  # the end-of-document token in their code
VOCABULARY = 32_000
ROW = 8 * K
ROWS_OF_A_FILE = 64


class Memory:
    """Documents in an array, with the interface of a memory-mapped dataset."""

    def __init__(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        self._tokens, self._starts = tokens, np.concatenate([[0], ends[:-1]])
        self.document_lengths = np.diff(ends, prepend=0)

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        first = self._starts[document] + offset
        return self._tokens[first : first + length].astype(np.int64)

    def read_weights(self, document: int, offset: int, length: int) -> None:
        return None

    def read_mask(self, document: int, offset: int, length: int) -> bool:
        return True


def drawn(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens whose documents have log-normal lengths, and the exclusive ends of the documents."""
    (ends,) = log_normal_rows(length, count=1)
    tokens = np.random.default_rng(0).integers(END + 1, VOCABULARY, length)
    tokens[ends - 1] = END
    return tokens, ends


def lengths_of(ends: np.ndarray, length: int, window: int) -> np.ndarray:
    return build_layout(length, ends, window).lengths


def searched(tokens: np.ndarray, window: int) -> np.ndarray:
    return lengths_of(np.flatnonzero(tokens == END) + 1, len(tokens), window)


def layouts(theirs: Any, rounds: int) -> Iterator[str]:
    """Yield a line for each row length and window."""
    yield (
        f"layout{'L':>8}{'window':>8}{'segments':>9}{'theirs ms':>11}{'ours ms':>9}{'with search':>12}"
        f"   theirs over ours, over ours with search; segments of theirs, tokens of the first"
    )
    for length in (8 * K, 32 * K):
        for window in (32, K, length):
            tokens, ends = drawn(length)
            work = {
                "theirs": partial(
                    theirs.get_fragment_lens_fixed_length_intramask, torch.from_numpy(tokens), window, False
                ),
                "ours": partial(lengths_of, ends, length, window),
                "search": partial(searched, tokens, window),
            }
            seconds = {name: least * 1e3 for name, least in processor_seconds(work, rounds).items()}
            segments, found = lengths_of(ends, length, window), work["theirs"]()[0]
            yield (
                f"{length:14}{window:8}{len(segments):9}{seconds['theirs']:11.3f}{seconds['ours']:9.3f}"
                f"{seconds['search']:12.3f}   {seconds['theirs'] / seconds['ours']:.1f}, "
                f"{seconds['theirs'] / seconds['search']:.1f}; {len(found)}, {found[0]} (ours {segments[0]})"
            )


def resumes(theirs: Any, counts: list[int], rounds: int) -> Iterator[str]:
    """Yield a line for each number of previously read rows."""
    yield f"resume{'rows before':>13}{'theirs ms':>11}{'ours ms':>9}   theirs over ours"
    tokens, ends = drawn((max(counts) + 2 * ROWS_OF_A_FILE) * (ROW + 1))
    ends = np.append(ends, len(tokens)) if ends[-1] < len(tokens) else ends
    with tempfile.TemporaryDirectory() as folder:
        builder = theirs.PackedDatasetBuilder(folder, "rows", ROWS_OF_A_FILE * (ROW + 1), END, vocab_size=VOCABULARY)
        builder.add_array(tokens)
        source = Memory(tokens.astype(np.uint16), ends)

        def their_row(count: int) -> Any:
            with contextlib.redirect_stdout(io.StringIO()):
                rows = iter(
                    theirs.PackedDataset(builder.filenames, n_chunks=1, block_size=ROW + 1, mask_attn="intradm8")
                )
                for _ in range(count):
                    next(rows)
                return next(rows)

        def our_row(count: int) -> Any:
            row = RowDataset(source, range(len(ends)), ROW, seed=1).row(count)
            return row, build_layout(ROW, row.document_ends, 32)

        for count in counts:
            work = {"theirs": partial(their_row, count), "ours": partial(our_row, count)}
            seconds = processor_seconds(work, rounds)
            yield (
                f"{count:19}{seconds['theirs'] * 1e3:11.2f}{seconds['ours'] * 1e3:9.2f}   "
                f"{seconds['theirs'] / seconds['ours']:.1f}"
            )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skyladder", type=Path, metavar="DIR", required=True, help="a checkout of sail-sg/SkyLadder")
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 100, 1000], help="read before [0 100 1000]")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    package("lit_gpt", chosen.skyladder / "lit_gpt")
    theirs = importlib.import_module("lit_gpt.packed_dataset")
    print(heading("skyladder", SkyLadder=chosen.skyladder))
    for text in (*layouts(theirs, chosen.rounds), *resumes(theirs, chosen.rows, min(chosen.rounds, 3))):
        print(text, flush=True)


if __name__ == "__main__":
    main()
