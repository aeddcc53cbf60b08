"""The run's rows: the datasets of `--data-path`, blended and split, and the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from megatron_ext.attention.exchange import ContextGroup, Traffic
from megatron_ext.attention.interface import Scheme
from megatron_ext.batch import ContextOptions, PackedBatch, pack
from megatron_ext.config import Config
from megatron_ext.data.dataset import BlendedRows, RowDataset, TokenRow, parse_blend, split_documents
from megatron_ext.engine.indexed_dataset import IndexedSource
from megatron_ext.engine.parallel import Ranks
from megatron_ext.errors import UserError
from megatron_ext.masks import MaskOptions

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
        return _one_at_a_time(BlendedRows(datasets, weights).row if len(datasets) > 1 else datasets[0].row)

    if not config.training.eval_interval:
        return Rows(blend(0), None)
    for prefix, documents in zip(prefixes, splits, strict=True):
        if not len(documents[1]):
            raise UserError(
                f"split: got {data.split!r}, which leaves no document of {prefix} for validation; "
                "raise the second share or use --eval-interval 0"
            )
    return Rows(blend(0), blend(1))


def _one_at_a_time(row_at: RowAt) -> RowAt:
    """Data sets remember the orders of their epochs: not for two threads at once."""
    lock = Lock()

    def locked(sample: int) -> TokenRow:
        with lock:
            return row_at(sample)

    return locked


def context_options(config: Config, ranks: Ranks, traffic: Traffic, *, on_cuda: bool) -> ContextOptions | None:
    """How rows are shared out over context-parallel ranks; None where each process holds whole rows."""
    if ranks.context_size == 1:
        return None
    scheme = config.parallel.cp_scheme
    parts = config.parallel.cp_overlap_parts or (2 if on_cuda else 1)  # without a second stream nothing overlaps
    return ContextOptions(
        group=ContextGroup(ranks.context, ranks.context_size, ranks.context_group, traffic, parts),
        policy=config.parallel.cp_policy,
        scheme=None if scheme == "auto" else Scheme(scheme),
        heads=config.model.num_attention_heads // ranks.tensor_size,
        key_heads=config.model.num_query_groups // ranks.tensor_size,
        row_cost=config.parallel.cp_row_cost,
    )


def microbatches(
    row_at: RowAt,
    first_sample: int,
    config: Config,
    ranks: Ranks,
    context: ContextOptions | None,
    window: int,
    masks: MaskOptions | None = None,
) -> list[PackedBatch]:
    """This rank's micro-batches of the global batch that begins at `first_sample`, by default under its own masks."""
    masks = masks or config.mask_options()
    size = config.data.micro_batch_size
    batches = []
    for number in range(config.microbatches(ranks.world_size)):
        first = first_sample + (number * ranks.data_size + ranks.data) * size
        rows = [row_at(first + row) for row in range(size)]
        batches.append(pack(rows, window, masks, context))
    return batches
