"""Compute a model's answers to the samples of the recall probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.evaluation.probe import NEW_TOKENS, Sample
from megatron_ext.run.generate import Generator, Prompt, inference_layout
from megatron_ext.run.inference import Dtype, open_model, warn_beyond_training


def answer_samples(
    pretrained: Pretrained,
    text: ModelText,
    processes: ParallelConfig,
    samples: Sequence[Sample],
    batch_size: int,
    dtype: Dtype = "auto",
) -> list[dict[str, Any]]:
    """Answer all samples greedily and score them. Collective; all processes get the items.

    Args:
        pretrained, text: the model and its tokenizer.
        processes: the parallel layout.
        samples: the same on every process.
        batch_size: number of concurrent texts on each copy of the model.
        dtype: of the computation.

    Raises:
        UserError: the model does not fit the layout.
    """
    longest = max(sample.length for sample in samples)
    warn_beyond_training(pretrained, longest)
    with open_model(pretrained, inference_layout(processes), longest, dtype) as model:
        prompts = [Prompt(text.encode(sample.prompt), NEW_TOKENS, (sample.answer,)) for sample in samples]
        answers = Generator(model, batch_size, text.stop, text.decode).answer(prompts)
    items = []
    for sample, prompt, tokens in zip(samples, prompts, answers, strict=True):
        answer = text.answer(tokens)
        items.append(
            {
                "task": sample.task,
                "length": sample.length,
                "expected": sample.answer,
                "prompt_tokens": len(prompt.tokens),
                "tokens": tokens,
                "text": answer,
                "score": float(sample.answer in answer),
            }
        )
    return items
