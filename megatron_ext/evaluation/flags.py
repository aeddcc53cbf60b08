"""Flags of the commands that read trained models. Importing this module does not import torch."""

import argparse


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ModelText.of` and the dtype of the computation."""
    add = parser.add_argument
    add("--tokenizer", metavar="FOLDER", help="tokenizer of another folder [each model's own]")
    add("--eod-token", metavar="TOKEN", help="token that ends a text [the tokenizer's]")
    add("--bos", action="store_true", help="begin texts with the bos_token_id of a Hugging Face folder")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 on cuda, else float32")
