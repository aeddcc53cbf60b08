"""Evaluate trained models: runs, checkpoints of any layout, or Hugging Face folders.

python tools/evaluate.py perplexity MODEL [MODEL ...] --input books.jsonl --lengths 8192 32768 --output DIR
python tools/evaluate.py recall MODEL [MODEL ...] --lengths 4096 8192 --output DIR
python tools/evaluate.py lm-eval MODEL [MODEL ...] --tasks ruler longbench2 --lengths 32768 --output DIR

Several models are compared on the same items. Under torchrun the processes share the work according to the trainer's
parallel flags (--tensor-model-parallel-size, --context-parallel-size, --device, ...). See docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.cli import Parser, command
from megatron_ext.config.arguments import parse_processes
from megatron_ext.errors import UserError, missing_package
from megatron_ext.evaluation.flags import add_model_flags
from megatron_ext.files.atomic import atomic_write
from megatron_ext.launch import is_first, read_launch

if TYPE_CHECKING:  # importing torch and Megatron takes seconds
    from megatron_ext.checkpoint.pretrained import Pretrained
    from megatron_ext.evaluation.model_text import ModelText
    from megatron_ext.evaluation.perplexity import Document
    from megatron_ext.short_context import ShortContext

Models = Mapping[str, tuple["Pretrained", "ModelText"]]
Result = dict[str, Any]
Evaluation = tuple[Result, list[Result], list[Result]]  # settings, results, differences


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help, add_flags in (
        ("perplexity", "loss of documents with sliding windows of several lengths", _perplexity_flags),
        ("recall", "a small offline probe: a hidden sentence, and JSON keys", _recall_flags),
        ("lm-eval", "tasks of lm-eval: RULER, LongBench, MMLU, ...", _lm_eval_flags),
    ):
        sub = commands.add_parser(name, help=help, description=help)
        add = sub.add_argument
        add("models", nargs="+", type=Path, metavar="MODEL", help="runs, checkpoints or Hugging Face folders")
        add("--output", type=Path, metavar="DIR", help=f"write {name}.json, .md and .png there")
        add("--overwrite", action="store_true", help="replace existing files")
        add_flags(add)
        add_model_flags(sub)
    return parser.parse_known_args(argv)


def _perplexity_flags(add: Callable[..., Any]) -> None:
    add("--input", nargs="+", metavar="FILE", help=".jsonl, .txt, .parquet files; each is a source")
    add("--json-key", default="text", metavar="FIELD", help="field of --input that holds the text [text]")
    add("--source-key", metavar="FIELD", help="field that names a text's source, such as its domain [the file]")
    add("--data-path", nargs="+", metavar="PREFIX", help=".bin/.idx datasets instead of files; each is a source")
    add("--lengths", nargs="+", type=int, metavar="L", help="tokens of a window [the trained length]")
    add("--stride", type=int, metavar="S", help="tokens between the starts of windows [half of each length]")
    text = "a token sees its own document alone [yes]"
    add("--document-mask", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--documents", type=int, metavar="N", help="score the first N documents in all [all]")
    add("--documents-per-source", type=int, metavar="N", help="score the first N documents of each source [all]")
    add("--min-tokens", type=int, default=2, metavar="N", help="skip shorter documents [2]")
    add("--max-tokens", type=int, metavar="N", help="cut documents to N tokens [whole documents]")
    add("--batch-tokens", type=int, default=8192, metavar="N", help="tokens of a micro-batch, at least a window [8192]")


def _recall_flags(add: Callable[..., Any]) -> None:
    add("--lengths", nargs="+", type=int, metavar="L", help="tokens of prompt and answer together [the trained length]")
    add("--tasks", nargs="+", default=["needle", "json_kv"], metavar="TASK", help="needle, json_kv [both]")
    add("--samples", type=int, default=60, metavar="N", help="samples of each task and length, at six depths [60]")
    add("--haystack", nargs="+", metavar="FILE", help="texts that hide the needle: .txt, .jsonl, .parquet [a sentence]")
    add("--json-key", default="text", metavar="FIELD", help="field of --haystack that holds the text [text]")
    add("--seed", type=int, default=42, help="seed of keys and values [42]")
    add("--batch-size", type=int, default=8, metavar="N", help="texts at a time on each copy of the model [8]")


def _lm_eval_flags(add: Callable[..., Any]) -> None:
    text = "names of lm-eval's tasks and groups (`lm-eval ls tasks`), or of --include-path"
    add("--tasks", nargs="+", required=True, metavar="TASK", help=text)
    add("--shots", type=int, metavar="N", help="solved examples before a question [each task's own]")
    add("--limit", type=int, metavar="N", help="questions of each task [all]")
    add("--include-path", type=Path, metavar="DIR", help="folder with your own task files, whose code is run")
    add("--lengths", nargs="+", type=int, metavar="L", help="lengths of RULER's texts [lm-eval's: 4096]")
    add("--max-length", type=int, metavar="L", help="longer contexts lose their beginning [the trained length]")
    add("--cut-middle", action="store_true", help="contexts of generated answers lose their middle (LongBench)")
    add("--split-length", type=int, metavar="L", help="also average over prompts of at most L tokens, and longer ones")
    add("--chat", action="store_true", help="use the chat template of the tokenizer")
    add("--batch-size", type=int, default=8, metavar="N", help="texts at a time on each copy of the model [8]")


def perplexity(options: argparse.Namespace, flags: list[str], models: Models) -> Evaluation:
    """Evaluate the models' perplexity; return settings, results and differences."""
    from megatron_ext.evaluation.perplexity import Limits, loss_differences
    from megatron_ext.run.perplexity import evaluate_perplexity

    processes = parse_processes(flags)
    windows = _windows(options, models)
    limits = Limits(options.documents_per_source, options.min_tokens, options.max_tokens)
    pretrained, text = next(iter(models.values()))  # their tokenizers are the same
    documents = list(islice(_documents(options, pretrained, text, limits), options.documents))
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
    return settings, results, list(loss_differences(evaluated))


def recall(options: argparse.Namespace, flags: list[str], models: Models) -> Evaluation:
    """Probe the models' recall; return settings, results and differences."""
    from megatron_ext.data.text.documents import read_documents
    from megatron_ext.evaluation.probe import make_samples, scores_of
    from megatron_ext.evaluation.statistics import compare
    from megatron_ext.run.recall import answer_samples

    processes = parse_processes(flags)
    text = None
    if options.haystack is not None:
        text = "\n".join(document.text for document in read_documents(options.haystack, options.json_key))
    lengths = _lengths(options, models)
    _, model_text = next(iter(models.values()))  # their tokenizers are the same
    made = make_samples(
        options.tasks, lengths, lambda part: len(model_text.encode(part)), options.samples, options.seed, text
    )
    samples = list(made)
    items = {}
    for name, (pretrained, own_text) in models.items():
        items[name] = answer_samples(pretrained, own_text, processes, samples, options.batch_size, options.dtype)
        _write_items(options, items)
    settings = {"samples": options.samples, "seed": options.seed, "haystack": options.haystack}
    scores = {name: scores_of(own) for name, own in items.items()}
    results = [
        {"model": name, "task": task, "metric": metric, "length": length, "value": own.mean(), "count": len(own)}
        for name, by_task in scores.items()
        for (task, metric, length), own in by_task.items()
    ]
    return settings, results, list(compare(scores))


def lm_eval(options: argparse.Namespace, flags: list[str], models: Models) -> Evaluation:
    """Run tasks of lm-eval; return settings, results and differences, on process 0."""
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise missing_package("lm-eval", "lm-eval[hf]")
    from megatron_ext.evaluation.statistics import compare
    from megatron_ext.run.lm_eval_model import (
        HarnessOptions,
        evaluate,
        items_of,
        results_by_prompt_length,
        results_of,
    )

    processes = parse_processes(flags)
    asked = HarnessOptions(
        tuple(options.tasks),
        options.shots,
        options.limit,
        options.include_path,
        tuple(options.lengths or ()),
        options.chat,
        options.cut_middle,
    )
    results: list[Result] = []
    samples: dict[str, list[Result]] = {}
    items = {}
    for name, (pretrained, text) in models.items():
        length = options.max_length or pretrained.length
        if length is None:
            raise UserError(f"max_length: {pretrained.folder} does not say its trained length; give --max-length")
        found = evaluate(pretrained, text, processes, asked, length, options.batch_size, options.dtype)
        if found is not None:
            own = list(results_of(found))
            if options.split_length is not None:
                own += results_by_prompt_length(found, text.encode, options.split_length)
            results += [{"model": name, **result} for result in own]
            items[name] = items_of(found)
            samples[name] = [{"task": task, **one} for task, own in found["samples"].items() for one in own]
            _write_items(options, samples)
    settings = {name: getattr(options, name) for name in ("tasks", "shots", "limit", "lengths", "chat", "cut_middle")}
    return settings, results, list(compare(items)) if items else []


def _lengths(options: argparse.Namespace, models: Models) -> list[int]:
    trained = [pretrained.length for pretrained, _ in models.values() if pretrained.length is not None]
    if options.lengths is None and not trained:
        raise UserError("lengths: the model does not say its trained length; give --lengths")
    return sorted(set(options.lengths or [min(trained)]))


def _windows(options: argparse.Namespace, models: Models) -> list[ShortContext]:
    from megatron_ext.short_context import ShortContext

    windows = []
    for length in _lengths(options, models):
        stride = options.stride if options.stride is not None else max(length // 2, 1)
        if stride > length:
            raise UserError(f"stride: got {stride}, needs at most the window's {length}; lower it")
        windows.append(ShortContext(length, stride, every_token=True))
    return windows


def _documents(
    options: argparse.Namespace, pretrained: Pretrained, model_text: ModelText, limits: Any
) -> Iterator[Document]:
    from megatron_ext.data.text.documents import read_documents
    from megatron_ext.evaluation.perplexity import file_documents
    from megatron_ext.run.perplexity import dataset_documents

    if options.data_path is not None:
        assert pretrained.model.vocab_size is not None
        for prefix in options.data_path:
            yield from dataset_documents(prefix, pretrained.model.vocab_size, limits)
        return
    texts = (
        (str(document.source) if document.key is None else document.key, document.text)
        for document in read_documents(options.input, options.json_key, key_field=options.source_key)
    )
    yield from file_documents(texts, model_text.encode, model_text.end, limits)


def check(options: argparse.Namespace) -> None:
    """Check the options before any model is read.

    Raises:
        UserError: a number out of range, incompatible options, or an output that exists.
    """
    written = options.output and options.output / f"{options.command}.json"
    if written and written.exists() and not options.overwrite:
        raise UserError(f"output: {written} exists; pass --overwrite or another folder")
    if options.command == "perplexity" and (options.input is None) == (options.data_path is None):
        raise UserError("input, data_path: needs one of the two; give --input FILES or --data-path PREFIX")
    least = {"max_tokens": 2, "shots": 0, "seed": 0, "min_tokens": 0}  # a document of one token has no label
    for name, value in vars(options).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not isinstance(number, bool) and number < least.get(name, 1):
                raise UserError(f"{name}: got {number}, needs at least {least.get(name, 1)}")


def open_models(options: argparse.Namespace) -> Models:
    """Find the models and their tokenizers, by name, before any is loaded.

    Raises:
        UserError: a model that cannot be read, or models that cannot be compared.
    """
    from megatron_ext.checkpoint.pretrained import Pretrained
    from megatron_ext.evaluation.model_text import ModelText
    from megatron_ext.evaluation.statistics import check_scipy

    models: dict[str, tuple[Pretrained, ModelText]] = {}
    for path in options.models:
        pretrained = Pretrained.find(path)
        text = ModelText.of(pretrained, options.tokenizer, options.eod_token, bos=options.bos)
        name = path.resolve().name
        if name in models or any(path.resolve() == other.resolve() for other in options.models[: len(models)]):
            name = str(path)
        if name in models:
            raise UserError(f"models: got {path} twice; name each once")
        models[name] = (pretrained, text)
    if len(models) > 1:
        check_scipy()
        fingerprints = {text.tokenizer.fingerprint for _, text in models.values()}
        if len(fingerprints) > 1 and options.command != "lm-eval":
            raise UserError(
                "models: their tokenizers differ, so they would not be asked the same; evaluate them one by one, or "
                "give one --tokenizer for all"
            )
    return models


def _write_items(options: argparse.Namespace, items: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Write all answers so far, one line of JSON each, on process 0."""
    if options.output is None or not is_first(os.environ):
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.command}.items.jsonl"
    # incomplete characters are written as JSON escapes
    with atomic_write(path) as aside, aside.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for name, own in items.items():
            for item in own:
                file.write(json.dumps({"model": name, **item}, ensure_ascii=False, default=str) + "\n")


def report(options: argparse.Namespace, record: Result) -> None:
    """Print the tables, and write the files of --output."""
    from megatron_ext.evaluation.report import draw, markdown

    text = markdown(record)
    print(text, end="")
    if options.output is None:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    draw(record, options.output / f"{options.command}.png")
    with atomic_write(options.output / f"{options.command}.md") as aside:
        aside.write_text(text, encoding="utf-8")
    with atomic_write(options.output / f"{options.command}.json") as aside:
        aside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@command
def main(argv: list[str]) -> int:
    options, flags = parse_options(argv)
    first = is_first(os.environ)
    logging.basicConfig(format="%(message)s", level=logging.WARNING if first else logging.ERROR)
    read_launch(os.environ)
    check(options)
    models = open_models(options)
    evaluate = {"perplexity": perplexity, "recall": recall, "lm-eval": lm_eval}[options.command]
    settings, results, differences = evaluate(options, flags, models)
    if first:
        identities = {
            name: {"folder": str(pretrained.folder), "trained_length": pretrained.length}
            for name, (pretrained, _) in models.items()
        }
        record = {
            "kind": options.command,
            "settings": settings,
            "models": identities,
            "results": results,
            "differences": differences,
        }
        report(options, record)
    from megatron_ext.run.inference import leave

    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
