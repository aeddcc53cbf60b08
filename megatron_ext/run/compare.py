"""Compare a Hugging Face folder and a Megatron checkpoint on the same text, to check that they are the same model."""

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
from megatron_ext.engine.model import build_chunks
from megatron_ext.engine.state import load_weights
from megatron_ext.errors import UserError, missing_package
from megatron_ext.loss import TokenLosses
from megatron_ext.rope import Frequencies, follows_text

# maximum and mean difference of logits relative to the largest logit, and difference of the mean loss; measured, with a
# margin of a factor of 10: docs/conversion.md
TOLERANCES = {torch.float32: (1e-4, 1e-5, 1e-5), torch.bfloat16: (1e-1, 1e-2, 2e-2)}
Answers = tuple[float, Tensor, list[int]]  # mean loss, logits float32 [T, V], greedy tokens that continue the text


@dataclass(frozen=True)
class Comparison:
    """Comparison of two models on one text; in pairs, Hugging Face's value comes first.

    Attributes:
        largest, mean: maximum and mean absolute difference of logits.
        scale: the largest absolute logit.
        losses, greedy: of each model.
        allowed: tolerances of `largest`, `mean` and the difference of the losses.
        exact: whether the greedy tokens must be equal; in bf16 near ties may be resolved differently.
    """

    largest: float
    mean: float
    scale: float
    losses: tuple[float, float]
    greedy: tuple[list[int], list[int]]
    allowed: tuple[float, float, float]
    exact: bool

    @property
    def agrees(self) -> bool:
        """Whether the models agree within the tolerances."""
        found = self.largest, self.mean, abs(self.losses[0] - self.losses[1])
        same_text = not self.exact or self.greedy[0] == self.greedy[1]
        return same_text and all(value <= limit for value, limit in zip(found, self.allowed, strict=True))


def compare(hugging_face: Path, checkpoint: Path, tokens: list[int], dtype: torch.dtype, greedy: int) -> Comparison:
    """Run both models on a text of at least two token ids, one after the other, and generate `greedy` tokens.

    Raises:
        UserError: a folder that cannot be read, or models with different vocabularies.
    """
    their_loss, theirs_TV, their_greedy = transformers_answers(hugging_face, tokens, dtype, greedy)
    gc.collect()
    our_loss, ours_TV, our_greedy = megatron_answers(checkpoint, tokens, dtype, greedy)
    if theirs_TV.shape != ours_TV.shape:
        sizes = theirs_TV.shape[1], ours_TV.shape[1]
        raise UserError(f"verify: the models know {sizes[0]} and {sizes[1]} token ids; give two that are the same")
    difference, scale = (theirs_TV - ours_TV).abs(), float(theirs_TV.abs().max())
    largest, mean, loss = TOLERANCES[dtype]
    return Comparison(
        largest=float(difference.max()),
        mean=float(difference.mean()),
        scale=scale,
        losses=(their_loss, our_loss),
        greedy=(their_greedy, our_greedy),
        allowed=(largest * scale, mean * scale, loss),
        exact=dtype is torch.float32,
    )


@torch.no_grad()
def transformers_answers(folder: Path, tokens: list[int], dtype: torch.dtype, greedy: int) -> Answers:
    """Compute the answers of transformers, without custom code."""
    platform.uninstall_cpu()  # imported under these patches, transformers leaves rotary angles uninitialized
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
    return float(loss), logits_TV, _continue(logits, tokens, greedy)


@torch.no_grad()
def megatron_answers(path: Path, tokens: list[int], dtype: torch.dtype, greedy: int) -> Answers:
    """Compute the answers of the model that training would use, on one process."""
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
        (model,) = build_chunks(config, vocab_size, where)
        load_weights([model], pretrained, ranks)
        model.eval()

        def batch(ids: list[int]) -> PackedBatch:
            length = len(ids) - 1
            if follows_text(pretrained.model, pretrained.length or 0):
                model.frequencies = Frequencies(pretrained.model, length)
            row = TokenRow(np.array(ids), np.array([], dtype=np.int64), np.ones(length, dtype=bool))
            return pack([row], length, config.mask_options()).to(where.device)

        def logits(ids: list[int]) -> Tensor:
            return model.logits(batch([*ids, 0])).cpu()

        losses = model(batch(tokens))
        assert isinstance(losses, TokenLosses)
        loss = float(losses.cross_entropy_t.double().mean())
        return loss, logits(tokens[:-1]), _continue(logits, tokens, greedy)
    finally:
        parallel.stop()


def _continue(logits: Callable[[list[int]], Tensor], tokens: list[int], count: int) -> list[int]:
    """Append the most likely next token repeatedly; the whole text is recomputed each time."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(logits(text)[-1].argmax()))
    return text[len(tokens) :]
