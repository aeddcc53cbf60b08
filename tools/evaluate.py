"""Evaluate finished models: runs or checkpoints of ours (of any layout) or Hugging Face folders.

python tools/evaluate.py perplexity MODEL [MODEL ...] --input books.jsonl --lengths 8192 32768 --output DIR
python tools/evaluate.py recall MODEL [MODEL ...] --lengths 4096 8192 --haystack essays.txt --output DIR
python tools/evaluate.py downstream MODEL [MODEL ...] --suite skyladder --output DIR

Several models are compared on the same items. Under torchrun processes share the work; the trainer's flags of processes
(--tensor-model-parallel-size, --context-parallel-size, --device, ...) say how. docs/evaluation.md has the details.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.cli import Parser, command
from megatron_ext.config.arguments import parse_processes
from megatron_ext.errors import UserError
from megatron_ext.evaluation.flags import add_model_flags
from megatron_ext.files.atomic import atomic_write
from megatron_ext.files.fingerprint import fingerprint
from megatron_ext.launch import is_first, read_launch

if TYPE_CHECKING:  # importing torch and Megatron takes seconds
    from megatron_ext.checkpoint.pretrained import Pretrained
    from megatron_ext.evaluation.model_text import ModelText
    from megatron_ext.evaluation.perplexity import Document, Evaluated, Limits
    from megatron_ext.short_context import ShortContext


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _perplexity_flags(_command(commands, "perplexity", "loss of documents with sliding windows of several lengths"))
    _recall_flags(_command(commands, "recall", "RULER, JSON key-value retrieval and MDQA at several lengths"))
    _downstream_flags(_command(commands, "downstream", "standard tasks by lm-eval, on one process"))
    return parser.parse_known_args(argv)


def _command(commands: Any, name: str, help: str) -> argparse.ArgumentParser:
    """Make a command with the flags that all have."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    add = command.add_argument
    add("models", nargs="+", type=Path, metavar="MODEL", help="runs, checkpoints or Hugging Face folders")
    add("--output", type=Path, metavar="DIR", help=f"write {name}.json, .md and .png there")
    add("--overwrite", action="store_true", help="replace files that are there")
    add_model_flags(command)
    return command


def _perplexity_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--input", nargs="+", metavar="FILE", help=".jsonl, .txt, .parquet files; each is a source")
    add("--json-key", default="text", metavar="FIELD", help="field of --input that holds the text [text]")
    add("--source-key", metavar="FIELD", help="field that names a text's source, such as its domain [the file]")
    add("--data-path", nargs="+", metavar="PREFIX", help=".bin/.idx datasets instead of files; each is a source")
    add("--lengths", nargs="+", type=int, metavar="L", help="tokens of a window [the trained length]")
    add("--stride", type=int, metavar="S", help="tokens by which windows follow one another [half of each length]")
    text = "a token sees its own document alone [yes]"
    add("--document-mask", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--documents", type=int, metavar="N", help="score the first N documents in all [all]")
    add("--documents-per-source", type=int, metavar="N", help="score the first N documents of each source [all]")
    add("--min-tokens", type=int, default=2, metavar="N", help="leave shorter documents out [2]")
    add("--max-tokens", type=int, metavar="N", help="of each document, the first N [all]")
    add("--batch-tokens", type=int, default=8192, metavar="N", help="of a micro-batch, or the window if longer [8192]")


def _recall_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--lengths", nargs="+", type=int, metavar="L", help="tokens of prompt and answer together [the trained length]")
    text = "niah_single_1 ... niah_multiquery, vt, cwe, fwe, qa_1, qa_2, json_kv, mdqa [all whose files are given]"
    add("--tasks", nargs="+", metavar="TASK", help=text)
    add("--samples", type=int, default=100, metavar="N", help="of each task and length [100; RULER's own: 500]")
    add("--haystack", nargs="+", metavar="FILE", help="long texts to hide needles in: .txt, .jsonl, .parquet")
    add("--json-key", default="text", metavar="FIELD", help="field of --haystack that holds the text [text]")
    add("--squad", type=Path, metavar="FILE", help="SQuAD's JSON, for qa_1")
    add("--hotpotqa", type=Path, metavar="FILE", help="HotpotQA's JSON (distractor), for qa_2")
    add("--mdqa", type=Path, metavar="FILE", help="Lost in the Middle's .jsonl[.gz] of 30 documents, for mdqa")
    add("--seed", type=int, default=42, help="of what is hidden and where [42]")
    add("--batch-size", type=int, default=8, metavar="N", help="texts at a time in each group of processes [8]")


def recall(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Ask the models to find what is hidden in long texts; the record of it."""
    from megatron_ext.evaluation.recall.results import by_length
    from megatron_ext.evaluation.recall.tasks import choose_tasks, make_samples, read_material
    from megatron_ext.run.recall import answer_samples

    for name in ("samples", "batch_size"):
        if (value := getattr(options, name)) < 1:
            raise UserError(f"{name}: got {value}, needs at least 1")
    processes = parse_processes(flags)
    opened = _open(options)
    lengths = _lengths(options, [pretrained for pretrained, _ in opened.values()])
    material = read_material(options.haystack, options.json_key, options.squad, options.hotpotqa, options.mdqa)
    named = {name: path for name in ("squad", "hotpotqa", "mdqa") if (path := getattr(options, name)) is not None}
    contents = _contents(named)
    if material.ruler.essay is not None:
        contents["haystack"] = fingerprint(material.ruler.essay.text)
    tasks = choose_tasks(options.tasks, material)
    _, model_text = next(iter(opened.values()))  # their tokenizers are the same
    samples = make_samples(tasks, lengths, model_text.encode, material, options.samples, options.seed)
    answers = _answers(
        options,
        opened,
        by_length,
        lambda pretrained, text: answer_samples(
            pretrained, text, processes, samples, options.batch_size, options.dtype
        ),
    )
    return {
        "samples": options.samples,
        "seed": options.seed,
        "contents": contents,
        **answers,
    }


def _contents(named: Mapping[str, Path]) -> dict[str, str]:
    """Return the fingerprint of each file."""
    return {name: fingerprint(path) for name, path in named.items()}


def _answers(
    options: argparse.Namespace,
    opened: Mapping[str, tuple[Pretrained, ModelText]],
    by_length: Callable[[list[Any]], dict[str, Any]],
    ask: Callable[[Pretrained, ModelText], list[Any]],
) -> dict[str, Any]:
    """Ask each model, and write its answers before the next one is asked; what the record says of the models."""
    from megatron_ext.evaluation.recall.results import differences

    items: dict[str, list[Any]] = {}
    for name, (pretrained, text) in opened.items():
        items[name] = ask(pretrained, text)
        _write_items(options, items)
    models = {
        name: {**_identity(pretrained), "lengths": by_length(items[name])} for name, (pretrained, _) in opened.items()
    }
    return {"models": models, "comparisons": list(differences(items))}


def _write_items(options: argparse.Namespace, items: Mapping[str, Sequence[Any]]) -> None:
    """Write every answer, a line of JSON each, on the first process."""
    if options.output is None or not is_first(os.environ):
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.command}.items.jsonl"
    # half a character is then written as JSON spells it
    with atomic_write(path) as aside, aside.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for name, own in items.items():
            for number, item in enumerate(own):
                file.write(json.dumps(item.record(name, number), ensure_ascii=False) + "\n")


def _downstream_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--suite", choices=("skyladder", "prolong", "token-weighting"), help="a paper's tasks, shots and questions")
    add("--tasks", nargs="+", metavar="TASK", help="of lm-eval or of --include-path, instead of a suite")
    add("--shots", type=int, metavar="N", help="solved examples before a question of --tasks [each task's own]")
    add("--limit", type=int, metavar="N", help="questions of each task [all, or the suite's]")
    add("--include-path", type=Path, metavar="DIR", help="task files of one's own, which may name local data")
    add("--batch-size", type=int, default=8, metavar="N", help="questions at a time [8]")


def downstream(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Run lm-eval on the models, ours exported for it; the record of it."""
    from dataclasses import replace

    from megatron_ext.checkpoint.hf.convert import megatron_to_hf
    from megatron_ext.evaluation.downstream import SUITES, Task, run_tasks, task_differences

    if (options.suite is None) == (options.tasks is None):
        raise UserError("suite, tasks: needs one of the two; give --suite NAME or --tasks TASK ...")
    if options.suite is not None and options.shots is not None:
        raise UserError("shots: got a number beside --suite, which has its own; leave it out, or give --tasks")
    for name, least in (("limit", 1), ("batch_size", 1), ("shots", 0)):
        if (value := getattr(options, name)) is not None and value < least:
            raise UserError(f"{name}: got {value}, needs at least {least}")
    if read_launch(os.environ).world_size > 1:
        raise UserError("downstream: got several processes, lm-eval runs in one; start it without torchrun")
    if options.bos or options.eod_token is not None:
        raise UserError("bos, eod_token: lm-eval goes by the tokenizer's own; leave them out")
    device = parse_processes(flags).device
    tasks = [Task(name, options.shots) for name in options.tasks] if options.tasks else list(SUITES[options.suite])
    if options.limit is not None:
        tasks = [replace(task, limit=options.limit) for task in tasks]
    import torch

    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    dtype = ("bfloat16" if cuda else "float32") if options.dtype == "auto" else options.dtype
    answered, opened = {}, _open(options)
    for name, (pretrained, _) in opened.items():
        with tempfile.TemporaryDirectory(prefix="export-") as temporary:
            folder = pretrained.folder
            if pretrained.checkpoint is not None:
                folder = Path(temporary) / "model"
                megatron_to_hf(pretrained.folder, folder, max_shard_bytes=10**10, tokenizer=options.tokenizer)
            answered[name] = run_tasks(
                folder,
                tasks,
                include=options.include_path,
                dtype=dtype,
                batch_size=options.batch_size,
                device="cuda" if cuda else "cpu",
            )
    return {
        "suite": options.suite,
        "tasks": [vars(task) for task in tasks],
        "models": {
            name: {**_identity(pretrained), "tasks": answered[name].figures} for name, (pretrained, _) in opened.items()
        },
        "comparisons": list(task_differences(answered)),
    }


def perplexity(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Evaluate the models' perplexity; the record of it."""
    from megatron_ext.evaluation.perplexity import Limits
    from megatron_ext.run.perplexity import evaluate_perplexity

    if (options.input is None) == (options.data_path is None):
        raise UserError("input, data_path: needs one of the two; give --input FILES or --data-path PREFIX")
    for name, least in (
        ("stride", 1),
        ("documents", 1),
        ("documents_per_source", 1),
        ("max_tokens", 2),
        ("batch_tokens", 1),
    ):
        if (value := getattr(options, name)) is not None and value < least:  # a document of one token has no label
            raise UserError(f"{name}: got {value}, needs at least {least}")
    processes = parse_processes(flags)
    opened = _open(options)
    limits = Limits(options.documents_per_source, options.min_tokens, options.max_tokens)
    documents, evaluated = [], {}
    windows = _windows(options, [pretrained for pretrained, _ in opened.values()])
    for name, (pretrained, model_text) in opened.items():
        if not documents:  # the same for all: their tokenizers are
            documents = list(islice(_documents(options, pretrained, model_text, limits), options.documents))
            if not documents:
                raise UserError("input: no document is left to score; lower --min-tokens, or give another --input")
        evaluated[name] = evaluate_perplexity(
            pretrained,
            processes,
            documents,
            windows,
            document_mask=options.document_mask,
            batch_tokens=options.batch_tokens,
            dtype=options.dtype,
        )
    return {
        "document_mask": options.document_mask,
        "models": {
            name: {**_identity(pretrained), "lengths": evaluated[name].record()}
            for name, (pretrained, _) in opened.items()
        },
        "comparisons": list(_loss_differences(evaluated)),
    }


def _identity(pretrained: Pretrained) -> dict[str, Any]:
    """Say in a record what a model is."""
    return {"folder": str(pretrained.folder), "trained_length": pretrained.length}


def _lengths(options: argparse.Namespace, models: list[Pretrained]) -> list[int]:
    trained = [model.length for model in models if model.length is not None]
    if options.lengths is None and not trained:
        raise UserError("lengths: the model does not say its trained length; give --lengths")
    lengths = sorted(set(options.lengths or [min(trained)]))
    if lengths[0] < 1:
        raise UserError(f"lengths: got {lengths[0]}, needs at least 1 token")
    return lengths


def _windows(options: argparse.Namespace, models: list[Pretrained]) -> list[ShortContext]:
    from megatron_ext.short_context import ShortContext

    windows = []
    for length in _lengths(options, models):
        stride = options.stride if options.stride is not None else max(length // 2, 1)
        if stride > length:
            raise UserError(f"stride: got {stride}, needs at most the window's {length}; lower it")
        windows.append(ShortContext(length, stride, every_token=True))
    return windows


def _documents(
    options: argparse.Namespace, pretrained: Pretrained, model_text: ModelText, limits: Limits
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


def _loss_differences(evaluated: dict[str, Evaluated]) -> Iterator[dict[str, Any]]:
    """Compare each model with the first one, on the same documents."""
    from megatron_ext.evaluation.statistics import difference

    (first, base), *others = evaluated.items()
    for second, other in others:
        for length, scores in base.at.items():
            found = difference(scores.loss, other.at[length].loss, scores.count)
            yield {"first": first, "second": second, "window": length, "loss": found.record()}


def _open(options: argparse.Namespace) -> dict[str, tuple[Pretrained, ModelText]]:
    """Read what the models are, before any is loaded; by name.

    Raises:
        UserError: a model that cannot be read, or models that cannot be compared.
    """
    from megatron_ext.checkpoint.pretrained import Pretrained
    from megatron_ext.evaluation.model_text import ModelText

    opened: dict[str, tuple[Pretrained, ModelText]] = {}
    for path in options.models:
        pretrained = Pretrained.find(path)
        model_text = ModelText.of(pretrained, options.tokenizer, options.eod_token, bos=options.bos)
        name = path.resolve().name
        if name in opened or any(path.resolve() == other.resolve() for other in options.models[: len(opened)]):
            name = str(path)
        if name in opened:
            raise UserError(f"models: got {path} twice; name each once")
        opened[name] = (pretrained, model_text)
    fingerprints = {model_text.tokenizer.fingerprint for _, model_text in opened.values()}
    if len(opened) > 1:
        from megatron_ext.evaluation.statistics import check_scipy

        check_scipy()
        if len(fingerprints) > 1 and options.command != "downstream":
            raise UserError(
                "models: their tokenizers differ, so they would not be asked the same; evaluate them one by one, or "
                "give one --tokenizer for all"
            )
    return opened


def report(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Print the tables, and write what --output asks for."""
    from megatron_ext.evaluation import report as pages

    write, draw = {
        "perplexity": (pages.perplexity_markdown, pages.draw_perplexity),
        "recall": (pages.recall_markdown, pages.draw_scores),
        "downstream": (pages.downstream_markdown, pages.draw_downstream),
    }[options.command]
    text = write(record)
    print(text, end="")
    if options.output is None:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    with atomic_write(options.output / f"{options.command}.png") as aside:
        draw(record, aside)
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
    written = options.output and options.output / f"{options.command}.json"
    if written and written.exists() and not options.overwrite:
        raise UserError(f"output: {written} exists; pass --overwrite or another folder")
    evaluations = {"perplexity": perplexity, "recall": recall, "downstream": downstream}
    record = evaluations[options.command](options, flags)
    if first:
        report(options, record)
    if options.command != "downstream":
        from megatron_ext.run.inference import leave

        leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
