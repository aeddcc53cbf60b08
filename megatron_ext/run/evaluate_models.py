"""Evaluate one or several trained models on the same items: what `tools/evaluate.py` runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch.distributed as dist

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.data.text.documents import read_documents
from megatron_ext.errors import UserError, missing_package
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.evaluation.perplexity import Limits, file_documents, loss_differences
from megatron_ext.evaluation.probe import NEW_TOKENS, Sample, make_samples, scores_of
from megatron_ext.evaluation.statistics import compare
from megatron_ext.run.generate import Generator, Prompt, inference_layout
from megatron_ext.run.inference import open_model, warn_beyond_training
from megatron_ext.run.perplexity import dataset_documents, evaluate_perplexity
from megatron_ext.short_context import ShortContext

Models = Mapping[str, tuple[Pretrained, ModelText]]
Result = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """What a command found: the parts of a record (see `evaluation/report.py`), and every answer of each model."""

    settings: Result
    results: list[Result]
    differences: list[Result]
    items: dict[str, list[Result]] = field(default_factory=dict)


def evaluate_models(options: argparse.Namespace, processes: ParallelConfig) -> tuple[Result, dict[str, list[Result]]]:
    """Run the command of `tools/evaluate.py`. Collective.

    Returns:
        The record, and every answer of each model; empty results except on process 0.

    Raises:
        UserError: a model or data that cannot be read, models that cannot be compared, or an option that does not fit.
    """
    models = _find_models(options)
    commands: dict[str, Callable[[argparse.Namespace, ParallelConfig, Models], Evaluation]] = {
        "perplexity": _perplexity,
        "recall": _recall,
        "lm-eval": _lm_eval,
    }
    found = commands[options.command](options, processes, models)
    dist.destroy_process_group()
    record = {
        "kind": options.command,
        "settings": found.settings,
        "models": {
            name: {"folder": str(pretrained.folder), "trained_length": pretrained.length}
            for name, (pretrained, _) in models.items()
        },
        "results": found.results,
        "differences": found.differences,
    }
    return record, found.items


def _find_models(options: argparse.Namespace) -> Models:
    """Find the models and their tokenizers, by name, before any is loaded."""
    models: dict[str, tuple[Pretrained, ModelText]] = {}
    for path in options.models:
        pretrained = Pretrained.find(path)
        name = str(path) if path.resolve().name in models else path.resolve().name
        if name in models:
            raise UserError(f"models: got {path} twice; name each once")
        models[name] = pretrained, ModelText.of(pretrained, options.tokenizer, options.eod_token, bos=options.bos)
    if len(models) > 1:
        fingerprints = {text.tokenizer.fingerprint for _, text in models.values()}
        if len(fingerprints) > 1 and options.command != "lm-eval":
            raise UserError(
                "models: their tokenizers differ, so they would not get the same items; evaluate them one by one, or "
                "give one --tokenizer for all"
            )
    return models


def _lengths(options: argparse.Namespace, models: Models) -> list[int]:
    trained = [pretrained.length for pretrained, _ in models.values() if pretrained.length is not None]
    if options.lengths is None and not trained:
        raise UserError("lengths: the model does not say its trained length; give --lengths")
    return sorted(set(options.lengths or [min(trained)]))


def _perplexity(options: argparse.Namespace, processes: ParallelConfig, models: Models) -> Evaluation:
    windows = []
    for length in _lengths(options, models):
        stride = options.stride if options.stride is not None else max(length // 2, 1)
        if stride > length:
            raise UserError(f"stride: got {stride}, needs at most the window's {length}; lower it")
        windows.append(ShortContext(length, stride, every_token=True))
    limits = Limits(options.documents_per_source, options.min_tokens, options.max_tokens)
    pretrained, text = next(iter(models.values()))  # their tokenizers are the same
    if options.data_path is not None:
        found = dataset_documents(options.data_path, pretrained.model.vocab_size, limits)
    else:
        read = read_documents(options.input, options.json_key, key_field=options.source_key)
        texts = ((str(one.source) if one.key is None else one.key, one.text) for one in read)
        found = file_documents(texts, text.encode, text.end, limits)
    documents = list(islice(found, options.documents))
    if not documents:
        raise UserError("input: no document is left to score; lower --min-tokens, or give another --input")
    evaluated = {
        name: evaluate_perplexity(
            pretrained,
            processes,
            documents,
            windows,
            document_mask=options.document_mask,
            batch_tokens=options.batch_tokens,
            dtype=options.dtype,
        )
        for name, (pretrained, _) in models.items()
    }
    settings = {
        "document_mask": options.document_mask,
        "stride": {str(window.length): window.stride for window in windows},
        "documents": len(documents),
        "tokens": sum(len(document.tokens) for document in documents),
    }
    results = [{"model": name, **result} for name, own in evaluated.items() for result in own.results()]
    return Evaluation(settings, results, list(loss_differences(evaluated)))


def _recall(options: argparse.Namespace, processes: ParallelConfig, models: Models) -> Evaluation:
    haystack = None
    if options.haystack is not None:
        haystack = "\n".join(document.text for document in read_documents(options.haystack, options.json_key))
    _, text = next(iter(models.values()))  # their tokenizers are the same

    def count(part: str) -> int:
        return len(text.encode(part))

    lengths = _lengths(options, models)
    samples = list(make_samples(options.tasks, lengths, count, options.samples, options.seed, haystack))
    items = {name: _answers(model, own, processes, samples, options) for name, (model, own) in models.items()}
    scores = {name: scores_of(own) for name, own in items.items()}
    results = [
        {"model": name, "task": task, "metric": metric, "length": length, "value": own.mean(), "count": len(own)}
        for name, by_task in scores.items()
        for (task, metric, length), own in by_task.items()
    ]
    settings = {"samples": options.samples, "seed": options.seed, "haystack": options.haystack}
    return Evaluation(settings, results, list(compare(scores)), items)


def _answers(
    pretrained: Pretrained,
    text: ModelText,
    processes: ParallelConfig,
    samples: Sequence[Sample],
    options: argparse.Namespace,
) -> list[Result]:
    """Answer all samples greedily and score them; all processes get the items."""
    longest = max(sample.length for sample in samples)
    warn_beyond_training(pretrained, longest)
    with open_model(pretrained, inference_layout(processes), longest, options.dtype) as model:
        prompts = [Prompt(text.encode(sample.prompt), NEW_TOKENS, (sample.answer,)) for sample in samples]
        answers = Generator(model, options.batch_size, text.stop, text.decode).answer(prompts)
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


def _lm_eval(options: argparse.Namespace, processes: ParallelConfig, models: Models) -> Evaluation:
    if find_spec("lm_eval") is None:
        raise missing_package("lm-eval", "lm-eval[hf]")
    from megatron_ext.run.lm_eval_model import evaluate, items_of, results_by_prompt_length, results_of

    results: list[Result] = []
    items, samples = {}, {}
    for name, (pretrained, text) in models.items():
        found = evaluate(pretrained, text, processes, options)
        if found is not None:  # on process 0
            own = list(results_of(found))
            if options.split_length is not None:
                own += results_by_prompt_length(found, text.encode, options.split_length)
            results += [{"model": name, **result} for result in own]
            items[name] = items_of(found)
            samples[name] = [{"task": task, **one} for task, answers in found["samples"].items() for one in answers]
    settings = {name: getattr(options, name) for name in ("tasks", "shots", "limit", "lengths", "chat", "cut_middle")}
    return Evaluation(settings, results, list(compare(items)) if items else [], samples)
