"""Compare layouts and resuming with SkyLadder's own code: python -m benchmarks.peers.skyladder --skyladder DIR

    layout    from a row's tokens to the segment lengths, from document ends and the window's grid: its
              `get_fragment_lens_fixed_length_intramask`, and ours after a search for the ends (our datasets have them)
    resume    from nothing to the first row of a run that resumes after N rows: its iterator, which draws the previous
              rows again one by one, and ours, in which every row is a function of its number. Rows of 8K

Processor time, the minimum over alternating rounds.
"""

import contextlib
import importlib
import io
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from context_parallel import K, log_normal_rows
from record import Records, parser_of, processor_seconds

from benchmarks.peers import commits, package
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.layout import build_layout

END = 2  # the end-of-document token in their code
VOCABULARY = 32_000
ROW = 8 * K
ROWS_OF_A_FILE = 64


class Memory:
    """Documents in an array, with the interface of a memory-mapped dataset."""

    def __init__(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        self._tokens = tokens
        self._starts = np.concatenate([[0], ends[:-1]])
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
    (ends,) = log_normal_rows(length)
    tokens = np.random.default_rng(0).integers(END + 1, VOCABULARY, length)
    tokens[ends - 1] = END
    return tokens, ends


def searched(tokens: np.ndarray, window: int) -> np.ndarray:
    """Return our segment lengths of a row whose document ends are not known."""
    return build_layout(len(tokens), np.flatnonzero(tokens == END) + 1, window).lengths


def compare(records: Records, rounds: int, work: dict[str, Callable[[], object]], **facts: int) -> None:
    """Record the time of ours and of theirs."""
    seconds = processor_seconds(work, rounds)
    times = {f"{name}_ms": least * 1e3 for name, least in seconds.items()}
    records.add(**facts, **times, theirs_over_ours=seconds["theirs"] / seconds["ours"])


def layouts(theirs: Any, rounds: int, records: Records) -> None:
    """Record the time of each row length and window."""
    lengths_of = theirs.get_fragment_lens_fixed_length_intramask
    for length, window in itertools.product((8 * K, 32 * K), (32, K, None)):
        tokens, _ = drawn(length)
        window = window or length
        their_work = partial(lengths_of, torch.from_numpy(tokens), window, False)
        counts = {"segments": len(searched(tokens, window)), "their_segments": len(their_work()[0])}
        work = {"theirs": their_work, "ours": partial(searched, tokens, window)}
        compare(records, rounds, work, row=length, window=window, **counts)


def resumes(theirs: Any, counts: list[int], rounds: int, records: Records) -> None:
    """Record the time of each number of previously read rows."""
    tokens, ends = drawn((max(counts) + 2 * ROWS_OF_A_FILE) * (ROW + 1))
    ends = np.append(ends, len(tokens)) if ends[-1] < len(tokens) else ends
    with tempfile.TemporaryDirectory() as folder:
        builder = theirs.PackedDatasetBuilder(folder, "rows", ROWS_OF_A_FILE * (ROW + 1), END, vocab_size=VOCABULARY)
        builder.add_array(tokens)
        source = Memory(tokens.astype(np.uint16), ends)

        def their_row(count: int) -> Any:
            with contextlib.redirect_stdout(io.StringIO()):
                rows = theirs.PackedDataset(builder.filenames, n_chunks=1, block_size=ROW + 1, mask_attn="intradm8")
                return next(itertools.islice(rows, count, None))

        def our_row(count: int) -> Any:
            row = RowDataset(source, range(len(ends)), ROW, seed=1).row(count)
            return row, build_layout(ROW, row.document_ends, 32)

        for count in counts:
            work = {"theirs": partial(their_row, count), "ours": partial(our_row, count)}
            compare(records, rounds, work, rows_before=count)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--skyladder", type=Path, metavar="DIR", required=True, help="a checkout of sail-sg/SkyLadder")
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 100, 1000], help="read before [0 100 1000]")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    package("lit_gpt", chosen.skyladder / "lit_gpt")
    their_module = importlib.import_module("lit_gpt.packed_dataset")
    context = commits(skyladder=chosen.skyladder)
    layouts(their_module, chosen.rounds, Records("layout", chosen.output, **context))
    resumes(their_module, chosen.rows, min(chosen.rounds, 3), Records("resume", chosen.output, **context))


if __name__ == "__main__":
    main()
