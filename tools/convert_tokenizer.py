"""Convert a SentencePiece or tiktoken file to the tokenizer.json that all other commands read.

python tools/convert_tokenizer.py --input llama2/tokenizer.model --output tokenizers/llama2
python tools/convert_tokenizer.py --input llama3/tokenizer.model --encoding llama3 --output tokenizers/llama3

A tiktoken file contains neither special tokens nor the pattern that splits a text. They come from --encoding, or from
FILE.json beside it: {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}. The command fails unless the
result gives the ids of the original library on the check texts.
"""

import base64
import random
import re
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tokenizers

from megatron_ext.cli import Parser, command
from megatron_ext.data.text.documents import read_documents
from megatron_ext.data.text.tokenizer import (
    KNOWN_BOS_TOKENS,
    KNOWN_EOD_TOKENS,
    Tokenizer,
    check_new_tokenizer,
    write_tokenizer,
)
from megatron_ext.errors import UserError, first_line, missing_package
from megatron_ext.files.reading import read_object

TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
# from Llama 3's own code: the pattern of GPT-4, and 256 special tokens after the ranks
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(4))),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)
# three reserved tokens that Llama 3.1 names
LLAMA31_NAMES = {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
UNLIKELY = -1e5  # a score below that of any text
# the tokenizer, its special tokens by their names in tokenizer_config.json, and the original library's encoder
Converted = tuple[tokenizers.Tokenizer, dict[str, str], Callable[[str], list[int]]]


def convert_tiktoken(file: Path, encoding: str | None) -> Converted:
    """Convert a file of lines "BASE64 RANK"; raise UserError if it is none, or its special tokens are unknown."""
    try:
        import tiktoken
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError:
        raise missing_package(f"input: {file}", "tiktoken transformers") from None
    try:
        pairs = (line.split() for line in file.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError:
        ranks = {}
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(
            f"input: {file} is not a tiktoken file (lines of BASE64 RANK, ranks 0, 1, ...); export it again"
        )
    pattern, special = _description(file, len(ranks), encoding)
    try:
        encoder = tiktoken.Encoding(file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        converter = TikTokenConverter(str(file), pattern)
        with patch.object(converter, "load_tiktoken_bpe", lambda _: ranks):
            converted = converter.converted()
    except Exception as error:  # raised by both libraries: an invalid regular expression, ids that are not numbers
        raise UserError(f"input: {file}.json is wrong ({first_line(error)}); correct it") from None
    converted.post_processor = None  # only trims offsets
    names = {number: name for name, number in special.items()}
    if min(names, default=len(ranks)) < len(ranks):
        raise UserError(f"input: {file}.json has special tokens with ids below {len(ranks)}, which are taken")
    # the library numbers added tokens consecutively, so unused ids are filled
    for number in range(len(ranks), max(names, default=-1) + 1):
        converted.add_special_tokens([names.get(number, f"<|unused_{number}|>")])
    known = {"eos_token": KNOWN_EOD_TOKENS, "bos_token": KNOWN_BOS_TOKENS}
    roles = {role: name for role, tokens in known.items() for name in reversed(tokens) if name in special}
    return converted, roles, encoder.encode_ordinary


def _description(file: Path, ranks: int, encoding: str | None) -> tuple[str, dict[str, int]]:
    """Return the pattern and the special tokens."""
    if encoding is not None:
        changed = LLAMA31_NAMES if encoding == "llama3.1" else {}
        return LLAMA3_PATTERN, {changed.get(i, token): ranks + i for i, token in enumerate(LLAMA3_SPECIAL)}
    about = file.with_name(f"{file.name}.json")
    needed = 'needs {"pattern": "...", "special_tokens": {"...": ID}}'
    given = read_object(about, f"is no object; {needed}")
    if given is None:
        raise UserError(f"input: {file} does not say its special tokens; give --encoding, or write {about}: {needed}")
    pattern, special = given.get("pattern"), given.get("special_tokens")
    if not isinstance(pattern, str) or not isinstance(special, dict):
        raise UserError(f"input: {about} {needed}")
    return pattern, special


def convert_sentencepiece(file: Path) -> Converted:
    try:
        from sentencepiece import SentencePieceProcessor
        from tokenizers import AddedToken, Regex, decoders, normalizers
        from transformers.convert_slow_tokenizer import SentencePieceExtractor, SpmConverter
    except ImportError:
        raise missing_package(f"input: {file}", "sentencepiece transformers protobuf") from None
    try:
        model = SentencePieceProcessor(model_proto=file.read_bytes())
    except RuntimeError:
        raise UserError(f"input: {file} is not a SentencePiece model; export it again") from None
    extractor = SentencePieceExtractor(str(file))
    proto, parts = extractor.proto, extractor.extract(None)
    vocab = parts["vocab"]
    if isinstance(vocab, list):  # a unigram model: text that spells a control piece must not become that piece
        vocab = [
            (name, UNLIKELY if piece.type in (2, 3, 6) else score)
            for (name, score), piece in zip(vocab, proto.pieces, strict=True)
        ]
    converted = SpmConverter.build_tokenizer_from_spm_proto(proto, vocab, parts.get("merges"))
    added = parts["additional_special_tokens"]
    converted.add_tokens([AddedToken(one.content, normalized=False, special=one.special) for one in added])
    settings = proto.normalizer_spec
    steps: list[Any] = []
    if settings.precompiled_charsmap:
        steps.append(normalizers.Precompiled(settings.precompiled_charsmap))
    if settings.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    strip = []
    if settings.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
        strip.append(decoders.Strip(" ", left=1))
    converted.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    converted.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    ids = {"unk_token": model.unk_id(), "bos_token": model.bos_id(), "eos_token": model.eos_id()}
    special = {role: model.id_to_piece(number) for role, number in ids.items() if number >= 0}
    return converted, special, lambda text: model.encode(text)


def check_texts(tokenizer: Tokenizer) -> Iterable[str]:
    """Yield texts that use the whole vocabulary, separately and mixed, and runs of one character."""
    draw = random.Random(0)
    tokens = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
    yield from ("", " ", "\n\n \t", "naïve café 😀 漢字 שלום", *(character * 5000 for character in " a\n1!é"))
    for start in range(0, len(tokens), 64):
        yield "".join(tokens[start : start + 64])
        yield "".join(draw.choices(tokens, k=64))
        yield " ".join(draw.choices(tokens, k=32))


@command
def main(argv: list[str]) -> int:
    parser = Parser(description="Convert a SentencePiece or tiktoken file to FOLDER/tokenizer.json.")
    add = parser.add_argument
    add("--input", required=True, type=Path, metavar="FILE", help="SentencePiece .model or tiktoken file")
    add("--encoding", choices=("llama3", "llama3.1"), help="the special tokens and the pattern of a tiktoken file")
    add("--output", required=True, type=Path, metavar="FOLDER")
    add("--check", nargs="+", default=[], metavar="PATH", help="documents to compare ids on as well")
    add("--overwrite", action="store_true", help="replace an existing tokenizer")
    args = parser.parse_args(argv)
    check_new_tokenizer(args.output, args.overwrite)
    with args.input.open("rb") as file:  # Llama 3's tokenizer.model is a tiktoken file, Llama 2's a SentencePiece model
        is_tiktoken = args.input.suffix == ".tiktoken" or TIKTOKEN_LINE.fullmatch(file.readline(4096))
    if args.encoding and not is_tiktoken:
        raise UserError(
            f"encoding: {args.input} is no tiktoken file, and names its special tokens itself; leave it out"
        )
    converted, special, original = (
        convert_tiktoken(args.input, args.encoding) if is_tiktoken else convert_sentencepiece(args.input)
    )
    tokenizer = write_tokenizer(converted, args.output, **special)
    texts = chain(check_texts(tokenizer), (document.text for document in read_documents(args.check)))
    compared = 0
    for text in texts:
        compared += 1
        if tokenizer.encode(text) != original(text):
            tokenizer.file.unlink()
            raise UserError(f"input: the converted tokenizer gives other ids of {text[:80]!r}; it cannot be used")
    print(f"{tokenizer.file}: {tokenizer.vocab_size:,} tokens, {special}; {compared:,} texts have the original's ids")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
