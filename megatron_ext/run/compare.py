"""A Hugging Face folder and a checkpoint of ours on the same text: are they the same model?"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.batch import PackedBatch, pack
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config, DataConfig, TrainingConfig
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.engine import compat, parallel, platform
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.state import load_weights
from megatron_ext.errors import UserError, missing_package
from megatron_ext.loss import TokenLosses
from megatron_ext.rope import Frequencies, follows_text

LogitsOf = Callable[[list[int]], Tensor]


@dataclass(frozen=True)
class Tolerance:
    """Bounds what two correct implementations differ by.

    Attributes:
        largest: of |difference| / largest |logit| over all logits.
        mean: the same, averaged.
        loss: of |difference| of the mean loss.
    """

    largest: float
    mean: float
    loss: float


# measured, with a factor of 10 to spare: docs/conversion.md
TOLERANCES = {
    torch.float32: Tolerance(largest=1e-4, mean=1e-5, loss=1e-5),
    torch.bfloat16: Tolerance(largest=1e-1, mean=1e-2, loss=2e-2),
}


@dataclass(frozen=True)
class Answers:
    """Holds a model's mean loss on a text, its logits float32 [T, V], and greedy tokens that continue it."""

    loss: float
    logits_TV: Tensor
    greedy: list[int]


@dataclass(frozen=True)
class Comparison:
    """Compares two models on one text.

    Attributes:
        largest, mean: of the absolute differences of logits.
        scale: the largest absolute logit.
        losses: Hugging Face's and Megatron's.
        greedy: likewise.
        tolerance: what `agrees` allows.
    """

    largest: float
    mean: float
    scale: float
    losses: tuple[float, float]
    greedy: tuple[list[int], list[int]]
    tolerance: Tolerance

    @property
    def agrees(self) -> bool:
        """Say whether they are the same model. In bf16 a near tie may continue differently: greedy is for fp32."""
        allowed = self.tolerance
        exact = allowed.largest < 1e-3
        return (
            self.largest <= allowed.largest * self.scale
            and self.mean <= allowed.mean * self.scale
            and abs(self.losses[0] - self.losses[1]) <= allowed.loss
            and (not exact or self.greedy[0] == self.greedy[1])
        )


def compare(hugging_face: Path, checkpoint: Path, tokens: list[int], dtype: torch.dtype, greedy: int) -> Comparison:
    """Run both on a text, one after the other.

    Args:
        hugging_face: folder that transformers loads.
        checkpoint: run or checkpoint folder.
        tokens: at least two token ids.
        dtype: in which both compute.
        greedy: tokens to continue the text by.

    Raises:
        UserError: a folder that cannot be read, or models of different vocabularies.
    """
    theirs = transformers_answers(hugging_face, tokens, dtype, greedy)
    gc.collect()
    ours = megatron_answers(checkpoint, tokens, dtype, greedy)
    if theirs.logits_TV.shape != ours.logits_TV.shape:
        sizes = theirs.logits_TV.shape[1], ours.logits_TV.shape[1]
        raise UserError(f"verify: the models know {sizes[0]} and {sizes[1]} token ids; give two that are the same")
    difference = (theirs.logits_TV - ours.logits_TV).abs()
    return Comparison(
        largest=float(difference.max()),
        mean=float(difference.mean()),
        scale=float(theirs.logits_TV.abs().max()),
        losses=(theirs.loss, ours.loss),
        greedy=(theirs.greedy, ours.greedy),
        tolerance=TOLERANCES[dtype],
    )


@torch.no_grad()
def transformers_answers(folder: Path, tokens: list[int], dtype: torch.dtype, greedy: int) -> Answers:
    """Ask transformers, without custom code."""
    platform.uninstall_cpu()  # imported under its factories, transformers leaves its angles uninitialised
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise missing_package("verify", "'transformers>=5'") from None
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"verify: transformers does not load {folder}: {reason}; convert it again") from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).eval()

    def logits(ids: list[int]) -> Tensor:
        out: Tensor = model(torch.tensor([ids], device=device), use_cache=False).logits
        return out[0].float().cpu()

    logits_TV = logits(tokens[:-1])
    loss = F.cross_entropy(logits_TV.double(), torch.tensor(tokens[1:]))
    return Answers(float(loss), logits_TV, _continue(logits, tokens, greedy))


@torch.no_grad()
def megatron_answers(path: Path, tokens: list[int], dtype: torch.dtype, greedy: int) -> Answers:
    """Ask the model that training would run, on one process."""
    compat.check_version()
    where = platform.choose("auto")
    pretrained = Pretrained.find(path)
    vocab_size = pretrained.model.vocab_size
    assert vocab_size is not None
    config = Config(
        model=replace(pretrained.at(len(tokens)), hidden_dropout=0.0),
        data=DataConfig(seq_length=len(tokens) + greedy),
        training=TrainingConfig(bf16=dtype is torch.bfloat16),
    )
    ranks = parallel.start(config.parallel, config.model.num_layers, where, config.training.seed)
    try:
        (chunk,) = build_chunks(config, vocab_size, where)
        load_weights([chunk], pretrained, ranks)
        return _answers(chunk.eval(), config, where, tokens, greedy, pretrained)
    finally:
        parallel.stop()


def _answers(
    model: PackedGPT,
    config: Config,
    where: platform.Platform,
    tokens: list[int],
    greedy: int,
    pretrained: Pretrained,
) -> Answers:
    follows = follows_text(pretrained.model, pretrained.length or 0)

    def batch(ids: list[int]) -> PackedBatch:
        length = len(ids) - 1
        if follows:
            model.frequencies = Frequencies(pretrained.model, length)
        row = TokenRow(np.array(ids), np.array([], dtype=np.int64), np.ones(length, dtype=bool))
        return pack([row], length, config.mask_options()).to(where.device)

    def logits(ids: list[int]) -> Tensor:
        return model.logits(batch([*ids, 0])).cpu()

    losses = model(batch(tokens))
    assert isinstance(losses, TokenLosses)
    return Answers(
        float(losses.cross_entropy_t.double().mean()), logits(tokens[:-1]), _continue(logits, tokens, greedy)
    )


def _continue(logits: LogitsOf, tokens: list[int], count: int) -> list[int]:
    """Append the likeliest next token, again and again; the whole text is computed anew each time."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(logits(text)[-1].argmax()))
    return text[len(tokens) :]
