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
    document_lengths = np.asarray(source.document_lengths)
    document, first, tokens = np.asarray(plan.pieces).T
    is_cut = tokens != document_lengths[document]

    # kept tokens: the union of the pieces, as intervals in the concatenation of all documents
    starts = (np.cumsum(document_lengths) - document_lengths)[document] + first
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = starts + tokens[order]
    covered = np.maximum.accumulate(np.concatenate([[0], ends[:-1]]))  # end of the part covered by earlier pieces
    kept = int(np.maximum(ends - np.maximum(starts, covered), 0).sum())

    # the tokens of a text of n see 1 .. n keys
    texts = tokens
    if plan.joined:
        texts = np.add.reduceat(tokens, plan.row_offsets[:-1])
    sizes, counts = np.unique(texts, return_counts=True)
    row_tokens = plan.rows * plan.row_length
    return PackingReport(
        documents=len(chosen),
        tokens=int(lengths.sum()),
        rows=plan.rows,
        row_tokens=row_tokens,
        kept_tokens=kept,
        repeated_tokens=plan.tokens - kept,
        dropped_documents=len(chosen) - len(np.unique(document)),
        truncated_documents=len(np.unique(document[is_cut])),
        padding_tokens=row_tokens - plan.tokens,
        mean_context=float((segment_pairs(sizes) * counts).sum() / plan.tokens),
    )


def describe(reports: Mapping[str, PackingReport]) -> str:
    """Return a table with a line for each named report."""
    lines = ["                   kept  repeated  truncated  dropped  padding  mean keys rows"]
    for name, counts in reports.items():
        kept = counts.kept_tokens / counts.tokens
        repeated = counts.repeated_tokens / counts.tokens
        truncated = counts.truncated_documents / counts.documents
        dropped = counts.dropped_documents / counts.documents
        padding = counts.padding_tokens / counts.row_tokens
        lines.append(
            f"{name:<15} {kept:>7.1%} {repeated:>9.1%} {truncated:>10.1%} {dropped:>8.1%} {padding:>8.2%} "
            f"{counts.mean_context:>10,.0f} {counts.rows:,}"
        )
    lines.append("kept, repeated: of the tokens; truncated, dropped: of the documents; padding: of the rows' tokens")
    return "\n".join(lines)
