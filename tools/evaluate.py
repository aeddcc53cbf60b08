"""Evaluate trained models: runs, checkpoints of any layout, or Hugging Face folders.

python tools/evaluate.py perplexity MODEL [MODEL ...] --input books.jsonl --lengths 8192 32768 --output DIR
python tools/evaluate.py lm-eval MODEL [MODEL ...] --tasks ruler longbench2 --lengths 32768 --output DIR

Several models are compared on the same items. Under torchrun the processes share the work according to the trainer's
parallel flags (--tensor-model-parallel-size, --context-parallel-size, --device, ...). See docs/evaluation.md.
"""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext.cli import MANY, Parser, add_model_flags, check_new, command, integer, positive
from megatron_ext.config.arguments import parse_processes
from megatron_ext.errors import UserError
from megatron_ext.inference.options import LmEvalOptions, PerplexityOptions
from megatron_ext.launch import is_first, read_launch


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help, add_flags in (
        ("perplexity", "loss of documents with sliding windows of several lengths", _perplexity_flags),
        ("lm-eval", "tasks of lm-eval: RULER, LongBench, MMLU, ...", _lm_eval_flags),
    ):
        sub = commands.add_parser(name, help=help, description=help)
        add = sub.add_argument
        add("models", nargs="+", type=Path, metavar="MODEL", help="runs, checkpoints or Hugging Face folders")
        add("--output", type=Path, metavar="DIR", help=f"write {name}.json and .md there")
        add("--overwrite", action="store_true", help="replace existing files")
        add_flags(add)
        add_model_flags(sub)
    return parser.parse_known_args(argv)


def _perplexity_flags(add: Callable[..., Any]) -> None:
    add("--input", **MANY, metavar="FILE", help=".jsonl, .txt, .parquet files; each is a source")
    add("--json-key", default="text", metavar="FIELD", help="field of --input that holds the text [text]")
    add("--source-key", metavar="FIELD", help="field that names a text's source, such as its domain [the file]")
    add("--data-path", **MANY, metavar="PREFIX", help=".bin/.idx datasets instead of files; each is a source")
    add("--lengths", **MANY, type=positive, metavar="L", help="tokens of a window [the trained length]")
    add("--stride", type=positive, metavar="S", help="tokens between the starts of windows [half of each length]")
    text = "a token sees its own document alone [yes]"
    add("--document-mask", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--documents", type=positive, metavar="N", help="score the first N documents in all [all]")
    text = "score N evenly spaced documents of each source [all]"
    add("--documents-per-source", type=positive, metavar="N", help=text)
    add("--min-tokens", type=integer(2), default=2, metavar="N", help="skip shorter documents [2]")
    add("--max-tokens", type=integer(2), metavar="N", help="cut documents to N tokens [whole documents]")
    add("--batch-tokens", type=positive, default=8192, metavar="N", help="of a micro-batch, at least a window [8192]")


def _lm_eval_flags(add: Callable[..., Any]) -> None:
    text = "names of lm-eval's tasks and groups (`lm-eval ls tasks`), or of --include-path"
    add("--tasks", **MANY, required=True, metavar="TASK", help=text)
    add("--shots", type=integer(0), metavar="N", help="solved examples before a question [each task's own]")
    add("--limit", type=positive, metavar="N", help="questions of each task, and of each of --lengths [all]")
    add("--include-path", type=Path, metavar="DIR", help="folder with your own task files, whose code is run")
    add("--lengths", **MANY, type=positive, metavar="L", help="lengths of RULER's texts [lm-eval's: 4096]")
    add("--max-length", type=positive, metavar="L", help="longer contexts lose their beginning [the trained length]")
    add("--cut-middle", action="store_true", help="contexts of generated answers lose their middle (LongBench)")
    add("--split-length", type=positive, metavar="L", help="also average over prompts up to L tokens, and longer ones")
    add("--chat", action="store_true", help="use the chat template of the tokenizer")
    add("--batch-size", type=positive, default=8, metavar="N", help="texts at a time on each copy of the model [8]")


def check(options: argparse.Namespace) -> None:
    """Check the options before any model is read.

    Raises:
        UserError: incompatible options, or an output that exists.
    """
    if options.output is not None:
        check_new(options.output / f"{options.command}.json", options.overwrite)
        options.output.mkdir(parents=True, exist_ok=True)  # an error now, and not after hours
    if options.command == "perplexity" and options.bos and options.data_path is not None:
        raise UserError("bos: got --bos with --data-path, whose documents are read as they are; leave --bos out")
    if options.command == "perplexity" and (options.input is None) == (options.data_path is None):
        raise UserError("input, data_path: needs one of the two; give --input FILES or --data-path PREFIX")


@command
def main(argv: list[str]) -> int:
    options, flags = parse_options(argv)
    first = is_first()
    logging.basicConfig(format="%(message)s", level=logging.WARNING if first else logging.ERROR)
    read_launch()
    check(options)
    processes = parse_processes(flags)
    from megatron_ext.evaluation.report import markdown, write_record  # these imports take seconds
    from megatron_ext.inference.evaluate import evaluate_models

    kind = {"perplexity": PerplexityOptions, "lm-eval": LmEvalOptions}[options.command]
    for record, items in evaluate_models(kind.of(options), processes):
        if first and options.output is not None:
            write_record(record, items, options.output)
    if first:
        print(markdown(record), end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
