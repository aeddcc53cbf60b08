"""Draw one packed row: its documents, segments, the rank of each token, and the keys and values exchanged.

python tools/inspect_pack.py --document-ends 3 10 --seq-length 12 --window 4 --context-parallel-size 2
python tools/inspect_pack.py --data-path data/smoke/corpus --seq-length 4096 --sample 7 --window 512 \\
    --context-parallel-size 4 --output row.png

Or compare the tokens that packing policies keep, cut and pad for a dataset (- for all except bm25, which is slow):

python tools/inspect_pack.py --data-path data/smoke/corpus --seq-length 4096 --policies -
"""

import argparse
import sys

from megatron_ext.cli import MANY, Parser, command, integer, output_file, positive
from megatron_ext.config import Config, DataConfig, TrainingConfig
from megatron_ext.config.arguments import parse
from megatron_ext.context_parallel import Policy
from megatron_ext.data.packing.policies import POLICIES, build_plan
from megatron_ext.data.packing.report import describe, report
from megatron_ext.errors import UserError
from megatron_ext.inspect.pack_view import describe as describe_row
from megatron_ext.inspect.pack_view import view_row, write_pack


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    row = parser.add_argument_group("the row").add_mutually_exclusive_group(required=True)
    row.add_argument("--document-ends", type=int, nargs="*", metavar="END", help="a row by hand: exclusive ends")
    row.add_argument("--data-path", **MANY, metavar="PREFIX", help="a row of .bin/.idx, as the training draws it")
    add = parser.add_argument
    add("--seq-length", type=positive, required=True, metavar="L", help="tokens of the row")
    data = parser.add_argument_group("with --data-path").add_argument
    data("--sample", type=integer(0), default=0, metavar="N", help="training sample, from 0 (default: 0)")
    data("--seed", type=int, default=TrainingConfig.seed, help="of the data order (default: %(default)s)")
    data(
        "--split", default=DataConfig.split, help="shares of the documents for train,valid,test (default: %(default)s)"
    )
    data("--tokenizer-model", metavar="TOKENIZER", help="the one that the data was made with")
    data("--policies", **MANY, metavar="NAME", help="compare packing policies instead; - for all but bm25")
    data("--text", action="store_true", help="show the text of each token of a short row")
    add("--window", type=positive, metavar="W", help="of the grid (default: the whole row)")
    mask = "attention stays inside a document: here by default, in training by option"
    add("--document-mask", action=argparse.BooleanOptionalAction, default=True, help=mask)
    add("--context-parallel-size", type=positive, default=1, metavar="C", help="ranks that share the row (default: 1)")
    add("--cp-policy", default="auto", choices=[policy.value for policy in Policy], help="default: %(default)s")
    add("--output", type=output_file(".png"), metavar="PNG", help="draw a picture as well")
    options = parser.parse_args(argv)
    source = "--document-ends"
    unread = "--sample --seed --split --tokenizer-model --policies --text"
    if options.policies:
        if options.data_path is None:
            parser.error("--policies: needs --data-path PREFIX, whose documents they pack")
        source = "--policies"
        unread = "--sample --text --window --document-mask --context-parallel-size --cp-policy --output"
    elif options.data_path is not None:
        return options
    for word in argv:
        if word.split("=")[0].replace("--no-", "--") in unread.split():
            parser.error(f"{word}: {source} does not read it; leave one of them out")
    return options


def config_of(options: argparse.Namespace) -> Config:
    words = ["--seq-length", options.seq_length, "--split", options.split, "--seed", options.seed]
    if options.tokenizer_model:
        words += ["--tokenizer-model", options.tokenizer_model]
    return parse([*map(str, words), "--data-path", *options.data_path])


def read_row(options: argparse.Namespace) -> tuple[list[int], list[str] | None]:
    """Read a row of the dataset with the trainer's code: its document ends and, if requested, its tokens' texts."""
    from megatron_ext.data.text.tokenizer import Tokenizer, token_texts
    from megatron_ext.run.identity import checked_vocab_size  # importing torch takes seconds
    from megatron_ext.run.inputs import open_rows

    if options.text and not options.tokenizer_model:
        raise UserError("text: got no tokenizer to decode tokens with; give --tokenizer-model or leave --text out")
    config = config_of(options)
    vocab_size = sys.maxsize
    if options.tokenizer_model:
        vocab_size = checked_vocab_size(config)
    row = open_rows(config, vocab_size).row(options.sample)
    ends = row.document_ends.tolist()
    if not options.text:
        return ends, None
    return ends, token_texts(Tokenizer(options.tokenizer_model), row.tokens[:-1].tolist())


def compare(options: argparse.Namespace) -> str:
    """Return a line for each policy: what it keeps, cuts and pads of the training split, and the keys of a token."""
    from megatron_ext.run.inputs import splits

    if len(options.data_path) != 1:
        raise UserError(f"data_path: got {len(options.data_path)} words, needs one PREFIX to compare policies of")
    (split,) = splits(config_of(options), sys.maxsize, 0)
    every = options.policies == ["-"]
    policies = options.policies
    if every:
        policies = [policy for policy in POLICIES if policy != "bm25"]
    reports = {}
    refused = []
    for name in policies:
        try:
            plan = build_plan(name, split.source, split.documents, options.seq_length, split.seed)
        except UserError as error:
            if not every:
                raise
            refused.append(f"{name:<15} {error}")
            continue
        reports[name] = report(plan, split.source, split.documents)
    return "\n".join([*refused, describe(reports)])


@command
def main(argv: list[str]) -> int:
    options = parse_options(argv)
    if options.policies:
        print(compare(options))
        return 0
    ends = options.document_ends
    texts = None
    if options.data_path is not None:
        ends, texts = read_row(options)
    view = view_row(
        options.seq_length,
        ends,
        window=options.window,
        document_mask=options.document_mask,
        cp_size=options.context_parallel_size,
        policy=options.cp_policy,
    )
    print(describe_row(view, texts))
    if options.output is not None:
        print(f"\n{write_pack(view, options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
