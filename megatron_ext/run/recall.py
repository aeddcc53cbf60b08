"""A model's answers to recall samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.evaluation.recall.results import Item
from megatron_ext.evaluation.recall.sample import Sample
from megatron_ext.evaluation.recall.scoring import score
from megatron_ext.run.generate import Generator, Prompt, inference_layout
from megatron_ext.run.inference import Dtype, open_model, warn_beyond_training

logger = logging.getLogger(__name__)


def answer_samples(
    pretrained: Pretrained,
    model_text: ModelText,
    processes: ParallelConfig,
    samples: Mapping[int, Sequence[Sample]],
    batch_size: int,
    dtype: Dtype = "auto",
) -> list[Item]:
    """Ask a model all samples, and score its greedy answers; all processes get them.

    Args:
        pretrained, model_text: the model.
        processes: how they share it.
        samples: by length, the same on every process.
        batch_size: texts at a time in each group of processes.
        dtype: in which the model computes.

    Raises:
        UserError: processes that generate no text, or a model that they cannot share.
    """
    items = []
    with open_model(pretrained, inference_layout(processes), max(samples), dtype) as model:
        generator = Generator(model, batch_size, model_text.stop)
        for length, asked in samples.items():
            warn_beyond_training(pretrained, length)
            logger.info("%s: %d samples of %d tokens", pretrained.folder, len(asked), length)
            prompts = [Prompt(model_text.encode(sample.prompt), sample.new_tokens) for sample in asked]
            for sample, prompt, tokens in zip(asked, prompts, generator.answer(prompts), strict=True):
                text = model_text.answer(tokens)
                scored = score(sample.metric, text, sample.answers)
                items.append(Item(length, sample, len(prompt.tokens), tuple(tokens), text, scored))
    return items
