"""Convert Hugging Face or Megatron-LM <-> our checkpoints, bit for bit, in one process; and compare the former.

python tools/convert_checkpoint.py hf-to-megatron --input MODEL --output RUN
python tools/convert_checkpoint.py megatron-to-hf --input RUN --output MODEL --max-shard-size 2GB
python tools/convert_checkpoint.py megatron-lm-to-megatron --input CHECKPOINT --output RUN
python tools/convert_checkpoint.py megatron-to-megatron-lm --input RUN --output CHECKPOINT
python tools/convert_checkpoint.py verify --input MODEL --output RUN --text passage.txt

MODEL is a Hugging Face folder (Llama, Qwen3, Mistral, ...), RUN a run or checkpoint folder of any parallel layout,
CHECKPOINT a folder of Megatron-LM's --save, or one iter_NNNNNNN in it.
docs/conversion.md describes what is converted, what is refused and the tolerances of `verify`.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import ByteSize, Field, TypeAdapter

from megatron_ext.cli import MANY, Parser, command, integer, positive
from megatron_ext.errors import UserError


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def subcommand(name: str, help: str) -> Callable[..., Any]:
        add = commands.add_parser(name, help=help, description=help).add_argument
        add("--input", required=True, type=Path, metavar="FOLDER")
        add("--output", required=True, type=Path, metavar="FOLDER")
        return add

    add = subcommand("hf-to-megatron", "write a run folder for --init-from")
    text = "pad the embedding up to a multiple of this [128]"
    add("--make-vocab-size-divisible-by", type=integer(1, 2**24), default=128, metavar="N", help=text)

    add = subcommand("megatron-to-hf", "write a folder that transformers loads")
    add("--max-shard-size", type=size, default="2GB", metavar="SIZE", help="of one file [2GB]")
    add("--tokenizer", metavar="FOLDER", help="folder with the tokenizer, or none [the run's own]")

    add = subcommand("megatron-lm-to-megatron", "read a torch_dist checkpoint of Megatron-LM, write a run folder")
    add("--iteration", type=integer(0), metavar="N", help="of a folder with several checkpoints [the newest]")
    text = "arguments that this version does not know and that do not change the model"
    add("--accept", **MANY, default=[], metavar="NAME", help=text)
    text = "also Adam's state, step, batches and schedule, for --load"
    add("--with-optimizer", action="store_true", help=text)
    subcommand("megatron-to-megatron-lm", "write a torch_dist checkpoint for Megatron-LM, print its flags")

    add = subcommand("verify", "run both on a text and compare logits, loss and greedy text")
    add("--text", type=Path, metavar="FILE", help="UTF-8 [pages of Python's manual]")
    add("--tokens", type=positive, default=512, metavar="N", help="of the text [512]")
    add("--greedy-tokens", type=integer(0), default=16, metavar="N", help="to continue the text by, on both sides [16]")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both computations [float32]")
    add("--tokenizer", type=Path, metavar="FOLDER", help="folder with the tokenizer [the Hugging Face folder]")
    return parser.parse_args(argv)


def size(text: str) -> int:
    """Parse a number of bytes, at least 1, such as 2GB or 500MB."""
    return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)


def verify(options: argparse.Namespace) -> bool:
    """Print the differences between two models; return whether they are within the tolerance."""
    from megatron_ext.checkpoint.hf.folder import is_hugging_face  # importing torch takes seconds
    from megatron_ext.checkpoint.pretrained import Pretrained
    from megatron_ext.evaluation.model_text import ModelText

    folders = (options.input, options.output)
    hugging_face = [folder for folder in folders if is_hugging_face(folder)]
    runs = [folder for folder in folders if folder not in hugging_face]
    if len(hugging_face) != 1:
        raise UserError(
            "verify: needs one Hugging Face folder and one run or checkpoint folder as --input and --output"
        )
    text = ModelText.of(Pretrained.find(hugging_face[0]), options.tokenizer and str(options.tokenizer))
    tokens = text.encode(text_of(options.text))[: options.tokens + 1]
    if len(tokens) < 2:
        raise UserError(f"text: got {len(tokens)} token ids, needs at least 2; give a longer text")
    from megatron_ext.inference.compare import compare  # importing Megatron and transformers takes seconds

    gap = compare(hugging_face[0], runs[0], tokens, options.dtype, options.greedy_tokens)
    print(f"{len(tokens) - 1} tokens in {options.dtype}, logits up to {gap.scale:.4g} in size")
    print(f"logits   largest difference {gap.largest:.3g} of {gap.allowed[0]:.3g} allowed")
    print(f"         mean difference    {gap.mean:.3g} of {gap.allowed[1]:.3g} allowed")
    print(f"loss     {gap.losses[0]:.8f} transformers, {gap.losses[1]:.8f} Megatron, {gap.allowed[2]:g} allowed")
    for name, ids in zip(("transformers", "Megatron"), gap.greedy, strict=True):
        greedy = str(ids)
        if max(ids, default=0) < text.tokenizer.vocab_size:  # a model may have more ids
            greedy = repr(text.tokenizer.decode(ids))
        print(f"greedy   {greedy} {name}")
    print("the same model" if gap.agrees else "NOT the same model")
    return gap.agrees


def text_of(path: Path | None) -> str:
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"text: {path} is no UTF-8 ({error.reason} at byte {error.start}); convert it") from None
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in ("objects", "execmodel", "exceptions"))


@command
def main(argv: list[str]) -> int:
    options = parse_options(argv)
    from megatron_ext.checkpoint.hf.convert import hf_to_megatron, megatron_to_hf  # importing torch takes seconds
    from megatron_ext.checkpoint.megatron_lm import megatron_lm_to_megatron, megatron_to_megatron_lm

    began = time.perf_counter()
    if options.command == "verify":
        return int(not verify(options))
    if options.command == "megatron-to-hf":
        limit = options.max_shard_size
        megatron_to_hf(options.input, options.output, max_shard_bytes=limit, tokenizer=options.tokenizer)
    elif options.command == "megatron-lm-to-megatron":
        megatron_lm_to_megatron(
            options.input,
            options.output,
            iteration=options.iteration,
            accepted=options.accept,
            with_optimizer=options.with_optimizer,
        )
    elif options.command == "megatron-to-megatron-lm":
        words = megatron_to_megatron_lm(options.input, options.output)
        print(f"Megatron-LM loads it with {shlex.join(words)}")
    else:
        hf_to_megatron(options.input, options.output, divisible_by=options.make_vocab_size_divisible_by)
    print(f"{options.output}: written in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
