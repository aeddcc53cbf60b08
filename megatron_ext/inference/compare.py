"""Compare a Hugging Face folder and a Megatron checkpoint on the same text, to check that they are the same model."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.batch import pack
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.data.row import TokenRow
from megatron_ext.engine import platform
from megatron_ext.errors import UserError, library_errors, optional_module
from megatron_ext.inference.model import open_model
from megatron_ext.rope import Frequencies

# maximum and mean difference of logits relative to the largest logit, and difference of the mean loss; measured, with a
# margin of a factor of 10: docs/conversion.md
TOLERANCES = {"float32": (1e-4, 1e-5, 1e-5), "bfloat16": (1e-1, 1e-2, 2e-2)}
Dtype = Literal["float32", "bfloat16"]
Logits = Callable[[list[int]], Tensor]  # of T token ids, float32 [T, V] on the CPU


@dataclass(frozen=True)
class Comparison:
    """Comparison of two models on one text; in pairs, Hugging Face's value comes first."""

    largest: float  # maximum absolute difference of logits
    mean: float  # mean absolute difference of logits
    scale: float  # the largest absolute logit
    losses: tuple[float, float]
    greedy: tuple[list[int], list[int]]
    dtype: Dtype  # in which both computed

    @property
    def allowed(self) -> tuple[float, float, float]:
        """The tolerances of `largest`, `mean` and the difference of the losses."""
        largest, mean, loss = TOLERANCES[self.dtype]
        return largest * self.scale, mean * self.scale, loss

    @property
    def agrees(self) -> bool:
        """Whether the models agree within the tolerances; in bf16, near ties of greedy tokens may differ."""
        differences = self.largest, self.mean, abs(self.losses[0] - self.losses[1])
        same_text = self.dtype == "bfloat16" or self.greedy[0] == self.greedy[1]
        return same_text and all(value <= limit for value, limit in zip(differences, self.allowed, strict=True))


@torch.no_grad()
def compare(hugging_face: Path, checkpoint: Path, tokens: list[int], dtype: Dtype, greedy: int) -> Comparison:
    """Run both models on a text of at least two token ids, one after the other, and generate `greedy` tokens.

    The checkpoint's model is the one that training would use, on one process.

    Raises:
        UserError: a folder that cannot be read, or models with different vocabularies.
    """
    their_loss, theirs_TV, their_greedy = _answers(_transformers_logits(hugging_face, dtype), tokens, greedy)
    gc.collect()
    pretrained = Pretrained.find(checkpoint)
    with open_model(pretrained, ParallelConfig(), len(tokens) + greedy, dtype) as model:
        (chunk,) = model.chunks

        def logits(ids: list[int]) -> Tensor:
            length = len(ids)
            if model.follows_text:
                chunk.frequencies = Frequencies(pretrained.model, length)
            row = TokenRow(np.array([*ids, 0]), np.array([], dtype=np.int64), np.ones(length, dtype=bool))
            return chunk.logits(pack([row], length, model.config.mask_options()).to(model.platform.device)).cpu()

        our_loss, ours_TV, our_greedy = _answers(logits, tokens, greedy)
    dist.destroy_process_group()
    theirs = theirs_TV.shape[1]
    ours = ours_TV.shape[1]
    if theirs != ours:
        raise UserError(f"verify: got models with {theirs} and {ours} token ids, needs the same model twice")
    difference_TV = (theirs_TV - ours_TV).abs()
    return Comparison(
        largest=float(difference_TV.max()),
        mean=float(difference_TV.mean()),
        scale=float(theirs_TV.abs().max()),
        losses=(their_loss, our_loss),
        greedy=(their_greedy, our_greedy),
        dtype=dtype,
    )


def _transformers_logits(folder: Path, dtype: Dtype) -> Logits:
    """Load a model in transformers, without custom code."""
    platform.uninstall_cpu()  # imported under these patches, transformers leaves rotary angles uninitialized
    transformers = optional_module("verify", "transformers", "'transformers>=5'")
    refused = f"verify: transformers does not load {folder}"
    with library_errors(lambda reason: UserError(f"{refused}: {reason[:200]}; convert it again")):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).eval()
    return lambda ids: model(torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu()


def _answers(logits: Logits, tokens: list[int], greedy: int) -> tuple[float, Tensor, list[int]]:
    """Return the mean loss of a text, its logits [T, V], and tokens that continue it, each from the whole text."""
    logits_TV = logits(tokens[:-1])
    loss = F.cross_entropy(logits_TV.double(), torch.tensor(tokens[1:]))
    text = list(tokens)
    for _ in range(greedy):
        text.append(int(logits(text)[-1].argmax()))
    return float(loss), logits_TV, text[len(tokens) :]
