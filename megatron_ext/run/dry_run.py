"""`--dry-run`: check and describe a run without training, process groups or a device."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ext.checkpoint.folders import end_of_samples, find_checkpoint
from megatron_ext.cli import program
from megatron_ext.config import Config
from megatron_ext.config.stages import Stage
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.text.tokenizer import Tokenizer, ids_without_rows, vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.planning.run_plan import describe
from megatron_ext.run.identity import checked_vocab_size, open_scores
from megatron_ext.run.inputs import TRAINING, VALIDATION, describe_weights, first_weights, open_part, open_split

MISSING = "missing          "


def dry_run(stages: Sequence[Stage], world_size: int, *, strict: bool) -> None:
    """Describe each stage; raise UserError if it cannot run or, with `strict`, if its data is missing here."""
    missing = []
    for number, stage in enumerate(stages):
        if stage.name is not None:
            if number > 0:
                print()
            print(f"stage            {stage.name}, {number + 1} of {len(stages)}")
        vocab_size = vocabulary_size(stage.config.model.vocab_size, stage.config.data.tokenizer_model)
        inputs = list(look_at_inputs(stage, vocab_size))
        for line in [*describe(stage.config, world_size, vocab_size), *inputs]:
            print(line)
        missing += [line.removeprefix(MISSING) for line in inputs if line.startswith(MISSING)]
    if strict and missing:
        raise UserError("\n".join(missing))


def look_at_inputs(stage: Stage, vocab_size: int) -> Iterator[str]:
    """Check the inputs that are present here as training would, and yield a line for each dataset and missing input."""
    config = stage.config
    checkpoint = find_checkpoint(config)
    finished = checkpoint is not None and checkpoint.manifest.step == config.training.train_iters
    tokenizer = config.data.tokenizer_model
    if tokenizer not in (None, "bytes") and not Path(tokenizer).exists():
        yield f"{MISSING}tokenizer_model: {tokenizer} does not exist"
    elif tokenizer is not None and not finished:
        checked_vocab_size(config)
        yield from (f"tokenizer        {line}" for line in ids_without_rows(Tokenizer(tokenizer), vocab_size))
    store = config.weighting.score_store
    if store is not None and not Path(store).exists():
        yield f"{MISSING}score_store: {store} does not exist; make it with {program('score')}"
    elif not finished and all(Path(f"{part.prefix}.bin").is_file() for part in config.data.parts):
        open_scores(config, vocab_size, end_of_samples(config, checkpoint))
    weights = config.checkpoint.init_from
    if stage.before is None and weights is not None:
        if not Path(weights).exists():
            yield f"{MISSING}init_from: {weights} does not exist"
        elif checkpoint is None:
            pretrained = first_weights(config, vocab_size)
            assert pretrained is not None
            yield from (f"init_from        {line}" for line in describe_weights(pretrained, config.model))
    yield from _data_lines(config, vocab_size)


def _data_lines(config: Config, vocab_size: int) -> Iterator[str]:
    """Describe the parts of the mixture for training and how often the run reads them; yield what is missing."""
    data = config.data
    validates = config.training.eval_interval > 0
    parts_by_share = {TRAINING: data.parts}
    if validates and data.valid_data_path:
        parts_by_share[VALIDATION] = data.valid_parts
    for share, parts in parts_by_share.items():
        for index, part in enumerate(parts):
            absent = [f"{part.prefix}{end}" for end in (".idx", ".bin") if not Path(f"{part.prefix}{end}").is_file()]
            if absent:
                yield f"{MISSING}data: {absent[0]} does not exist; make it with {program('preprocess')}"
                continue
            try:
                split = open_part(config, vocab_size, share, index)
                rows = open_split(split, config)
                if validates and not data.valid_data_path:
                    open_split(open_part(config, vocab_size, VALIDATION, index), config)
            except UserError as error:
                yield f"{MISSING}{error}"
                continue
            if share != TRAINING:
                continue
            share_of_tokens = part.weight / sum(other.weight for other in parts)
            needed = (config.samples - data.first_sample) * data.seq_length * share_of_tokens
            tokens = rows.tokens_per_epoch if isinstance(rows, RowDataset) else rows.plan.tokens
            yield (
                f"data             {part.prefix}: {len(split.documents):,} documents, {tokens:,} tokens to train on; "
                f"{needed:,.0f} needed: {needed / tokens:.2f} epochs"
            )
