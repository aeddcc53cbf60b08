"""What others are given and say: transformers' own greedy texts, and a task for lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

CHOICE = """task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def write_choice(folder: Path, questions: Path) -> None:
    """Write the task `choice`, whose questions, options and answers are the lines of a .jsonl file."""
    (folder / "choice.yaml").write_text(CHOICE % questions)


@torch.no_grad()
def greedy_texts(
    model: Any, prompts: Sequence[Sequence[int]], new: int | Sequence[int], stop: list[int]
) -> list[list[int]]:
    """transformers' own greedy continuation of each prompt, alone, of so many tokens at most."""
    numbers = [new] * len(prompts) if isinstance(new, int) else new
    said = []
    for prompt, number in zip(prompts, numbers, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=number,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=0,
        )
        said.append(out[0, len(prompt) :].tolist())
    return said
