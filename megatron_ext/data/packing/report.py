"""Report what a packing plan keeps, cuts and pads, counted from its pieces."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_ext.data.indexed import Documents, IndexedSource, nonempty
from megatron_ext.data.packing.plan import PackingPlan
from megatron_ext.layout import segment_pairs


@dataclass(frozen=True)
class PackingReport:
    """Counts of one epoch of a plan, without label tokens.

    row_tokens = kept_tokens + repeated_tokens + padding_tokens
    """

    documents: int  # of the split, without empty ones
    tokens: int  # of the split
    rows: int
    row_tokens: int
    kept_tokens: int  # tokens of the split that occur in a row at least once; further occurrences are `repeated_tokens`
    repeated_tokens: int
    dropped_documents: int  # documents without kept tokens
    truncated_documents: int  # documents with a kept piece that is not the whole document
    padding_tokens: int  # positions of rows without a token
    mean_context: float  # mean of the keys that a token may see with a document mask, itself included; without padding


def report(plan: PackingPlan, source: IndexedSource, documents: Documents) -> PackingReport:
    """Return the report of a plan for the documents of the split."""
    chosen, lengths = nonempty(source, np.unique(np.asarray(documents, dtype=np.int64)))
    pieces, every_length = np.asarray(plan.pieces), np.asarray(source.document_lengths)
    row_tokens, placed = plan.rows * plan.row_length, plan.tokens
    whole = pieces[:, 2] == every_length[pieces[:, 0]]

    # kept tokens: the union of the pieces, as intervals in the concatenation of all documents
    starts = (np.cumsum(every_length) - every_length)[pieces[:, 0]] + pieces[:, 1]
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + pieces[:, 2])[order]
    covered = np.maximum.accumulate(np.concatenate([[0], ends[:-1]]))  # end of the part covered by earlier pieces
    kept = int(np.maximum(ends - np.maximum(starts, covered), 0).sum())

    # the tokens of a text of n see 1 .. n keys
    texts = np.add.reduceat(pieces[:, 2], plan.row_offsets[:-1]) if plan.joined else pieces[:, 2]
    sizes, counts = np.unique(texts, return_counts=True)
    return PackingReport(
        documents=len(chosen),
        tokens=int(lengths.sum()),
        rows=plan.rows,
        row_tokens=row_tokens,
        kept_tokens=kept,
        repeated_tokens=placed - kept,
        dropped_documents=len(chosen) - len(np.unique(pieces[:, 0])),
        truncated_documents=len(np.unique(pieces[~whole, 0])),
        padding_tokens=row_tokens - placed,
        mean_context=float((segment_pairs(sizes) * counts).sum() / placed),
    )


def describe(reports: Mapping[str, PackingReport]) -> str:
    """Return a table with a line for each named report."""
    lines = [
        f"{'':<15} {'kept':>7} {'repeated':>9} {'truncated':>10} {'dropped':>8} {'padding':>8} {'mean keys':>10} rows"
    ]
    for name, made in reports.items():
        lines.append(
            f"{name:<15} {made.kept_tokens / made.tokens:>7.1%} {made.repeated_tokens / made.tokens:>9.1%} "
            f"{made.truncated_documents / made.documents:>10.1%} {made.dropped_documents / made.documents:>8.1%} "
            f"{made.padding_tokens / made.row_tokens:>8.2%} {made.mean_context:>10,.0f} {made.rows:,}"
        )
    lines.append("kept, repeated: of the tokens; truncated, dropped: of the documents; padding: of the rows' tokens")
    return "\n".join(lines)
