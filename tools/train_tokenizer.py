"""Train a byte-level BPE tokenizer on documents.

python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 4096 --output data/tokenizer
"""

import sys

from megatron_ext.cli import MANY, Parser, command
from megatron_ext.data.text.documents import read_documents
from megatron_ext.data.text.tokenizer import train_bpe


@command
def main(argv: list[str]) -> int:
    parser = Parser(
        description="Train a byte-level BPE tokenizer; writes FOLDER/tokenizer.json, which --tokenizer-model takes."
    )
    kinds = ".jsonl or .json lines (also .gz, .zst), .parquet, .txt; folders or patterns"
    parser.add_argument("--input", **MANY, required=True, metavar="PATH", help=kinds)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--output", required=True, metavar="FOLDER")
    parser.add_argument("--json-key", default="text", help="the field that holds the text (default: text)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")
    args = parser.parse_args(argv)
    texts = (document.text for document in read_documents(args.input, args.json_key))
    tokenizer = train_bpe(texts, args.vocab_size, args.output, overwrite=args.overwrite)
    print(f"{tokenizer.file}: {tokenizer.vocab_size:,} tokens, end token {tokenizer.eod_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
