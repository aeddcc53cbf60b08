"""Tokenize documents, or chats, into Megatron's .bin/.idx.

python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --tokenizer-model tokenizer
python tools/preprocess_data.py --input chats.jsonl --messages-field --output-prefix data/chats --tokenizer-model model
"""

import argparse
import sys

from megatron_ext.cli import MANY, Parser, command, positive
from megatron_ext.data.indexed import read_metadata
from megatron_ext.data.preprocess.encode import Report
from megatron_ext.data.preprocess.pipeline import PreprocessOptions, preprocess
from megatron_ext.data.text.documents import MAX_DOCUMENT_BYTES
from megatron_ext.data.text.tokenizer import ENCODERS

EPILOG = """
A document is a line of .jsonl, a row of .parquet, or a .txt file. Finished shards are kept in PREFIX.parts, which is
removed when PREFIX.bin, .idx and .json (tokenizer, counts, lengths, sources) are complete; --resume
continues an interrupted run. With --concat-by the documents are in the order of a hash of the field's values, and the
texts of each in the order of the inputs with a newline between them.
"""


def parse_options(argv: list[str]) -> PreprocessOptions:
    parser = Parser(description="Tokenize documents into PREFIX.bin, .idx and .json.", epilog=EPILOG)
    add = parser.add_argument_group("input").add_argument
    kinds = ".jsonl or .json lines (also .gz, .zst), .parquet, .txt; folders or patterns"
    add("--input", dest="inputs", **MANY, required=True, metavar="PATH", help=kinds)
    add("--json-key", dest="text_field", default="text", help="field or column of the text (default: %(default)s)")
    chat = "chat data: the field of a list of {role, content}, rendered by the tokenizer's chat template; only the "
    chat += "assistant's tokens are trained, by PREFIX.mask.npy (default without a name: %(const)s)"
    add("--messages-field", nargs="?", const="messages", metavar="FIELD", help=chat)
    add(
        "--concat-by", metavar="FIELD", help="join all texts with the same value, such as a repository's, in a document"
    )
    add("--source-field", metavar="FIELD", help="keep each document's source, the value of this field, for packing")
    add("--skip-bad-lines", action="store_true", help="leave bad documents out instead of stopping")
    limit = "of a line, a .txt file or a joined document; longer ones are bad (default: %(default)s)"
    add("--max-document-bytes", type=positive, default=MAX_DOCUMENT_BYTES, metavar="N", help=limit)

    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", required=True, metavar="PREFIX")
    kinds = "folder with tokenizer.json (convert_tokenizer.py makes one of other files), or bytes"
    add("--tokenizer-model", dest="tokenizer", required=True, metavar="TOKENIZER", help=kinds)
    eod = "end documents with an EOD (default: texts, not chats, whose template ends them)"
    add("--append-eod", action=argparse.BooleanOptionalAction, default=None, help=eod)
    bos = "begin documents with a BOS, unless their first token is one"
    add("--prepend-bos", "--append-bos", action=argparse.BooleanOptionalAction, default=False, help=bos)
    add("--bos-token", help="the token that documents begin with (default: the tokenizer's)")
    add("--eod-token", help="the end-of-document token (default: the tokenizer's)")
    add("--split-sentences", action="store_true", help="make each sentence a sequence of its document (nltk)")
    add("--lang", dest="language", default="english", help="language of the sentences (default: %(default)s)")
    add("--min-tokens", type=positive, default=1, metavar="N", help="leave out documents with fewer tokens")
    add("--max-tokens", type=positive, metavar="N", help="leave out documents with more tokens")

    add = parser.add_argument_group("processing").add_argument
    add("--workers", type=positive, default=1, help="processes; the output does not depend on them (default: 1)")
    kinds = "library that encodes texts; auto: gigatoken, which is faster, where it is installed and gives the same ids"
    add("--encoder", choices=ENCODERS, default="auto", help=kinds)
    add("--resume", action="store_true", help="skip what an interrupted run has finished")
    add("--overwrite", action="store_true", help="replace an existing PREFIX, and discard an unfinished run")
    add(
        "--shard-bytes", type=positive, metavar="N", help="input per shard, the unit of --resume (default: by its size)"
    )
    return PreprocessOptions(**vars(parser.parse_args(argv)))


def print_report(prefix: str, report: Report) -> None:
    """Print what was written and what was skipped, with reasons."""
    for problem in report.problems:
        print(f"skipped {problem}")
    metadata = read_metadata(prefix)
    print(f"{'tokens':>14} {'documents':>14} {'share':>7} {'tokens':>18} {'share':>7}")
    for row in metadata["lengths"]:
        documents = f"{row['documents']:>14,} {row['share_of_documents']:>7.1%}"
        print(f"{row['length']:>14} {documents} {row['tokens']:>18,} {row['share_of_tokens']:>7.1%}")
    if report.reused:
        print(f"resumed: {report.reused:,} shards were finished before")
    if report.empty:
        print(f"left out: {report.empty:,} empty documents")
    if report.too_short or report.too_long:
        print(f"left out: {report.too_short:,} documents with too few tokens, {report.too_long:,} with too many")
    if report.unanswered:
        print(f"left out: {report.unanswered:,} conversations without an assistant's message")
    if report.trained:
        print(f"trained: {report.trained:,} tokens of assistants")
    print(f"encoded by {metadata['encoder']}")
    print(f"{prefix}: {report.documents:,} documents, {report.tokens:,} tokens, {report.skipped:,} skipped")


@command
def main(argv: list[str]) -> int:
    options = parse_options(argv)
    try:
        print_report(options.output_prefix, preprocess(options))
    except KeyboardInterrupt:
        print("interrupted; --resume continues from what is finished", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
