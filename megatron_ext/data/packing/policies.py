"""The packing policies, which create rows of pieces of documents offline.

policy          content of a row                                dropped                       padding
random          the next L tokens of shuffled documents         nothing                       none
carry_over      the same, in a fixed order                      nothing                       end of the last row
drop_tail       whole documents, the last one cut               the part cut off              end of the last row
whole_document  L tokens of one document, or of several joined  other documents, remainders   none
split_drop      L tokens of one document                        a remainder below L           none
best_fit        documents, cut only if longer than L            nothing                       end of any row
upsample_long   as carry_over, with long documents repeated     nothing                       end of the last row
bm25            as carry_over, similar documents adjacent       nothing                       end of the last row
decomposition   L / 2^i pieces of 2^i tokens of a document      see `decomposition`           none
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from megatron_ext.arrays import Int64
from megatron_ext.cli import program
from megatron_ext.data.indexed import Documents, IndexedSource, nonempty
from megatron_ext.data.packing.best_fit import best_fit_decreasing
from megatron_ext.data.packing.decomposition import curriculum, decompose, even_share, full_pieces
from megatron_ext.data.packing.plan import PackingPlan, PlanKey, fingerprint
from megatron_ext.data.row import Purpose, permutation, random_words
from megatron_ext.errors import UserError, optional_module
from megatron_ext.files.reading import typed

Options = Mapping[str, int | float]
Packed = tuple[Int64, Int64]  # row_offsets and pieces of a `PackingPlan`, with documents indexed within the corpus

UNLIMITED = 2**62
Count = Annotated[int, Field(ge=1, le=UNLIMITED)]
Million = Annotated[int, Field(ge=1, le=10**6)]
Factor = Annotated[float, Field(ge=1, le=10**6, allow_inf_nan=False)]


@dataclass(frozen=True)
class Corpus:
    """The non-empty documents of a split, int64 [n], and their lengths; policies use indices into these arrays."""

    source: IndexedSource
    documents: Int64
    lengths: Int64
    row_length: int
    seed: int

    def sources(self) -> Int64 | None:
        """Return the source of each document, numbered from 0, int64 [n]; None if the data set has no sources."""
        if self.source.document_sources is None:
            return None
        return np.unique(self.source.document_sources[self.documents], return_inverse=True)[1]

    def shuffled(self, count: int, draw: int = 0) -> Int64:
        """Return a permutation int64 [count], a function of (seed, draw)."""
        return permutation(count, self.seed, draw, Purpose.DOCUMENTS)

    def uniform(self, count: int, draw: int) -> np.ndarray:
        """Return float64 [count], uniform in [0, 1), a function of (seed, draw)."""
        words = random_words(count, self.seed, draw, Purpose.ROWS)
        # the upper 53 bits, the precision of float64, so that every value is exact and below 1
        return (words >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Policy(ABC):
    """A way to create rows from documents; the fields are its options."""

    # the share of documents that token_weighting/gain.py keeps; None: all, and no option
    filter_by_gain: Annotated[float, Field(gt=0, le=1)] | None = field(default=None, kw_only=True)

    @property
    def options(self) -> dict[str, int | float]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def check(self, row_length: int) -> None:  # noqa: B027  not all policies have something to check
        """Raise UserError if the options are invalid for rows of this length."""

    @abstractmethod
    def pack(self, corpus: Corpus) -> Packed:
        """Return the rows of one epoch of the corpus."""


def cut_rows(corpus: Corpus, order: Int64, starts: Int64 | None = None) -> Packed:
    """Concatenate documents in this order and create a row of up to L tokens from each position in `starts`.

    `starts` are token positions in the concatenation, int64 [R], ascending and at least L apart; None: every L tokens,
    so that a cut document continues in the next row.
    """
    ends = np.cumsum(corpus.lengths[order])
    if starts is None:
        starts = np.arange(0, ends[-1], corpus.row_length)
    row_ends = np.minimum(starts + corpus.row_length, ends[-1])
    borders = np.sort(np.concatenate([starts, ends]), kind="stable")  # two sorted runs: union1d takes far longer
    borders = borders[np.diff(borders, prepend=-1) > 0]
    row_of_border = np.searchsorted(starts, borders, side="right") - 1
    borders = borders[row_of_border >= 0]
    row_of_border = row_of_border[row_of_border >= 0]
    inside_row = borders < row_ends[row_of_border]
    piece_starts = borders[inside_row]
    row_of_piece = row_of_border[inside_row]
    piece_ends = np.minimum(np.append(piece_starts[1:], ends[-1]), row_ends[row_of_piece])
    places = np.searchsorted(ends, piece_starts, side="right")  # in `order`, of each piece's document
    documents = order[places]
    offsets = piece_starts - (ends[places] - corpus.lengths[documents])
    row_offsets = np.searchsorted(row_of_piece, np.arange(len(starts) + 1))
    return row_offsets, np.stack([documents, offsets, piece_ends - piece_starts], axis=1)


@dataclass(frozen=True)
class Random(Policy):
    """The rows of `RowDataset` that start in epoch 0; the last one extends into the next epochs."""

    def pack(self, corpus: Corpus) -> Packed:
        total = int(corpus.lengths.sum())
        end = -(-total // corpus.row_length) * corpus.row_length  # of the epoch's last row, in tokens
        orders = [corpus.shuffled(len(corpus.documents), epoch) for epoch in range(-(-end // total))]
        return cut_rows(corpus, np.concatenate(orders), np.arange(0, end, corpus.row_length))


@dataclass(frozen=True)
class CarryOver(Policy):
    """Continues a row's cut last document in the next row (ProLong's short part)."""

    def pack(self, corpus: Corpus) -> Packed:
        return cut_rows(corpus, corpus.shuffled(len(corpus.documents)))


@dataclass(frozen=True)
class DropTail(Policy):
    """Drops the rest of a row's cut last document, so that every row begins with a document (ProLong's SFT)."""

    def pack(self, corpus: Corpus) -> Packed:
        order = corpus.shuffled(len(corpus.documents))
        ends = np.cumsum(corpus.lengths[order])
        starts = ends - corpus.lengths[order]
        # the next row begins after the document with the last token of a full row that begins with this document
        following = (np.searchsorted(ends, starts + corpus.row_length) + 1).tolist()
        firsts = [0]
        while following[firsts[-1]] < len(order):
            firsts.append(following[firsts[-1]])
        return cut_rows(corpus, order, starts[firsts])


@dataclass(frozen=True)
class WholeDocument(Policy):
    """Cuts documents of at least L and fewer than `below` tokens into as many rows as possible (ProLong's long part).

    The remainder, shorter than L, is dropped.

        L = 4, below 12     a a a|  b b b b|b b b b|b|  c c c c|  d (12 tokens)      rows: bbbb bbbb cccc

    `below` separates the parts of a mixture, for example documents of 64K from documents of 512K. Only the first
    `rows_per_document` rows of each document are used; with 1, only its first L tokens. `join_sources` joins the
    documents of each source, in the data set's order, into one document (ProLong's textbooks, the books of a subject):

        L = 4, sources 0 0 0 1     a a a|b b b b b|c c|  d d d d d      rows: aaab bbbb dddd
    """

    below: Count = UNLIMITED
    rows_per_document: Count = UNLIMITED
    join_sources: Literal[0, 1] = 0

    def check(self, row_length: int) -> None:
        if self.below <= row_length:
            raise UserError(f"packing: below is {self.below}; needs more than the {row_length} tokens of a sequence")

    def pack(self, corpus: Corpus) -> Packed:
        order = np.arange(len(corpus.lengths))
        lengths = corpus.lengths
        if self.join_sources:
            sources = corpus.sources()
            if sources is None:
                raise UserError(
                    "packing: join_sources joins the documents of a source, but the dataset names no sources; make it "
                    f"with {program('preprocess')} --source-field FIELD"
                )
            order = np.argsort(sources, kind="stable")
            lengths = np.bincount(sources, weights=corpus.lengths).astype(np.int64)
        text_starts = np.cumsum(lengths) - lengths
        is_chosen = (lengths >= corpus.row_length) & (lengths < self.below)
        texts, starts, _ = full_pieces(np.where(is_chosen, lengths, 0), corpus.row_length).T
        is_used = starts // corpus.row_length < self.rows_per_document
        return cut_rows(corpus, order, (text_starts[texts] + starts)[is_used])


@dataclass(frozen=True)
class SplitDrop(Policy):
    """Cuts each document into its own rows and drops a shorter remainder (token weighting's PG-19)."""

    def pack(self, corpus: Corpus) -> Packed:
        pieces = full_pieces(corpus.lengths, corpus.row_length)
        return np.arange(len(pieces) + 1), pieces


@dataclass(frozen=True)
class BestFit(Policy):
    """Truncates as few documents as possible (arXiv 2404.10830).

    Documents longer than L are cut into full rows; each remainder, or shorter document, is placed whole into the row
    that it fills best, largest first. Documents of equal length, and the pieces within a row, are ordered randomly by
    the seed.
    """

    def pack(self, corpus: Corpus) -> Packed:
        full = full_pieces(corpus.lengths, corpus.row_length)
        order = corpus.shuffled(len(corpus.lengths))
        remainders = corpus.lengths[order] % corpus.row_length
        order = order[remainders > 0]
        remainders = remainders[remainders > 0]
        bins = best_fit_decreasing(remainders, corpus.row_length)
        remaining = np.stack([order, corpus.lengths[order] - remainders, remainders], axis=1)
        pieces = np.concatenate([full, remaining])
        rows = np.concatenate([np.arange(len(full)), len(full) + bins])
        by_row = np.lexsort((corpus.shuffled(len(rows), draw=1), rows))
        row_offsets = np.append(0, np.cumsum(np.bincount(rows)))
        return row_offsets, pieces[by_row]


@dataclass(frozen=True)
class UpsampleLong(Policy):
    """Repeats documents longer than `threshold` tokens in an epoch, in random order (LCDE).

    Within each source, long documents occur `factor` times, or as often as needed for a share of `long_share` of the
    source's tokens (but at least once). The sources keep their shares of all tokens: a source that grew less is
    repeated as a whole. A data set without sources counts as one source. With long_share 0.7, one source of 30 long and
    70 short tokens, and one of 50 and 50:

        source   factor                      tokens with it          repetition           tokens
        1        0.7 * 70 / (0.3 * 30) 5.44  163.3 + 70 = 233.3      1                    233.3
        2        0.7 * 50 / (0.3 * 50) 2.33  116.7 + 50 = 166.7      233.3 / 166.7        233.3

    The fractional part of a factor is realized by one more copy of that fraction of the documents, chosen by the seed.
    """

    threshold: Count = 8192
    factor: Factor = 5.0
    long_share: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def pack(self, corpus: Corpus) -> Packed:
        sources = corpus.sources()
        if sources is None:
            sources = np.zeros(len(corpus.documents), np.int64)
        is_long = corpus.lengths > self.threshold
        groups = []  # long documents of a source, or short ones, their factor, the growth of the source
        for source in range(sources.max() + 1):
            long = np.flatnonzero((sources == source) & is_long)
            short = np.flatnonzero((sources == source) & ~is_long)
            long_tokens = int(corpus.lengths[long].sum())
            short_tokens = int(corpus.lengths[short].sum())
            factor = self._factor(long_tokens, short_tokens)
            growth = (long_tokens * factor + short_tokens) / (long_tokens + short_tokens)
            groups += [(long, factor, growth), (short, 1.0, growth)]
        largest_growth = max(growth for *_, growth in groups)
        copies = np.empty(len(corpus.lengths), dtype=np.int64)
        for draw, (documents, factor, growth) in enumerate(groups, start=1):
            whole, fraction = divmod(factor * (largest_growth / growth), 1)
            # Factor 2.25: two copies of each document, and a third copy of a quarter of them.
            copies[documents] = int(whole)
            shuffled = documents[corpus.shuffled(len(documents), draw)]
            copies[shuffled[: round(fraction * len(documents))]] += 1
        documents = np.repeat(np.arange(len(copies)), copies)
        return cut_rows(corpus, documents[corpus.shuffled(len(documents))])

    def _factor(self, long_tokens: int, short_tokens: int) -> float:
        """Return how often the long documents of a source occur before it is repeated as a whole."""
        if not self.long_share:
            return self.factor
        if not long_tokens:
            return 1.0
        return max(self.long_share * short_tokens / ((1 - self.long_share) * long_tokens), 1.0)


@dataclass(frozen=True)
class Bm25(Policy):
    """Orders documents so that similar ones are adjacent, with rows as in `carry_over` (SkyLadder's semantic packing).

    The shuffled documents are divided into blocks of up to `block_documents` N, each ordered greedily from its first
    document: next is the nearest unused document by BM25 over the token ids of each one's `first_tokens`. The query is
    the rarest ids of the current document, as many as occur in at most N documents in total; if no unused document has
    any, the first unused one is next. A step takes O(N) time: larger blocks find nearer documents at a higher cost.
    """

    first_tokens: Count = 512
    block_documents: Count = 131072

    def pack(self, corpus: Corpus) -> Packed:
        return cut_rows(corpus, self.order(corpus, corpus.shuffled(len(corpus.documents))))

    def order(self, corpus: Corpus, shuffled: Int64) -> Int64:
        orders = []
        blocks = -(-len(shuffled) // self.block_documents)
        for block in np.array_split(shuffled, blocks):
            documents = corpus.documents[block].tolist()
            lengths = np.minimum(corpus.lengths[block], self.first_tokens).tolist()
            texts = [
                corpus.source.read(document, 0, length) for document, length in zip(documents, lengths, strict=True)
            ]
            orders.append(block[_walk(texts)])
        return np.concatenate(orders)


def _walk(texts: list[np.ndarray]) -> Int64:
    size = len(texts)
    vocabulary, ids = np.unique(np.concatenate(texts), return_inverse=True)
    borders = np.cumsum([len(text) for text in texts])[:-1]
    terms = np.split(ids, borders)
    distinct = [np.unique(ids) for ids in terms]
    spread = np.bincount(np.concatenate(distinct), minlength=len(vocabulary))  # documents of each term
    index = optional_module("packing: bm25", "bm25s").BM25(backend="numpy", csc_backend="numpy")
    corpus = ([ids.tolist() for ids in terms], {term: term for term in range(len(vocabulary))})
    index.index(corpus, create_empty_token=False, show_progress=False)

    unused = np.ones(size, dtype=np.float32)
    order = np.zeros(size, dtype=np.int64)
    following = 0
    for step in range(1, size):
        current = int(order[step - 1])
        unused[current] = 0  # masks its score; the index itself is never changed
        terms_of_current = distinct[current]
        # terms of only this document, or of all, carry no information
        is_useful = (spread[terms_of_current] > 1) & (spread[terms_of_current] < size)
        useful = terms_of_current[is_useful]
        rarest = useful[np.argsort(spread[useful], kind="stable")]
        # the cost of a step is the number of documents with the query's terms: at most N
        query = rarest[np.cumsum(spread[rarest]) <= size]
        scores = index.get_scores_from_ids(query, weight_mask=unused)
        nearest = int(scores.argmax())
        if scores[nearest] <= 0:
            while not unused[following]:  # never goes back, so all steps together are linear
                following += 1
            nearest = following
        order[step] = nearest
    return order


@dataclass(frozen=True)
class Decomposition(Policy):
    """Creates rows of pieces of equal size, in the order of a curriculum (Dataset Decomposition, arXiv 2405.13226).

    A document is cut by the binary digits of its length, see `decompose`; pieces of one size are shuffled, and L / size
    of them fill a row. The order of the rows grows from short to long pieces `cycles` times, see `curriculum`; each
    `batch_rows` consecutive rows have pieces of one size: the paper's batches, if it equals the global batch size.
    `rows` is the number of rows that a run reads, if less than an epoch: the rows are then reduced proportionally for
    every size, because otherwise the run would end before the long pieces. Dropped are a document's last tokens, fewer
    than `shortest`, and the pieces that fill no row or batch or exceed their share.
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
            raise UserError(f"packing: shortest is {self.shortest}; needs at most the {row_length} tokens of a row")

    def pack(self, corpus: Corpus) -> Packed:
        buckets = decompose(corpus.lengths, self.shortest, corpus.row_length)
        pieces_per_row = [1 << power for power in reversed(range(len(buckets)))]
        batches = [
            len(pieces) // (per_row * self.batch_rows) for pieces, per_row in zip(buckets, pieces_per_row, strict=True)
        ]
        batches = even_share(batches, self.rows // self.batch_rows)
        draws = [corpus.uniform(count, draw) for draw, count in enumerate(batches)]
        bucket_of_row = np.repeat(curriculum(batches, draws, self.growth, self.cycles), self.batch_rows)
        chosen = []
        rows = []
        for number, (pieces, per_row) in enumerate(zip(buckets, pieces_per_row, strict=True)):
            rows_of_bucket = np.repeat(np.flatnonzero(bucket_of_row == number), per_row)
            shuffled = pieces[corpus.shuffled(len(pieces), number)]
            chosen.append(shuffled[: len(rows_of_bucket)])
            rows.append(rows_of_bucket)
        row_of_piece = np.concatenate(rows)
        row_offsets = np.append(0, np.cumsum(np.bincount(row_of_piece, minlength=len(bucket_of_row))))
        return row_offsets, np.concatenate(chosen)[np.argsort(row_of_piece, kind="stable")]


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
if TYPE_CHECKING:
    Packing = str
else:  # --help and the JSON schema list the names
    Packing = Literal[tuple(POLICIES)]


def check_options(policy: str, options: Options, row_length: int) -> Policy:
    """Return the policy with these options; raise UserError for an unknown one or an invalid value."""
    if policy not in POLICIES:
        raise UserError(f"packing: there is no policy {policy!r}; choose one of {', '.join(POLICIES)}")
    kind = POLICIES[policy]
    names = [option.name for option in fields(kind)]
    if kind is Random:  # reads no plan to filter
        names = []
    for name in options:
        if name not in names:
            raise UserError(f"packing: {policy} has no option {name!r}; it takes {', '.join(names) or 'none'}")
    chosen = typed(dict(options), kind, "packing")
    if options.get("long_share") and "factor" in options:
        raise UserError("packing: factor beside long_share, which gives each source its own; leave one of them out")
    chosen.check(row_length)
    return chosen


def plan_key(
    policy: str,
    source: IndexedSource,
    documents: Documents,
    row_length: int,
    seed: int,
    options: Options | None = None,
    cache: Path | None = None,
) -> PlanKey:
    """Return the key of the plan that `build_plan` creates from the same arguments; raises as `check_options`.

    `cache` is passed to `fingerprint`.
    """
    chosen = check_options(policy, options or {}, row_length)
    return PlanKey(policy, row_length, seed, chosen.options, fingerprint(source, documents, cache))


def build_plan(
    policy: str, source: IndexedSource, documents: Documents, row_length: int, seed: int, options: Options | None = None
) -> PackingPlan:
    """Pack `documents` (empty ones are ignored) into rows of `row_length` tokens.

    `random` gives the rows that start in epoch 0 of `RowDataset`, for reports only; training reads `RowDataset`. Raises
    UserError for invalid options, no tokens, or no row.
    """
    key = plan_key(policy, source, documents, row_length, seed, options)
    chosen, lengths = nonempty(source, documents)
    row_offsets, pieces = POLICIES[policy](**key.options).pack(Corpus(source, chosen, lengths, row_length, seed))
    if len(row_offsets) == 1:
        raise UserError(
            f"packing: {policy} makes no row of {row_length} tokens of these {len(chosen)} documents, the longest of "
            f"which has {lengths.max()}; use a smaller row length, longer documents, or another policy"
        )
    pieces[:, 0] = chosen[pieces[:, 0]]  # policies index the non-empty documents, plans index all of them
    return PackingPlan(key, row_offsets, pieces, int(pieces[:, 2].sum()))
