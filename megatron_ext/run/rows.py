"""Open the datasets of `--data-path` or a mixture, split, packed and blended; rows are read on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_ext.config import Config
from megatron_ext.data.packing import PackedRows, PlanKey, load_plan, plan_key
from megatron_ext.data.rows.blend import BlendedRows, LaidSequences
from megatron_ext.data.rows.dataset import RowDataset, RowSource, TokenRow, part_seed
from megatron_ext.data.rows.mixture import MixturePart
from megatron_ext.data.rows.splits import split_documents
from megatron_ext.engine.indexed_dataset import IndexedSource
from megatron_ext.errors import UserError

RowAt = Callable[[int], TokenRow]
TRAINING, VALIDATION = 0, 1  # indices into the shares of `--split`


@dataclass(frozen=True)
class Rows:
    """Rows by sample index."""

    train: RowAt
    valid: RowAt | None  # None if the run never validates
    mixed: BlendedRows | None = None  # of training; None for a single dataset


@dataclass(frozen=True)
class Split:
    """The documents of one part of the mixture that are used for training, or for validation."""

    part: MixturePart
    source: IndexedSource
    documents: range
    length: int  # tokens of a packed sequence
    seed: int  # of the sequences' order

    def plan_key(self) -> PlanKey:
        """Return the values that determine the packing plan of these documents; reads all their lengths."""
        return plan_key(self.part.packing, self.source, self.documents, self.length, self.seed, self.part.options)


def open_part(config: Config, vocab_size: int, share: int, index: int) -> Split:
    """Open one part of the mixture, by its index, for training (share 0) or validation (share 1).

    A separate validation set (`valid_data_path`) has its own parts, of which all documents are used.

    Raises:
        UserError: a dataset that cannot be read, or no document for validation.
    """
    data = config.data
    part = parts_of(config, share)[index]
    weighted = config.weighting.token_weighting == "dataset" and share == TRAINING
    source = IndexedSource(part.prefix, vocab_size, weighted=weighted)
    if share == VALIDATION and data.valid_data_path:
        documents = range(len(source.document_lengths))
    else:
        documents = split_documents(len(source.document_lengths), data.split)[share]
    if share == VALIDATION and not len(documents):
        raise UserError(
            f"split: got {data.split!r}, which leaves no document of {part.prefix} for validation; "
            "raise the second share, give --valid-data-path or use --eval-interval 0"
        )
    if share == VALIDATION and config.training.eval_packing == "random":
        part = replace(part, packing="random", packing_options=())
    seed = part_seed(config.training.seed, index)
    return Split(part=part, source=source, documents=documents, length=part.length or data.seq_length, seed=seed)


def splits(config: Config, vocab_size: int, share: int) -> list[Split]:
    """Open all parts of the mixture for training (share 0) or validation (share 1).

    Raises:
        UserError: a dataset that cannot be read, or one without documents for validation.
    """
    return [open_part(config, vocab_size, share, index) for index in range(len(parts_of(config, share)))]


def parts_of(config: Config, share: int) -> tuple[MixturePart, ...]:
    """List the datasets of training (share 0) or validation (share 1)."""
    return config.data.valid_parts if share == VALIDATION else config.data.parts


def open_rows(config: Config, vocab_size: int) -> Rows:
    """Open the datasets.

    Raises:
        UserError: a dataset that cannot be read, a required split without documents, or a packing plan that has not
            been made.
    """

    def blend(share: int) -> RowSource:
        row_length, parts = config.data.seq_length, parts_of(config, share)
        sources: list[RowSource] = []
        for split in splits(config, vocab_size, share):
            sequences = open_split(split, config)
            sources.append(sequences if split.length == row_length else LaidSequences(sequences, row_length))
        if len(sources) == 1:
            return sources[0]
        return BlendedRows(sources, [part.weight for part in parts], [part.label for part in parts])

    train = blend(TRAINING)
    valid = blend(VALIDATION).row if config.training.eval_interval else None
    return Rows(train.row, valid, train if isinstance(train, BlendedRows) else None)


def open_split(split: Split, config: Config) -> RowDataset | PackedRows:
    """Open the packed sequences of a split.

    Raises:
        UserError: a packing plan that has not been made, or does not fit.
    """
    mask_eod = config.data.eod_mask_loss
    if split.part.packing == "random":
        return RowDataset(split.source, split.documents, split.length, split.seed, mask_eod=mask_eod)
    plan = load_plan(split.part.prefix, split.plan_key())
    return PackedRows(split.source, plan, split.seed, mask_eod=mask_eod)


def needed_tokens(config: Config, part: MixturePart, rows: int) -> float:
    """Return how many tokens of this part of the mixture a number of rows requires."""
    return rows * config.data.seq_length * part.weight / sum(other.weight for other in config.data.parts)
