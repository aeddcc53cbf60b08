"""Continue prompts, or chat, with a run, a checkpoint of any layout or a Hugging Face folder.

python tools/generate.py MODEL --prompt "Once upon a time" --max-new-tokens 200
python tools/generate.py MODEL --input prompts.jsonl --output answers.jsonl --batch-size 16
python tools/generate.py MODEL --chat --temperature 0.7 --top-p 0.9

Decoding is greedy unless --temperature, --top-k or --top-p is given. The trainer's parallel flags
(--tensor-model-parallel-size, --device, --attention-backend, ...) are accepted too; data- and context-parallel
processes share the prompts.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.cli import MANY, Parser, add_model_flags, check_new, command, integer, output_file, positive
from megatron_ext.config.arguments import parse_processes
from megatron_ext.errors import UserError
from megatron_ext.inference.options import GenerateOptions
from megatron_ext.launch import is_first, read_launch

if TYPE_CHECKING:
    from megatron_ext.inference.sampling import Sampling


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="run, checkpoint or Hugging Face folder")
    add("--prompt", **MANY, metavar="TEXT", help="texts to continue; with --chat the user's turns in order")
    add("--input", **MANY, metavar="FILE", help=".jsonl, .txt, .parquet files whose texts are prompts")
    add("--json-key", default="text", metavar="FIELD", help="field of --input that holds the text [text]")
    add("--chat", action="store_true", help="chat by the tokenizer's template; turns are --prompt or lines of stdin")
    add("--system", metavar="TEXT", help="system message of --chat")
    add("--max-new-tokens", type=positive, default=128, metavar="N", help="tokens to generate at most [128]")
    add("--temperature", type=float, metavar="T", help="sample with logits divided by T [greedy]")
    add("--top-k", type=positive, metavar="K", help="sample among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="sample among the likeliest tokens of probability P together")
    add("--seed", type=integer(0), default=1234, help="seed; each prompt has its own random numbers [1234]")
    add("--batch-size", type=positive, default=8, metavar="N", help="texts at a time on each copy of the model [8]")
    text = "write a .jsonl instead of text, one line for each prompt"
    add("--output", type=output_file(".jsonl"), metavar="FILE", help=text)
    add("--overwrite", action="store_true", help="replace an existing output")
    add_model_flags(parser)
    return parser.parse_known_args(argv)


def check(options: argparse.Namespace) -> "Sampling":
    """Check the options before any model is read; return the sampling options.

    Raises:
        UserError: incompatible options, or an output that exists.
    """
    if options.chat and (options.input is not None or options.output is not None):
        raise UserError("chat: got --input or --output; --chat reads turns from --prompt or standard input")
    if not options.chat and (options.prompt is None) == (options.input is None):
        raise UserError("prompt, input: needs one of the two; give --prompt TEXT, --input FILE, or --chat")
    if options.system is not None and not options.chat:
        raise UserError("system: needs --chat; add it, or write the text into the prompt")
    if options.output is not None:
        check_new(options.output, options.overwrite)
    from megatron_ext.inference.sampling import Sampling  # importing torch takes seconds

    return Sampling(options.temperature, options.top_k, options.top_p, options.seed)


@command
def main(argv: list[str]) -> int:
    options, flags = parse_options(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING if is_first() else logging.ERROR)
    read_launch()
    sampling = check(options)
    processes = parse_processes(flags)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    from megatron_ext.inference.generate import generate_text  # importing Megatron takes seconds

    generate_text(GenerateOptions.of(options), processes, sampling)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
