"""Tokenize .jsonl and .txt documents into Megatron's .bin/.idx.

python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --tokenizer-model tokenizer
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

from megatron_ext.data.preprocess import PreprocessOptions, WriteCounts, preprocess
from megatron_ext.errors import UserError


def parse_options() -> PreprocessOptions:
    parser = argparse.ArgumentParser(description="Tokenize documents into PREFIX.bin, .idx and .json.")
    add = parser.add_argument
    add("--input", dest="inputs", nargs="+", required=True, metavar="PATH", help=".jsonl, .txt or folders")
    add("--output-prefix", required=True, metavar="PREFIX")
    add("--tokenizer-model", dest="tokenizer", required=True, metavar="FOLDER", help="with tokenizer.json")
    add("--json-key", dest="text_field", default="text", help="field of the text (default: %(default)s)")
    add("--workers", type=int, default=1, help="processes; the output does not depend on them (default: 1)")
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end documents by an EOD")
    add("--eod-token", help="the end-of-document token (EOD), if not the one that the tokenizer names")
    add("--skip-bad-lines", action="store_true", help="leave bad documents out instead of stopping")
    add("--overwrite", action="store_true", help="replace an existing PREFIX")
    return PreprocessOptions(**vars(parser.parse_args()))


def write(*args: Any, **kwargs: Any) -> WriteCounts:
    """Importing Megatron costs seconds: only here, so mistakes are told at once and workers start fast."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has no GPU libraries is no news to a tokenizing machine
        from megatron_ext.engine.indexed_dataset import write_indexed
    return write_indexed(*args, **kwargs)


def main() -> int:
    options = parse_options()
    try:
        report = preprocess(options, write)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in report.problems:
        print(f"skipped {problem}")
    totals = f"{report.documents:,} documents, {report.tokens:,} tokens, {report.skipped:,} skipped"
    print(f"{options.output_prefix}: {totals}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
