"""Dataset Decomposition (arXiv 2405.13226): pieces of 2^i tokens, and the order in which rows of them are read.

document of 13 tokens, shortest 2, L = 8:    a a a a a a a a | a a a a | . (dropped: below `shortest`)
rows of L tokens                             8      4 4      2 2 2 2
order, 2 cycles of growth                    2222 2222 44 2222 44 8 8 | 2222 44 2222 44 44 8 8
"""

from collections.abc import Sequence

import numpy as np

from megatron_ext.arrays import Int64


def decompose(lengths: Int64, shortest: int, longest: int) -> list[Int64]:
    """Cut documents into pieces of `longest` tokens, then one for each 1 in the binary representation of the remainder.

    Larger pieces come first; a remainder of fewer than `shortest` tokens is dropped.

    Returns for each size from `shortest` to `longest`, both powers of two, its bucket: int64 [P, 3], document, first
    token, size.
    """
    buckets = []
    size = shortest
    while size < longest:
        documents = np.flatnonzero(lengths & size)
        # A document's piece of this size follows the larger ones, the higher digits of its length.
        starts = lengths[documents] // (2 * size) * (2 * size)
        buckets.append(_pieces(documents, starts, size))
        size *= 2
    return [*buckets, full_pieces(lengths, longest)]


def full_pieces(lengths: Int64, size: int) -> Int64:
    """Cut documents into pieces of `size` tokens and drop the remainder; return int64 [P, 3] as `decompose`."""
    counts = lengths // size
    documents = np.repeat(np.arange(len(counts)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return _pieces(documents, (np.arange(len(documents)) - before) * size, size)


def _pieces(documents: Int64, starts: Int64, size: int) -> Int64:
    return np.stack([documents, starts, np.full(len(documents), size)], axis=1)


def curriculum(counts: Sequence[int], draws: Sequence[np.ndarray], growth: float, cycles: int) -> Int64:
    """Return the bucket from which each batch of an epoch is drawn, from short to long, `cycles` times.

    Every cycle has an equal share of each bucket's batches. Within it, the next batch comes from bucket i with a
    probability proportional to o_i n_i, where o_i = growth^-i are the odds and n_i the bucket's batches in the cycle,
    until the bucket is exhausted. The paper's Grow-P2 is growth 2, its Grow-P100 is growth 100, and 1 is no curriculum.
    The implementation samples the times of Poisson processes with rates o_i n_i and sorts them, which is equivalent.

    `counts` are the batches of each bucket, shortest pieces first, and `draws` their float64 [batches], uniform in [0,
    1). Returns int64 [sum(counts)], bucket indices.
    """
    buckets = []
    numbers = []  # of the cycles
    times = []
    for bucket, (count, uniform) in enumerate(zip(counts, draws, strict=True)):
        borders = np.arange(cycles + 1) * count // cycles
        cycle_of_batch = np.repeat(np.arange(cycles), np.diff(borders))
        waits = np.append(0.0, np.cumsum(-np.log1p(-uniform)))
        waits_of_cycle = waits[1:] - waits[borders[cycle_of_batch]]
        rates = growth**-bucket * np.diff(borders)
        buckets.append(np.full(count, bucket))
        numbers.append(cycle_of_batch)
        times.append(waits_of_cycle / rates[cycle_of_batch])
    order = np.lexsort((np.concatenate(times), np.concatenate(numbers)))
    return np.concatenate(buckets)[order]


def even_share(counts: Sequence[int], limit: int) -> list[int]:
    """Reduce counts to a sum of at most `limit`, as proportionally as integers allow."""
    total = sum(counts)
    if total <= limit:
        return list(counts)
    shares = [count * limit // total for count in counts]
    remainders = [count * limit % total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda number: -remainders[number])
    for number in by_remainder[: limit - sum(shares)]:
        shares[number] += 1
    return shares
