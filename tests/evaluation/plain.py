"""transformers' own greedy texts."""

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def greedy_texts(model: Any, prompts: Sequence[Sequence[int]], new: int, stop: list[int]) -> list[list[int]]:
    """transformers' own greedy continuation of each prompt, alone, of so many tokens at most."""
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    ids = [torch.tensor([prompt]) for prompt in prompts]
    texts = [
        model.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), **options)[0, prompt_ids.shape[1] :]
        for prompt_ids in ids
    ]
    return [text.tolist() for text in texts]
