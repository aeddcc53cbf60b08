"""Compare the time and memory until a data set's first rows with Megatron-Core's GPTDataset.

    python benchmarks/data_order.py --documents 1000000 10000000 50000000

For each number of documents, an index of documents of log-normal length (mean 1,360 tokens) is made, and a .bin of this
size without content. Each start is a process of its own that opens the data set and reads 8 rows of 32K tokens: "first"
makes what is kept in files, "later" finds it, "small" is the later start of 1,000 documents. "cpu_s" and "wall_s" are
from the opening to the last row, without imports; "unshared_mb" is the growth of the memory that no other process
shares. Starts alternate between both, in `--rounds` rounds; the fastest counts. The .bin needs no space on disk.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from record import ROOT, Records, parser_of

ROW = 32_768
ROWS = 8
SEED = 1234
KINDS = ("ours", "megatron-core")


def write_index(prefix: Path, documents: int) -> None:
    """Write PREFIX.idx of random documents, one sequence each, and a .bin of zeros that takes no space."""
    sys.path.insert(0, str(ROOT))
    from megatron_ext.data.indexed import HEADER, MAGIC, VERSION

    lengths = np.random.default_rng(0).lognormal(6.7, 1.0, documents).astype(np.int32) + 1
    sizes = lengths.astype(np.int64) * 2
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        file.write(lengths.tobytes())
        file.write((np.cumsum(sizes) - sizes).tobytes())
        file.write(np.arange(documents + 1, dtype=np.int64).tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(int(sizes.sum()))


def read_ours(prefix: str, cache: str) -> int:
    from megatron_ext.data.indexed import IndexedSource
    from megatron_ext.data.rows.dataset import RowDataset

    source = IndexedSource(prefix)
    rows = RowDataset(source, range(source.document_count), ROW, SEED, cache=Path(cache))
    return sum(len(rows.row(sample).tokens) for sample in range(ROWS))


def read_megatron_core(prefix: str, cache: str) -> int:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=ROW,
        split="1",
        path_to_cache=cache,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=_Tokenizer(),
    )
    source = IndexedDataset(prefix, mmap=True)
    documents = np.arange(len(source), dtype=np.int32)
    rows = GPTDataset(source, prefix, documents, ROWS, Split.train, config)
    return sum(len(rows[sample]["tokens"]) for sample in range(ROWS))


class _Tokenizer:
    """What GPTDataset asks of a tokenizer."""

    vocab_size = 50_000
    eod = 0
    pad = 0
    unique_identifiers: ClassVar[dict[str, str]] = {}


def unshared_mb() -> float:
    """Return the memory of this process that is no page of a file, which all processes share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def start(kind: str, prefix: str, cache: str) -> dict[str, float]:
    """Open a data set in this process, which has imported everything, and measure it."""
    sys.path.insert(0, str(ROOT))
    read = read_ours if kind == "ours" else read_megatron_core
    with tempfile.TemporaryDirectory() as folder:  # imports
        write_index(Path(folder) / "tiny", 1000)
        read(str(Path(folder) / "tiny"), folder)
    memory = unshared_mb()
    wall = time.perf_counter()
    cpu = time.process_time()
    read(prefix, cache)
    times = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    return times | {"unshared_mb": unshared_mb() - memory}


def measure(kind: str, prefix: Path, cache: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--start", kind, str(prefix), str(cache)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def compare(documents: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the fastest first and later start of each kind."""
    prefix = folder / f"documents-{documents}"
    write_index(prefix, documents)
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for kind in KINDS:
            cache = folder / f"{kind}-{documents}"
            shutil.rmtree(cache, ignore_errors=True)
            for state in ("first", "later"):
                results.setdefault(f"{kind} {state}", []).append(measure(kind, prefix, cache))
    for end in (".idx", ".bin"):
        Path(f"{prefix}{end}").unlink()
    return {
        name: {key: round(min(run[key] for run in runs), 3) for key in runs[0]}
        for name, runs in sorted(results.items())
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the index files are written (default: a temporary folder)")
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(*options.start)))
        return
    records = Records("data order", options.output, rows=ROWS, row_length=ROW)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for documents in (1000, *options.documents):
            work = partial(compare, documents, options.rounds, Path(folder))
            records.measure(work, documents=documents)
    sys.exit(records.failed > 0)


if __name__ == "__main__":
    main()
