"""Datasets as Megatron-Core's own builder writes them."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def write_theirs(prefix: str | os.PathLike[str], documents: Iterable[np.ndarray], vocab_size: int) -> None:
    """Write `documents`, token ids [tokens] each, as PREFIX.bin and PREFIX.idx."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
