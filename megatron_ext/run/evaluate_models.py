"""Evaluate one or several trained models on the same items: what `tools/evaluate.py` runs."""

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_ext.arrays import Float64
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.data.text.documents import read_documents
from megatron_ext.errors import UserError, missing_package
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.evaluation.probe import NEW_TOKENS, make_samples
from megatron_ext.evaluation.report import Key, compare
from megatron_ext.run.generate import Prompt, open_generator
from megatron_ext.run.perplexity import evaluate_perplexity

Models = Mapping[str, ModelText]
Result = dict[str, Any]


def evaluate_models(options: argparse.Namespace, processes: ParallelConfig) -> tuple[Result, dict[str, list[Result]]]:
    """Run the command of `tools/evaluate.py`. Collective.

    Returns:
        The record (see `evaluation/report.py`), and every answer of each model; without results except on process 0.

    Raises:
        UserError: a model or data that cannot be read, models that cannot be compared, or an option that does not fit.
    """
    models = _find_models(options)
    items: dict[str, list[Result]] = {}
    if options.command == "perplexity":
        found = evaluate_perplexity(options, processes, models, _lengths(options, models))
    elif options.command == "recall":
        found, items = _recall(options, processes, models)
    else:
        if find_spec("lm_eval") is None:
            raise missing_package("lm-eval", "lm-eval[hf]")
        from megatron_ext.run.lm_eval_model import evaluate

        found, items = evaluate(options, processes, models)
    dist.destroy_process_group()
    folders = {
        name: {"folder": str(text.pretrained.folder), "trained_length": text.pretrained.length}
        for name, text in models.items()
    }
    return {"kind": options.command, "models": folders, **found}, items


def _find_models(options: argparse.Namespace) -> Models:
    """Find the models and their tokenizers, by name, before any is loaded."""
    lm_eval = options.command == "lm-eval"
    models: dict[str, ModelText] = {}
    for path in options.models:
        model = Pretrained.find(path)
        name = str(path) if path.resolve().name in models else path.resolve().name
        if name in models:
            raise UserError(f"models: got {path} twice; name each once")
        chat = lm_eval and options.chat
        models[name] = ModelText.of(model, options.tokenizer, options.eod_token, bos=options.bos, chat=chat)
    if len({text.tokenizer.fingerprint for text in models.values()}) > 1 and not lm_eval:
        raise UserError(
            "models: their tokenizers differ, so they would not get the same items; evaluate them one by one, or "
            "give one --tokenizer for all"
        )
    return models


def _lengths(options: argparse.Namespace, models: Models) -> list[int]:
    trained = [text.pretrained.length for text in models.values() if text.pretrained.length is not None]
    if options.lengths is None and not trained:
        raise UserError("lengths: the model does not say its trained length; give --lengths")
    return sorted(set(options.lengths or [min(trained)]))


def _recall(
    options: argparse.Namespace, processes: ParallelConfig, models: Models
) -> tuple[Result, dict[str, list[Result]]]:
    """Answer the samples of the probe greedily, and score them."""
    haystack = None
    if options.haystack is not None:
        haystack = "\n".join(document.text for document in read_documents(options.haystack, options.json_key))
    encode = next(iter(models.values())).encode  # their tokenizers are the same
    tasks, lengths = list(dict.fromkeys(options.tasks)), _lengths(options, models)
    samples = list(make_samples(tasks, lengths, encode, options.samples, options.seed, haystack))
    results: list[Result] = []
    items: dict[str, list[Result]] = {}
    scores: dict[str, dict[Key, Float64]] = {}
    for name, text in models.items():
        prompts = [Prompt(text.encode(sample.prompt), NEW_TOKENS, (sample.answer,)) for sample in samples]
        with open_generator(text, processes, max(lengths), options) as generator:
            answers = generator.answer(prompts)
        items[name] = [
            {
                "task": sample.task,
                "length": sample.length,
                "expected": sample.answer,
                "prompt_tokens": len(prompt.tokens),
                "tokens": tokens,
                "text": text.answer(tokens),
                "score": float(sample.answer in text.answer(tokens)),
            }
            for sample, prompt, tokens in zip(samples, prompts, answers, strict=True)
        ]
        by_task = np.array([item["score"] for item in items[name]]).reshape(len(tasks), len(lengths), -1)
        scores[name] = {
            (task, "score", length): by_task[i, j] for i, task in enumerate(tasks) for j, length in enumerate(lengths)
        }
        results += [
            {"model": name, "task": task, "metric": metric, "length": length, "value": own.mean(), "count": len(own)}
            for (task, metric, length), own in scores[name].items()
        ]
    settings = {"samples": options.samples, "seed": options.seed, "haystack": options.haystack}
    return {"settings": settings, "results": results, "differences": list(compare(scores))}, items
