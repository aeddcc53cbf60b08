"""Gather the Python standard library's sources into a .jsonl corpus, one package per document.

python tools/gather_corpus.py --output data/corpus.jsonl --max-bytes 4000000
"""

from __future__ import annotations

import sys

from megatron_ext.cli import Parser, command
from megatron_ext.data.build.corpus import gather_corpus


@command
def main(argv: list[str]) -> int:
    parser = Parser(description="Gather the standard library's sources, one package per document.")
    parser.add_argument("--output", required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument("--max-bytes", type=int, help="keep the file below this size (default: everything)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    args = parser.parse_args(argv)
    documents, omitted = gather_corpus(args.output, args.max_bytes, overwrite=args.overwrite)
    print(f"{args.output}: {documents:,} documents, {omitted:,} omitted")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
