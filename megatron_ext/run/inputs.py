"""Open all inputs of a run before processes wait for each other, so that bad input is refused immediately."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint.folders import Checkpoint, end_of_samples, find_checkpoint
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config
from megatron_ext.data.rows.identity import open_scores, vocabulary
from megatron_ext.data.text.metadata import bos_of
from megatron_ext.run.rows import Rows, open_rows
from megatron_ext.token_weighting.store import ScoreStore


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run."""

    checkpoint: Checkpoint | None  # to resume from; None for a new run
    vocab_size: int
    rows: Rows
    scores: ScoreStore | None  # of a frozen scorer
    pretrained: Pretrained | None  # initial weights of a new run; None for random weights
    bos_id: int | None = None  # the token at the start of the data's documents


def open_inputs(config: Config, *, pretrained: bool = True) -> Inputs:
    """Open the inputs of a run or a stage; `pretrained` is False if its initial weights do not exist yet.

    Raises:
        UserError: a checkpoint, tokenizer, data, plan, scores or weights that the configuration cannot use.
    """
    checkpoint = find_checkpoint(config)
    vocab_size = vocabulary(config)
    return Inputs(
        checkpoint=checkpoint,
        vocab_size=vocab_size,
        rows=open_rows(config, vocab_size),
        scores=open_scores(config, vocab_size, end_of_samples(config, checkpoint)),
        pretrained=first_weights(config, vocab_size) if pretrained and checkpoint is None else None,
        bos_id=bos_of(part.prefix for part in config.data.parts),
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
    if options.init_optimizer:
        pretrained.with_optimizer()
    return pretrained
