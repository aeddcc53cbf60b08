"""Open all inputs of a run before processes wait for each other, so that bad input is refused immediately.

The datasets of `--data-path` or a mixture are split, packed and blended; rows are read on demand.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.checkpoint.folders import Checkpoint, end_of_samples, find_checkpoint
from megatron_ext.checkpoint.hf.config import rope_changes
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config, ModelConfig
from megatron_ext.config.mixture import MixturePart, split_documents
from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.packing.plan import PlanKey, load_plan
from megatron_ext.data.packing.policies import plan_key
from megatron_ext.data.row import RowSource, TokenRow
from megatron_ext.data.rows.blend import BlendedRows, LaidSequences, scaled
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.rows.packed import PackedRows
from megatron_ext.errors import UserError
from megatron_ext.files.fingerprint import fingerprint
from megatron_ext.launch import is_first
from megatron_ext.run.identity import bos_of, checked_vocab_size, data_fingerprint, open_scores
from megatron_ext.token_weighting.store import ScoreStore

RowAt = Callable[[int], TokenRow]
TRAINING = 0  # indices into the shares of `--split`
VALIDATION = 1


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run."""

    checkpoint: Checkpoint | None  # to resume from; None for a new run
    vocab_size: int
    train: RowSource
    valid: RowSource | None  # None if the run never validates
    scores: ScoreStore | None  # of a frozen scorer
    pretrained: Pretrained | None  # initial weights of a new run; None for random weights
    bos_id: int | None  # the token at the start of the data's documents


def open_inputs(config: Config, *, pretrained: bool = True) -> Inputs:
    """Open the inputs of a run or a stage; `pretrained` is False if its initial weights do not exist yet.

    Raises:
        UserError: an input that the configuration cannot use.
    """
    checkpoint = find_checkpoint(config)
    vocab_size = checked_vocab_size(config)
    train = open_rows(config, vocab_size)
    valid = None
    if config.training.eval_interval:
        valid = open_rows(config, vocab_size, VALIDATION)
    scores = open_scores(config, vocab_size, end_of_samples(config, checkpoint))
    weights = None
    if pretrained and checkpoint is None:
        weights = first_weights(config, vocab_size)
    return Inputs(
        checkpoint=checkpoint,
        vocab_size=vocab_size,
        train=train,
        valid=valid,
        scores=scores,
        pretrained=weights,
        bos_id=bos_of(config),
    )


def first_weights(config: Config, vocab_size: int) -> Pretrained | None:
    """Find the initial weights, and if requested the optimizer's state, of a new run; None for random weights.

    Raises:
        UserError: `init_from` contains no model, one of other shapes, or no optimizer's state.
    """
    options = config.checkpoint
    if options.init_from is None:
        return None
    pretrained = Pretrained.find(Path(options.init_from))
    pretrained.check_shapes(config.model, vocab_size)
    if options.init_optimizer and pretrained.checkpoint is None:
        raise UserError(
            f"init_optimizer: {pretrained.folder} is a Hugging Face folder, which has no optimizer state; "
            "give a run or a checkpoint, or leave --init-optimizer out"
        )
    return pretrained


def describe_weights(pretrained: Pretrained, model: ModelConfig) -> Iterator[str]:
    """Yield lines that name initial weights, and what of their rotary angles differs from the run's."""
    yield f"weights from {pretrained.folder}"
    angles = rope_changes(pretrained.model, model)
    if angles:
        yield f"this run rotates other angles than these weights were trained with: {', '.join(angles)}"


@dataclass(frozen=True)
class Split:
    """The documents of one part of the mixture that are used for training, or for validation."""

    part: MixturePart
    source: IndexedSource
    documents: range
    length: int  # tokens of a packed sequence
    seed: int  # of the sequences' order
    cache: Path | None  # the folder that keeps orders

    def plan_key(self) -> PlanKey:
        """Return the values that determine the packing plan of these documents; may read all their lengths."""
        part = self.part
        return plan_key(
            part.packing, self.source, self.documents, self.length, self.seed, part.options, cache=self.cache
        )


def open_part(config: Config, vocab_size: int, share: int, index: int) -> Split:
    """Open one part of the mixture, by its index, for training (share 0) or validation (share 1).

    A separate validation set (`valid_data_path`) has its own parts, of which all documents are used.

    Raises:
        UserError: a dataset that cannot be read, or no document for validation.
    """
    data = config.data
    validates = share == VALIDATION
    part = _parts(config, share)[index]
    weighted = config.weighting.token_weighting == "dataset" and not validates
    source = IndexedSource(part.prefix, vocab_size, weighted=weighted)
    documents = range(source.document_count)
    if not validates or not data.valid_data_path:
        documents = split_documents(source.document_count, data.split)[share]
    if validates:
        if not documents:
            raise UserError(
                f"split: got {data.split!r}, which leaves no document of {part.prefix} for validation; "
                "raise the second share, give --valid-data-path or use --eval-interval 0"
            )
        if config.training.eval_packing == "random":
            part = replace(part, packing="random", packing_options=())
        part = part.unfiltered()
    seed = (config.training.seed + index) % 2**64  # each part has its own order
    return Split(
        part=part,
        source=source,
        documents=documents,
        length=part.length or data.seq_length,
        seed=seed,
        cache=order_folder(config, part.prefix),
    )


def _parts(config: Config, share: int) -> Sequence[MixturePart]:
    if share == VALIDATION:
        return config.data.valid_parts
    return config.data.parts


def splits(config: Config, vocab_size: int, share: int) -> list[Split]:
    """Open all parts of the mixture for training (share 0) or validation (share 1), as `open_part`."""
    return [open_part(config, vocab_size, share, index) for index in range(len(_parts(config, share)))]


def open_rows(config: Config, vocab_size: int, share: int = TRAINING) -> RowSource:
    """Open the datasets of training or validation. Raises what `open_part` and `open_split` raise."""
    row_length = config.data.seq_length
    opened = splits(config, vocab_size, share)
    sources: list[RowSource] = []
    for split in opened:
        rows: RowSource = open_split(split, config)
        if split.length != row_length:
            rows = LaidSequences(rows, row_length)
        sources.append(rows)
    if len(sources) == 1:
        return sources[0]
    return BlendedRows(sources, [split.part.weight for split in opened], [split.part.label for split in opened])


def validation_setting(config: Config, vocab_size: int) -> str:
    """Return a fingerprint of what a validation measures at its longest context, besides the model.

    Losses of validations with the same fingerprint are comparable. Raises what `open_part` raises.
    """
    data = config.data
    training = config.training
    length = max(training.eval_lengths, default=data.seq_length)
    stride = None
    if length < data.seq_length:
        stride = training.eval_stride
    opened = splits(config, vocab_size, VALIDATION)
    weights = scaled([split.part.weight for split in opened])
    facts: list[object] = [data.seq_length, data.global_batch_size, data.eod_mask_loss]
    facts += [training.eval_iters, length, stride, training.eval_document_mask]
    for split, weight in zip(opened, weights, strict=True):
        facts += [data_fingerprint(split.part.prefix), split.documents, split.length, split.seed, weight]
        facts += [split.part.packing, split.part.packing_options]
    return fingerprint(repr(facts))[:16]


def open_split(split: Split, config: Config) -> RowDataset | PackedRows:
    """Open the packed sequences of a split; raise UserError for a plan that has not been made, or does not fit."""
    mask_eod = config.data.eod_mask_loss
    if split.part.packing == "random":
        return RowDataset(
            split.source,
            split.documents,
            split.length,
            split.seed,
            mask_eod=mask_eod,
            cache=split.cache,
            prepares=is_first(),
        )
    plan = load_plan(split.part.prefix, split.plan_key())
    return PackedRows(split.source, plan, split.seed, mask_eod=mask_eod, cache=split.cache)


def order_folder(config: Config, prefix: str) -> Path | None:
    """Return the folder that keeps the orders of a data set's documents; None if no folder can be written.

    It is `data_cache_path`, else beside the data set, else beside the run.
    """
    if config.data.data_cache_path is not None:
        return Path(config.data.data_cache_path)
    folders = [Path(f"{prefix}.order")]
    if config.checkpoint.save is not None:
        folders.append(Path(config.checkpoint.save) / "order")
    for folder in folders:
        nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if os.access(nearest, os.W_OK):
            return folder
    return None
