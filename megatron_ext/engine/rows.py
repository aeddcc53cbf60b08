"""The run's rows: the datasets of `--data-path`, blended and split, and the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.attention.exchange import ContextGroup, Traffic
from megatron_ext.attention.interface import Scheme
from megatron_ext.batch import ContextOptions, PackedBatch, pack
from megatron_ext.config import Config
from megatron_ext.data.dataset import BlendedRows, RowDataset, TokenRow, parse_blend, split_documents
from megatron_ext.engine.indexed_dataset import IndexedSource
from megatron_ext.engine.parallel import Ranks
from megatron_ext.errors import UserError

RowAt = Callable[[int], TokenRow]


@dataclass(frozen=True)
class Rows:
    """Row by sample index, for training and (where the split has documents for it) for validation."""

    train: RowAt
    valid: RowAt | None


def open_rows(config: Config, vocab_size: int) -> Rows:
    """Open the datasets.

    Raises:
        UserError: a dataset that cannot be read, or a split without documents that is needed.
    """
    data = config.data
    weights, prefixes = parse_blend(data.data_path)
    sources = [IndexedSource(prefix, vocab_size) for prefix in prefixes]
    splits = [split_documents(len(source.document_lengths), data.split) for source in sources]

    def blend(part: int) -> RowAt:
        datasets = [
            RowDataset(
                source,
                documents[part],
                data.seq_length,
                config.training.seed + number,
                mask_eod=data.eod_mask_loss,
            )
            for number, (source, documents) in enumerate(zip(sources, splits, strict=True))
        ]
        return BlendedRows(datasets, weights).row if len(datasets) > 1 else datasets[0].row

    if not config.training.eval_interval:
        return Rows(blend(0), None)
    for prefix, documents in zip(prefixes, splits, strict=True):
        if not len(documents[1]):
            raise UserError(
                f"split: got {data.split!r}, which leaves no document of {prefix} for validation; "
                "raise the second share or use --eval-interval 0"
            )
    return Rows(blend(0), blend(1))


def context_options(config: Config, ranks: Ranks, traffic: Traffic) -> ContextOptions | None:
    """How rows are shared out over context-parallel ranks; None where each process holds whole rows."""
    if ranks.context_size == 1:
        return None
    scheme = config.parallel.cp_scheme
    return ContextOptions(
        group=ContextGroup(ranks.context, ranks.context_size, ranks.context_group, traffic),
        policy=config.parallel.cp_policy,
        scheme=None if scheme == "auto" else Scheme(scheme),
        heads=config.model.num_attention_heads // ranks.tensor_size,
        key_heads=config.model.num_query_groups // ranks.tensor_size,
    )


def microbatches(
    row_at: RowAt, first_sample: int, config: Config, ranks: Ranks, context: ContextOptions | None, window: int
) -> list[PackedBatch]:
    """This rank's micro-batches of the global batch that begins at `first_sample`."""
    size = config.data.micro_batch_size
    batches = []
    for number in range(config.microbatches(ranks.world_size)):
        first = first_sample + (number * ranks.data_size + ranks.data) * size
        rows = [row_at(first + row) for row in range(size)]
        batches.append(pack(rows, window, config.window.document_mask, context))
    return batches
