"""The flags by which a command says how finished models are read; importing this imports no torch."""

from __future__ import annotations

import argparse


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add what `ModelText.of` asks of a model's text, and the type that it computes in."""
    add = parser.add_argument
    add("--tokenizer", metavar="FOLDER", help="of another folder [each model's own]")
    add("--eod-token", metavar="TOKEN", help="that ends a text [the tokenizer's]")
    add("--bos", action="store_true", help="begin texts with the bos_token_id of a Hugging Face folder")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 on cuda, else float32")
