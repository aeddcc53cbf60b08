"""Compare best-fit packing on the same documents: python -m benchmarks.peers.best_fit [--olmo-core DIR] ...

Documents have log-normal lengths like FineWeb-Pro's; longer documents are split into rows and a remainder for all
packers. Reported are the number of rows, the padding in them, and processor time (the minimum over alternating rounds):

    ours            best-fit decreasing, one size at a time
    OLMo-core       best-fit decreasing on a segment tree (its `InstancePacker`). --olmo-core DIR
    Megatron-Bridge first-fit decreasing on a segment tree. --megatron-bridge DIR
"""

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from context_parallel import K
from record import Records, parser_of, processor_seconds

from benchmarks.peers import absent, commits, package
from megatron_ext.data.packing.best_fit import best_fit_decreasing

Packer = Callable[[np.ndarray, int], int]  # sizes and capacity to bins


def sizes_of(documents: int, row_length: int) -> np.ndarray:
    """Draw document lengths; longer documents become whole rows and a remainder."""
    drawn = np.random.default_rng(0).lognormal(np.log(849), 0.974, size=documents)
    lengths = np.maximum(drawn.astype(np.int64), 1)
    rests = lengths % row_length
    return np.concatenate([np.full((lengths // row_length).sum(), row_length), rests[rests > 0]])


def ours(sizes: np.ndarray, capacity: int) -> int:
    return int(best_fit_decreasing(sizes, capacity).max()) + 1


def olmo(folder: Path) -> Packer:
    """Return the packer of an OLMo-core checkout."""
    package("olmo_core", folder / "src" / "olmo_core")
    package("olmo_core.data", folder / "src" / "olmo_core" / "data")
    absent("olmo_core.io", "olmo_core.utils", "olmo_core.aliases", "olmo_core.config")
    packer = importlib.import_module("olmo_core.data.utils").InstancePacker

    def pack(sizes: np.ndarray, capacity: int) -> int:
        ends = np.cumsum(sizes)
        return len(packer(capacity).pack_documents(np.stack([ends - sizes, ends], axis=1))[0])

    return pack


def bridge(folder: Path) -> Packer:
    """Return the packer of a Megatron-Bridge checkout."""
    source = folder / "src" / "megatron" / "bridge"
    package("megatron.bridge", source)
    package("megatron.bridge.data", source / "data")
    package("megatron.bridge.data.packing", source / "data" / "packing")
    absent("megatron.bridge.utils.safe_pickle")
    first_fit = importlib.import_module("megatron.bridge.data.packing.algorithms").first_fit_decreasing
    return lambda sizes, capacity: len(first_fit(sizes.tolist(), capacity))


def main() -> None:
    """Record the rows, padding and time of each packer."""
    parser = parser_of(__doc__)
    parser.add_argument("--olmo-core", type=Path, metavar="DIR", help="a checkout of allenai/OLMo-core")
    parser.add_argument("--megatron-bridge", type=Path, metavar="DIR", help="a checkout of NVIDIA-NeMo/Megatron-Bridge")
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    packers: dict[str, Packer] = {"ours": ours}
    if chosen.olmo_core:
        packers["OLMo-core"] = olmo(chosen.olmo_core)
    if chosen.megatron_bridge:
        packers["Megatron-Bridge"] = bridge(chosen.megatron_bridge)
    peers = commits(olmo_core=chosen.olmo_core, megatron_bridge=chosen.megatron_bridge)
    records = Records("best_fit", chosen.output, **peers)
    for row_length, documents in itertools.product((8 * K, 32 * K), chosen.documents):
        sizes = sizes_of(documents, row_length)
        work = {name: partial(pack, sizes, row_length) for name, pack in packers.items()}
        seconds = processor_seconds(work, chosen.rounds)
        for name, pack in packers.items():
            rows = pack(sizes, row_length)
            facts = {"row": row_length, "documents": documents, "packer": name, "rows": rows}
            times = {"ms": seconds[name] * 1e3, "over_ours": seconds[name] / seconds["ours"]}
            records.add(**facts, padding=1 - sizes.sum() / (rows * row_length), **times)


if __name__ == "__main__":
    main()
