"""Convert a SentencePiece or tiktoken file to the tokenizer.json that all other commands read.

python tools/convert_tokenizer.py --input llama2/tokenizer.model --output tokenizers/llama2
python tools/convert_tokenizer.py --input llama3/tokenizer.model --encoding llama3 --output tokenizers/llama3

A tiktoken file contains neither special tokens nor the pattern that splits a text. They come from --encoding, or from
FILE.json beside it: {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}. The command fails unless the
result gives the ids of the original library on the check texts; segmentations of the same score are equally good.
"""

import base64
import math
import operator
import random
import re
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

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
# the tokenizer, its special tokens by their names in tokenizer_config.json, the original library's encoder, and a
# function that returns whether two encodings of a text are equally good
Converted = tuple[tokenizers.Tokenizer, dict[str, str], Callable[[str], list[int]], Callable[..., bool]]


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
    return converted, roles, encoder.encode_ordinary, operator.eq


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
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
        from transformers.convert_slow_tokenizer import generate_merges
    except ImportError:
        raise missing_package(f"input: {file}", "sentencepiece transformers protobuf") from None
    try:
        model = SentencePieceProcessor(model_proto=file.read_bytes())
    except RuntimeError:
        raise UserError(f"input: {file} is not a SentencePiece model; export it again") from None
    proto = ModelProto.FromString(file.read_bytes())
    kind, settings, fallback = ModelProto.SentencePiece, proto.normalizer_spec, proto.trainer_spec.byte_fallback
    names = [piece.piece for piece in proto.pieces]
    normal = {piece.piece: piece.score for piece in proto.pieces if piece.type == kind.NORMAL}
    symbols = [piece.piece for piece in proto.pieces if piece.type == kind.USER_DEFINED]
    unknown = [piece.type for piece in proto.pieces].index(kind.UNKNOWN)  # the trainer's settings may name another
    library: Any
    if unigram := proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
        best = max([0, *normal.values()])
        scores = normal | {name: len(name.encode()) * best - 0.1 for name in symbols}  # as SentencePiece itself
        library = models.Unigram([(name, scores.get(name, UNLIKELY)) for name in names], unknown, fallback)
        # separates unknown characters, which are less likely than a control piece that a text spells
        splits = [f"[^{re.escape(''.join(sorted(set().union(*scores))))}]+"]
    else:
        ids = {name: number for number, name in enumerate(names)}
        merges = generate_merges({name: ids[name] for name in normal}, normal)
        library = models.BPE(ids, merges, unk_token=names[unknown], fuse_unk=True, byte_fallback=fallback)
        splits = _isolate(symbols, library, names) if symbols else []
    converted = tokenizers.Tokenizer(library)
    converted.add_special_tokens([piece.piece for piece in proto.pieces if piece.type == kind.CONTROL])
    steps: list[Any] = []
    if settings.precompiled_charsmap:
        # the library would normalize only the beginning of a letter with several accents, or of "\r\n"
        if settings.name.startswith("nmt_"):
            steps.append(normalizers.Replace("\r\n", "  "))
        if "nfkc" in settings.name:
            steps.append(normalizers.NFKC())
        steps.append(normalizers.Precompiled(settings.precompiled_charsmap))
    if settings.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"\A (?:[ ▁]*\z)?|(?<![ ▁])[ ▁]+\z"), ""))
    strip = []
    if settings.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
        strip.append(decoders.Strip(" ", left=1))
    converted.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    converted.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), "isolated") for one in splits])
    converted.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    roles = {"unk_token": unknown, "bos_token": model.bos_id(), "eos_token": model.eos_id()}
    special = {role: model.id_to_piece(number) for role, number in roles.items() if number >= 0}

    def same(ours: list[int], theirs: list[int]) -> bool:
        """Return whether two segmentations have the same score, up to the rounding of SentencePiece's floats."""
        spelled = {"".join(model.id_to_piece(ids)) for ids in (ours, theirs)}
        scores = [sum(model.get_score(ids)) for ids in (ours, theirs)]
        return unigram and len(spelled) == 1 and math.isclose(*scores, rel_tol=1e-5)

    return converted, special, model.encode, same


def _isolate(symbols: list[str], library: Any, names: list[str]) -> list[str]:
    """Return patterns that separate user-defined symbols, which `library` then takes as they are (`ignore_merges`).

    A text between two symbols may spell a piece that merges do not reach, such as a control piece: "</s>" is separated
    after its first part.
    """
    cuts = []
    for name in set(names).difference(symbols):
        end = library.tokenize(name)[0].offsets[1]  # in bytes; a character may be several tokens
        first = name.encode()[:end].decode(errors="ignore") or name[0]
        if first != name:
            cuts.append(f"{re.escape(first)}(?={re.escape(name[len(first) :])}\\z)")
    library.ignore_merges = True
    return ["|".join(map(re.escape, sorted(symbols, key=len, reverse=True))), rf"\G(?:{'|'.join(sorted(cuts))})"]


def check_texts(tokenizer: Tokenizer) -> Iterable[str]:
    """Yield texts that use the whole vocabulary, separately and mixed, and odd ones."""
    draw = random.Random(0)
    tokens = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
    yield from ("", "\n\n \t", "  a  b ", "a\r\nb\n\nc", " \u2581 ", "\xa0\u200bx\ufeff\x01", "\uff1c \uff76\uff9e")
    yield "naïve e\u0302\u0301 \uff41\u0301 \xbd 😀👩\u200d👧 漢字 שלום عليكم क्षत्रिय ไทยภาษา 한국어 \u1112\u1161\u11ab"
    yield from (character * 5000 for character in " a\n1!é")
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
    converted, special, original, same = (
        convert_tiktoken(args.input, args.encoding) if is_tiktoken else convert_sentencepiece(args.input)
    )
    tokenizer = write_tokenizer(converted, args.output, **special)
    texts = chain(check_texts(tokenizer), (document.text for document in read_documents(args.check)))
    compared = ties = 0
    for text in texts:
        ours, theirs = tokenizer.encode(text), original(text)
        compared, ties = compared + 1, ties + (ours != theirs)
        if ours != theirs and not same(ours, theirs):
            tokenizer.file.unlink()
            raise UserError(f"input: the converted tokenizer gives other ids of {text[:80]!r}; it cannot be used")
    found = f"{compared - ties:,} texts have the original's ids" + f", {ties:,} others of the same score" * bool(ties)
    print(f"{tokenizer.file}: {tokenizer.vocab_size:,} tokens, {special}; {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
