"""Open everything that a run reads, before any process waits for another, so that bad input is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint.folders import Checkpoint
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.checkpoint.runs import end_of_samples, find_checkpoint
from megatron_ext.config import Config
from megatron_ext.data.rows.identity import open_scores, vocabulary
from megatron_ext.data.text.card import beginning
from megatron_ext.run.rows import Rows, open_rows
from megatron_ext.token_weighting.store import ScoreStore


@dataclass(frozen=True)
class Inputs:
    """Holds what a run reads.

    Attributes:
        checkpoint: to resume from; None for a new run.
        vocab_size: token ids of the data.
        rows: for training and validation.
        scores: of a frozen scorer; None where the run does not use them.
        pretrained: the weights that a new run begins with; None for random ones.
        bos_id: the token that the data's documents begin with; None where they begin with none.
    """

    checkpoint: Checkpoint | None
    vocab_size: int
    rows: Rows
    scores: ScoreStore | None
    pretrained: Pretrained | None
    bos_id: int | None = None


def open_inputs(config: Config, *, pretrained: bool = True) -> Inputs:
    """Open what the run reads.

    Args:
        config: the run's, or a stage's.
        pretrained: whether its first weights can be there; False for a stage that takes them from one to come.

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
        bos_id=beginning(part.prefix for part in config.data.parts),
    )


def first_weights(config: Config, vocab_size: int) -> Pretrained | None:
    """Find the weights, and if asked for the optimizer's state, that a new run begins with; None for random ones.

    Raises:
        UserError: `init_from` holds no model, one of other shapes, or no optimizer's state.
    """
    options = config.checkpoint
    if options.init_from is None:
        return None
    pretrained = Pretrained.find(Path(options.init_from))
    pretrained.check_shapes(config.model, vocab_size)
    if options.init_optimizer:
        pretrained.with_optimizer()
    return pretrained
