"""transformers' own greedy texts."""

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def greedy_texts(model: Any, prompts: Sequence[Sequence[int]], new: int, stop: list[int]) -> list[list[int]]:
    """transformers' own greedy continuation of each prompt, alone, of so many tokens at most."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=0,
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts
