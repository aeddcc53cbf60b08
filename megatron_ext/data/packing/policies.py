"""The packing policies: documents in, rows of pieces out, offline.

policy          a row holds                                     left out                      padding
random          the next L tokens of shuffled documents         nothing                       none
carry_over      the same, of a fixed order                      nothing                       end of the last row
drop_tail       whole documents, the last one cut               what was cut off              end of the last row
whole_document  L tokens of one document, or of several joined  other documents, remainders   none
split_drop      L tokens of one document                        a remainder below L           none
best_fit        documents, cut only where longer than L         nothing                       end of any row
upsample_long   as carry_over, long documents several times     nothing                       end of the last row
bm25            as carry_over, similar documents in sequence    nothing                       end of the last row
decomposition   L / 2^i pieces of 2^i tokens of a document      see `decomposition`           none
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from megatron_ext.arrays import Int64
from megatron_ext.cli import program
from megatron_ext.data.packing.best_fit import best_fit_decreasing
from megatron_ext.data.packing.bm25 import order_by_similarity
from megatron_ext.data.packing.decomposition import curriculum, decompose, even_share, full_pieces
from megatron_ext.data.packing.plan import PackingPlan, PlanKey, fingerprint
from megatron_ext.data.rows.dataset import (
    Purpose,
    TokenSource,
    check_row_length,
    check_seed,
    nonempty,
    numbered_sources,
    permutation,
    random_words,
)
from megatron_ext.errors import UserError

Options = Mapping[str, int | float]

UNLIMITED = 2**62
Count = Annotated[int, Field(ge=1, le=UNLIMITED)]
Million = Annotated[int, Field(ge=1, le=10**6)]
Factor = Annotated[float, Field(ge=1, le=10**6, allow_inf_nan=False)]


@dataclass(frozen=True)
class Corpus:
    """What a policy packs: the documents of a split that hold tokens.

    documents, lengths: int64 [n]; below, a document's number is its place in these.
    """

    source: TokenSource
    documents: Int64
    lengths: Int64
    row_length: int
    seed: int

    def sources(self) -> list[npt.NDArray[np.bool_]]:
        """Return the mask bool [n] of each source's documents; one mask where the dataset names no sources."""
        own = numbered_sources(self.source, self.documents)
        if own is None:
            return [np.ones(len(self.documents), dtype=np.bool_)]
        return [own == number for number in range(own.max() + 1)]

    def shuffled(self, count: int, draw: int = 0) -> Int64:
        """Draw a permutation int64 [count] from (seed, draw)."""
        return permutation(count, self.seed, draw, Purpose.DOCUMENTS)

    def uniform(self, count: int, draw: int) -> np.ndarray:
        """Draw float64 [count] in [0, 1) from (seed, draw)."""
        # The upper 53 bits: as many as a float64 holds, so that every value is exact and 1 is never met.
        return (random_words(count, self.seed, draw, Purpose.ROWS) >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Packed:
    """Rows as in `PackingPlan`, with the pieces' documents numbered within the corpus."""

    row_offsets: Int64
    pieces: Int64
    facts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """A way to make rows of documents; the fields are its options."""

    def check(self, row_length: int) -> None:
        """Raise UserError where the options do not fit rows of this length."""

    def pack(self, corpus: Corpus) -> Packed:
        """Return the rows."""
        raise NotImplementedError


def concatenate_and_cut(corpus: Corpus, order: Int64) -> Packed:
    """Lay documents in this order and cut every L tokens; what is cut off a row's end begins the next row."""
    total = int(corpus.lengths[order].sum())
    return cut_rows(corpus, order, np.arange(0, total, corpus.row_length))


def cut_rows(corpus: Corpus, order: Int64, starts: Int64) -> Packed:
    """Lay documents in this order and take the L tokens, or those that are left, from each of `starts` on.

    starts: int64 [R], ascending, at least L apart, counted in tokens of the line of all documents.
    """
    ends = np.cumsum(corpus.lengths[order])
    row_ends = np.minimum(starts + corpus.row_length, ends[-1])
    borders = np.union1d(starts, ends)
    row_of = np.searchsorted(starts, borders, side="right") - 1
    borders, row_of = borders[row_of >= 0], row_of[row_of >= 0]
    inside_row = borders < row_ends[row_of]
    piece_starts, row_of = borders[inside_row], row_of[inside_row]
    piece_ends = np.minimum(np.append(piece_starts[1:], ends[-1]), row_ends[row_of])
    inside = np.searchsorted(ends, piece_starts, side="right")  # which document of the order each piece lies in
    documents = order[inside]
    offsets = piece_starts - (ends[inside] - corpus.lengths[documents])
    row_offsets = np.searchsorted(row_of, np.arange(len(starts) + 1))
    return Packed(row_offsets, np.stack([documents, offsets, piece_ends - piece_starts], axis=1))


@dataclass(frozen=True)
class Random(Policy):
    """Make the rows of `RowDataset` that start in its epoch 0; the last one reaches into the next epochs."""

    def pack(self, corpus: Corpus) -> Packed:
        total = int(corpus.lengths.sum())
        wanted = -(-total // corpus.row_length) * corpus.row_length  # tokens up to the end of the epoch's last row
        orders = [corpus.shuffled(len(corpus.documents), epoch) for epoch in range(-(-wanted // total))]
        packed = concatenate_and_cut(corpus, np.concatenate(orders))
        rows = wanted // corpus.row_length
        return Packed(packed.row_offsets[: rows + 1], packed.pieces[: packed.row_offsets[rows]])


@dataclass(frozen=True)
class CarryOver(Policy):
    """Let the cut-off end of a row's last document begin the next row (ProLong's short part)."""

    def pack(self, corpus: Corpus) -> Packed:
        return concatenate_and_cut(corpus, corpus.shuffled(len(corpus.documents)))


@dataclass(frozen=True)
class DropTail(Policy):
    """Drop the cut-off end of a row's last document (ProLong's SFT): a row begins with a document."""

    def pack(self, corpus: Corpus) -> Packed:
        order = corpus.shuffled(len(corpus.documents))
        lengths = corpus.lengths[order]
        ends = np.cumsum(lengths)
        full = ends - lengths + corpus.row_length  # where a row that begins with this document is full
        following = np.minimum(np.searchsorted(ends, full) + 1, len(order)).tolist()  # the next row's first document
        firsts = [0]
        while firsts[-1] < len(order):
            firsts.append(following[firsts[-1]])
        row_offsets = np.array(firsts)
        # A document is whole but for the last of each row, which ends with the row at the latest.
        last = row_offsets[1:] - 1
        kept = lengths.copy()
        kept[last] = np.minimum(ends[last], full[row_offsets[:-1]]) - (ends - lengths)[last]
        return Packed(row_offsets, np.stack([order, np.zeros_like(order), kept], axis=1))


@dataclass(frozen=True)
class WholeDocument(Policy):
    """Cut documents of at least L and fewer than `below` tokens into as many whole rows as they give (ProLong's long
    part); the remainder, shorter than L, is dropped.

        L = 4, below 12     a a a|  b b b b|b b b b|b|  c c c c|  d (12 tokens)      rows: bbbb bbbb cccc

    `below` keeps the documents of one part of a mixture out of another: those of 64K from those of 512K. Of each
    document the first `rows_per_document` rows are taken: with 1 its first L tokens alone. With `join_sources` the
    documents of one source, in the data set's order, are one document (ProLong's textbooks: the books of a subject):

        L = 4, sources 0 0 0 1     a a a|b b b b b|c c|  d d d d d      rows: aaab bbbb dddd
    """

    below: Count = UNLIMITED
    rows_per_document: Count = UNLIMITED
    join_sources: Literal[0, 1] = 0

    def check(self, row_length: int) -> None:
        if self.below <= row_length:
            raise UserError(f"packing: below is {self.below}; needs more than the {row_length} tokens of a sequence")

    def pack(self, corpus: Corpus) -> Packed:
        if self.join_sources:
            own = numbered_sources(corpus.source, corpus.documents)
            if own is None:
                raise UserError(
                    "packing: join_sources joins the documents of a source, but the dataset names no sources; make it "
                    f"with {program('preprocess')} --source-field FIELD"
                )
            order = np.argsort(own, kind="stable")
            lengths = np.bincount(own, weights=corpus.lengths).astype(np.int64)
        else:
            order, lengths = np.arange(len(corpus.lengths)), corpus.lengths
        chosen = np.flatnonzero((lengths >= corpus.row_length) & (lengths < self.below))
        texts, starts = full_pieces(lengths[chosen], corpus.row_length)
        taken = starts // corpus.row_length < self.rows_per_document
        begins = np.cumsum(lengths) - lengths
        return cut_rows(corpus, order, begins[chosen[texts[taken]]] + starts[taken])


@dataclass(frozen=True)
class SplitDrop(Policy):
    """Cut documents into rows of their own and drop a shorter remainder (token weighting's PG-19)."""

    def pack(self, corpus: Corpus) -> Packed:
        documents, starts = full_pieces(corpus.lengths, corpus.row_length)
        pieces = np.stack([documents, starts, np.full(len(documents), corpus.row_length)], axis=1)
        return Packed(np.arange(len(documents) + 1), pieces)


@dataclass(frozen=True)
class BestFit(Policy):
    """Truncate as few documents as can be (arXiv 2404.10830): they are cut into rows of their own where longer
    than L, and what is left of each, or all of it, goes whole into the row that it fills best.

    The largest go first; those of one length, and the pieces within a row, stand in an order drawn from the seed.
    """

    def pack(self, corpus: Corpus) -> Packed:
        length = corpus.row_length
        full = SplitDrop().pack(corpus)
        rests = corpus.lengths % length
        order = corpus.shuffled(len(rests))
        order = order[rests[order] > 0]
        bins = best_fit_decreasing(rests[order], length)
        rest_pieces = np.stack([order, corpus.lengths[order] - rests[order], rests[order]], axis=1)
        pieces = np.concatenate([full.pieces, rest_pieces])
        rows = np.concatenate([np.arange(len(full.pieces)), len(full.pieces) + bins])
        by_row = np.lexsort((corpus.shuffled(len(rows), draw=1), rows))
        row_offsets = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        return Packed(row_offsets, pieces[by_row])


@dataclass(frozen=True)
class UpsampleLong(Policy):
    """Let documents longer than `threshold` tokens stand several times in an epoch, packed at random (LCDE).

    Within each source its long documents stand `factor` times, or as often as makes `long_share` of the source's tokens
    (never less than once). The sources keep their shares of the tokens: those that grew by less stand more often as a
    whole. A data set without sources is one. With long_share 0.7 and sources of 30 long and 70 short tokens, and of 50
    and 50:

        source   factor                      tokens by it        times so often       tokens
        1        0.7 * 70 / (0.3 * 30) 5.44  163.3 + 70 = 233.3  1                    233.3
        2        0.7 * 50 / (0.3 * 50) 2.33  116.7 + 50 = 166.7  233.3 / 166.7        233.3

    A fraction of a factor is met by one more copy of as large a share of the documents, drawn from the seed.
    """

    threshold: Count = 8192
    factor: Factor = 5.0
    long_share: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def pack(self, corpus: Corpus) -> Packed:
        of_source = corpus.sources()
        long = corpus.lengths > self.threshold
        tokens = np.array(
            [[corpus.lengths[mine & long].sum(), corpus.lengths[mine & ~long].sum()] for mine in of_source]
        )
        factors = [self._factor(int(longs), int(shorts)) for longs, shorts in tokens.tolist()]
        grown = [(longs * by + shorts) / (longs + shorts) for (longs, shorts), by in zip(tokens, factors, strict=True)]
        copies = np.ones(len(corpus.lengths), dtype=np.int64)
        for number, (mine, by, growth) in enumerate(zip(of_source, factors, grown, strict=True)):
            evened = max(grown) / growth
            for draw, (chosen, wanted) in enumerate(
                ((mine & long, by * evened), (mine & ~long, evened)), 2 * number + 1
            ):
                documents = np.flatnonzero(chosen)
                whole, fraction = divmod(wanted, 1)
                # Factor 2.25: two copies of each document, and a third one of a quarter of them.
                copies[documents] = int(whole)
                copies[documents[corpus.shuffled(len(documents), draw)[: round(fraction * len(documents))]]] += 1
        documents = np.repeat(np.arange(len(copies)), copies)
        packed = concatenate_and_cut(corpus, documents[corpus.shuffled(len(documents))])
        kept = int((copies * corpus.lengths)[long].sum())
        facts = {"long_documents": int(long.sum()), "long_tokens_with_copies": kept, "sources": len(of_source)}
        return Packed(packed.row_offsets, packed.pieces, facts)

    def _factor(self, long: int, short: int) -> float:
        """Return how often a source's long documents stand, by the tokens of its long and its short ones."""
        if not self.long_share:
            return self.factor
        return max(self.long_share * short / ((1 - self.long_share) * long), 1.0) if long else 1.0


@dataclass(frozen=True)
class Bm25(Policy):
    """Let the nearest unused document by BM25 follow; rows as in `carry_over`. See `order_by_similarity`."""

    first_tokens: Count = 512
    block_documents: Count = 131072

    def pack(self, corpus: Corpus) -> Packed:
        similar = order_by_similarity(
            corpus.source,
            corpus.documents,
            corpus.shuffled(len(corpus.documents)),
            self.first_tokens,
            self.block_documents,
        )
        packed = concatenate_and_cut(corpus, similar.order)
        return Packed(packed.row_offsets, packed.pieces, {"bm25_hits": similar.hits, "bm25_queries": similar.queries})


@dataclass(frozen=True)
class Decomposition(Policy):
    """Make rows of pieces of one size each, in the order of a curriculum (Dataset Decomposition, arXiv 2405.13226).

    A document is cut by the binary digits of its length, see `decompose`; pieces of one size are shuffled, and
    L / size of them fill a row. The rows' order grows from short pieces to long ones `cycles` times, see
    `curriculum`; `batch_rows` rows in sequence hold pieces of one size: the paper's batches, where it is the global
    batch size. `rows` is what a run reads that is shorter than an epoch: every size then gives an even share, or the
    run would end before the long pieces. Left out: a document's last tokens, fewer than `shortest`, and the pieces that
    fill no row or batch, or are of no share.
    """

    shortest: Count = 256
    cycles: Million = 8
    growth: Factor = 2.0
    batch_rows: Annotated[int, Field(ge=1, le=10**9)] = 1
    rows: Count = UNLIMITED

    def check(self, row_length: int) -> None:
        for name, value in (("shortest", self.shortest), ("row_length", row_length)):
            if value.bit_count() != 1:
                raise UserError(f"packing: decomposition needs powers of two, but {name} is {value}")
        if self.shortest > row_length:
            raise UserError(
                f"packing: decomposition has pieces of at least {self.shortest} tokens, but row_length is "
                f"{row_length}; give a smaller shortest"
            )

    def pack(self, corpus: Corpus) -> Packed:
        length, batch = corpus.row_length, self.batch_rows
        buckets = decompose(corpus.lengths, self.shortest, length)
        sizes = [length >> power for power in reversed(range(len(buckets)))]
        whole = [len(pieces) * size // (length * batch) for pieces, size in zip(buckets, sizes, strict=True)]
        batches = even_share(whole, self.rows // batch)
        draws = [corpus.uniform(count, draw) for draw, count in enumerate(batches)]
        order = np.repeat(curriculum(batches, draws, self.growth, self.cycles), batch)
        chosen, rows = [], []
        for number, (pieces, size) in enumerate(zip(buckets, sizes, strict=True)):
            of_size = np.flatnonzero(order == number)
            kept = corpus.shuffled(len(pieces), number)[: len(of_size) * (length // size)]
            chosen.append(pieces[kept])
            rows.append(np.repeat(of_size, length // size))
        row_of = np.concatenate(rows)
        row_offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=len(order)))])
        short = int((corpus.lengths % sizes[0]).sum())
        facts = {"short_tokens": short, "unfilled_tokens": int(corpus.lengths.sum()) - short - len(order) * length}
        facts |= {f"rows_of_{size}": count * batch for size, count in zip(sizes, batches, strict=True)}
        return Packed(row_offsets, np.concatenate(chosen)[np.argsort(row_of, kind="stable")], facts)


POLICIES: Mapping[str, type[Policy]] = {
    "random": Random,
    "carry_over": CarryOver,
    "drop_tail": DropTail,
    "whole_document": WholeDocument,
    "split_drop": SplitDrop,
    "best_fit": BestFit,
    "upsample_long": UpsampleLong,
    "bm25": Bm25,
    "decomposition": Decomposition,
}


def check_options(policy: str, options: Options, row_length: int) -> dict[str, int | float]:
    """Return all options of a policy, with its defaults where they are not given.

    Raises:
        UserError: an unknown policy or option, or a value that it cannot have.
    """
    return asdict(_policy(policy, options, row_length))


def _policy(policy: str, options: Options, row_length: int) -> Policy:
    if policy not in POLICIES:
        raise UserError(f"packing: there is no policy {policy!r}; choose one of {', '.join(POLICIES)}")
    kind = POLICIES[policy]
    known = [option.name for option in fields(kind)]
    for name in options:
        if name not in known:
            raise UserError(f"packing: {policy} has no option {name!r}; it takes {', '.join(known) or 'none'}")
    try:
        chosen = TypeAdapter(kind).validate_python(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Input s")
        raise UserError(f"packing: {first['loc'][0]} is {first['input']}; s{message}") from None
    if options.get("long_share") and "factor" in options:
        raise UserError("packing: factor beside long_share, which gives each source its own; leave one of them out")
    chosen.check(row_length)
    return chosen


def plan_key(
    policy: str,
    source: TokenSource,
    documents: Sequence[int] | Int64,
    row_length: int,
    seed: int,
    options: Options | None = None,
) -> PlanKey:
    """Return the key of the plan that `build_plan` makes of the same arguments.

    Raises:
        UserError: an unknown policy or option, an option's value, row length or seed out of range.
    """
    check_row_length(row_length)
    check_seed(seed)
    chosen = check_options(policy, options or {}, row_length)
    return PlanKey(policy, row_length, seed, chosen, fingerprint(source, documents))


def build_plan(
    policy: str,
    source: TokenSource,
    documents: Sequence[int] | Int64,
    row_length: int,
    seed: int,
    options: Options | None = None,
) -> PackingPlan:
    """Pack `documents` (indices into `source`; empty ones hold nothing) into rows of `row_length` tokens.

    `random` gives the rows that start in epoch 0 of `RowDataset`, to be reported on: the rows themselves
    come from there.

    Raises:
        UserError: as `plan_key`; no tokens, or no row at all; `bm25` without the package bm25s.
    """
    key = plan_key(policy, source, documents, row_length, seed, options)
    chosen, lengths = nonempty(source, documents)
    corpus = Corpus(source, chosen, lengths, row_length, seed)
    packed = _policy(policy, options or {}, row_length).pack(corpus)
    if len(packed.row_offsets) == 1:
        raise UserError(
            f"packing: {policy} makes no row of {row_length} tokens of these {len(chosen)} documents, the longest of "
            f"which has {lengths.max()}; use a smaller row length, longer documents, or another policy"
        )
    pieces = packed.pieces.copy()  # a policy numbers the documents that hold tokens, a plan those of the dataset
    pieces[:, 0] = chosen[pieces[:, 0]]
    return PackingPlan(key, packed.row_offsets, pieces, packed.facts)
