"""Convert a SentencePiece, tiktoken or tekken file to the tokenizer.json that all other commands read.

python tools/convert_tokenizer.py --input llama2/tokenizer.model --output tokenizers/llama2
python tools/convert_tokenizer.py --input llama3/tokenizer.model --encoding llama3 --output tokenizers/llama3
python tools/convert_tokenizer.py --input mistral/tekken.json --output tokenizers/mistral

A tiktoken file contains neither special tokens nor the pattern that splits a text. They come from --encoding, or from
FILE.json beside it: {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}. transformers' converters make the
model; the command fails unless it gives the ids of SentencePiece or tiktoken on the check texts. Segmentations of the
same score are equally good.
"""

import base64
import json
import math
import operator
import random
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from megatron_ext.cli import MANY, Parser, command
from megatron_ext.data.text.documents import read_documents
from megatron_ext.data.text.tokenizer import (
    KNOWN_BOS_TOKENS,
    KNOWN_EOD_TOKENS,
    Tokenizer,
    check_new_tokenizer,
    write_tokenizer,
)
from megatron_ext.errors import UserError, echo, library_errors, missing_package, optional_module
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
# Llama 3.1 names three more tokens, and numbers the reserved ones without gaps
LLAMA31_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(3, 248))),
)
SPECIAL = {"llama3": LLAMA3_SPECIAL, "llama3.1": LLAMA31_SPECIAL}
MOST_IDS = 1 << 24
UNLIKELY = -1e5  # a score below any text's
# a text between two user-defined symbols that spells a byte's piece, which would be taken for the byte
SPELLED_BYTE = r"\G<(?=0x[0-9A-F]{2}>\z)"
# the tokenizer, its special tokens by their names in tokenizer_config.json, the original library's encoder, and a
# function that returns whether two encodings of a text are equally good
Converted = tuple[tokenizers.Tokenizer, dict[str, str], Callable[[str], list[int]], Callable[..., bool]]


def _errors(what: str) -> AbstractContextManager[None]:
    """Return a context in which errors of the libraries are reported as errors of the input."""
    return library_errors(lambda reason: UserError(f"input: {what} ({reason}); export it again"))


def convert_tiktoken(file: Path, encoding: str | None) -> Converted:
    """Convert a file of lines "BASE64 RANK"; raise UserError if it is none, or its special tokens are unknown."""
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
    with _errors(f"{file}.json is wrong"):
        return _convert_ranks(file, ranks, pattern, special)


def convert_tekken(file: Path) -> Converted:
    """Convert a tekken.json: ids are its special tokens' ranks, then its other tokens' ranks, as in mistral-common."""
    with _errors(f"{file} is not a tekken.json"):
        about = json.loads(file.read_bytes())
        config = about["config"]
        special_tokens = about.get("special_tokens")
        count = config["default_num_special_tokens"]
        tokens = about["vocab"][: config["default_vocab_size"] - count]
        ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in tokens}
        if special_tokens is None:  # as in the first such files
            what = f"input: {file}, which does not name its special tokens,"
            library = optional_module(what, "mistral_common.tokens.tokenizers.tekken", "mistral-common")
            special_tokens = library.Tekkenizer.DEPRECATED_SPECIAL_TOKENS
        names = {token["rank"]: str.__str__(token["token_str"]) for token in special_tokens}
        special = {names.get(number, f"<SPECIAL_{number}>"): number for number in range(count)}
        if sorted(ranks.values()) != list(range(len(tokens))) or len(special) != count or max(names) >= count:
            raise ValueError("its ranks are not 0, 1, ...")
        return _convert_ranks(file, ranks, config["pattern"], special, first=count)


def _convert_ranks(
    file: Path, ranks: dict[bytes, int], pattern: str, special: dict[str, int], first: int = 0
) -> Converted:
    """Convert tokens of which rank 0 has the id `first`; special tokens have the ids before or after all of them."""
    try:
        import regex
        import tiktoken
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError:
        raise missing_package(f"input: {file}", "tiktoken transformers") from None
    if regex.search(pattern, ""):  # tiktoken would panic
        raise ValueError(f"the pattern {echo(pattern)} matches the empty text")
    encoder = tiktoken.Encoding(file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    converter = TikTokenConverter(file, pattern)
    converter.load_tiktoken_bpe = lambda _: {token: first + rank for token, rank in ranks.items()}
    vocabulary, merges = converter.extract_vocab_merges_from_model(file)
    vocabulary |= {name: number for name, number in special.items() if number < first}
    converter.extract_vocab_merges_from_model = lambda _: (vocabulary, merges)
    converted = converter.converted()
    converted.post_processor = None  # only trims offsets
    names = {number: name for name, number in special.items()}
    # the library numbers further tokens consecutively, so unused ids are filled
    numbers = chain(range(first), range(first + len(ranks), max(names, default=-1) + 1))
    converted.add_special_tokens([names.get(number, f"<|unused_{number}|>") for number in numbers])
    usual = {"eos_token": KNOWN_EOD_TOKENS, "bos_token": KNOWN_BOS_TOKENS}
    roles = {role: name for role, tokens in usual.items() for name in reversed(tokens) if name in special}
    return converted, roles, lambda text: [first + rank for rank in encoder.encode_ordinary(text)], operator.eq


def _description(file: Path, ranks: int, encoding: str | None) -> tuple[str, dict[str, int]]:
    """Return the pattern and the special tokens."""
    if encoding is not None:
        return LLAMA3_PATTERN, {name: ranks + number for number, name in enumerate(SPECIAL[encoding])}
    about = file.with_name(f"{file.name}.json")
    needed = 'needs {"pattern": "...", "special_tokens": {"...": ID}}'
    description = read_object(about, f"is no object; {needed}")
    if description is None:
        raise UserError(f"input: {file} does not say its special tokens; give --encoding, or write {about}: {needed}")
    pattern = description.get("pattern")
    special = description.get("special_tokens")
    if not isinstance(pattern, str) or not isinstance(special, dict):
        raise UserError(f"input: {about} {needed}")
    if not all(type(number) is int and ranks <= number < MOST_IDS for number in special.values()):
        raise UserError(f"input: {about} has special tokens with ids below {ranks}, which are taken, or with no number")
    return pattern, special


def convert_sentencepiece(file: Path) -> Converted:
    """Convert a SentencePiece model of kind BPE or Unigram.

    The normalizer is not transformers', which loses spaces at the beginning and normalizes only a part of a letter with
    several accents, or of "\\r\\n".
    """
    try:
        from sentencepiece import SentencePieceProcessor
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
        from transformers.convert_slow_tokenizer import SpmConverter, generate_merges
    except ImportError:
        raise missing_package(f"input: {file}", "sentencepiece 'transformers>=5.8' protobuf") from None
    model = SentencePieceProcessor()
    with _errors(f"{file} is not a SentencePiece model"):
        model.LoadFromSerializedProto(file.read_bytes())
        proto = ModelProto.FromString(file.read_bytes())
    kind = ModelProto.SentencePiece
    trainer = proto.trainer_spec
    names = [piece.piece for piece in proto.pieces]
    normal = {piece.piece: piece.score for piece in proto.pieces if piece.type == kind.NORMAL}
    symbols = [piece.piece for piece in proto.pieces if piece.type == kind.USER_DEFINED]
    trainer.unk_id = [piece.type for piece in proto.pieces].index(kind.UNKNOWN)  # the settings may name another
    trainer.unk_piece = names[trainer.unk_id]
    unigram = trainer.model_type == trainer.UNIGRAM
    splits = []
    if unigram:
        best = max([0, *normal.values()])
        scores = normal | {name: len(name.encode()) * best - 0.1 for name in symbols}  # as SentencePiece itself
        vocabulary = [(name, scores.get(name, UNLIKELY)) for name in names]
        merges = None
        if trainer.byte_fallback:  # unknown characters are less likely than a byte's piece, if a text spells it
            unknown = set("<0x123456789ABCDEF>").difference(*scores)
            splits += map(re.escape, sorted(unknown))
    else:
        vocabulary = {name: number for number, name in enumerate(names)}
        merges = generate_merges({name: vocabulary[name] for name in normal}, normal)
        if symbols:
            longest_first = sorted(symbols, key=len, reverse=True)
            splits = ["|".join(map(re.escape, longest_first)), SPELLED_BYTE]
    with _errors(f"{file} cannot be converted"):
        converted = SpmConverter.build_tokenizer_from_spm_proto(proto, vocabulary, merges)
        if not unigram:
            converted.model.ignore_merges = bool(symbols)
        converted.normalizer = _normalizer(proto.normalizer_spec)
        converted.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits]
        )
    converted.add_special_tokens([piece.piece for piece in proto.pieces if piece.type == kind.CONTROL])
    if proto.normalizer_spec.add_dummy_prefix:
        converted.decoder = decoders.Sequence([converted.decoder, decoders.Fuse(), decoders.Strip(" ", left=1)])
    roles = {"unk_token": trainer.unk_id, "bos_token": model.bos_id(), "eos_token": model.eos_id()}
    special = {role: model.id_to_piece(number) for role, number in roles.items() if number >= 0}

    def equally_good(*segmentations: list[int]) -> bool:
        """Return whether two segmentations have the same score, up to the rounding of SentencePiece's floats."""
        texts = {"".join(model.id_to_piece(ids)) for ids in segmentations}
        scores = [sum(model.get_score(ids)) for ids in segmentations]
        return unigram and len(texts) == 1 and math.isclose(*scores, rel_tol=1e-5)

    return converted, special, model.encode, equally_good


def _normalizer(settings: Any) -> normalizers.Normalizer:
    """Return what a SentencePiece model does to a text, for its `normalizer_spec`."""
    steps: list[Any] = []
    if settings.precompiled_charsmap:
        if settings.name.startswith("nmt_"):
            steps.append(normalizers.Replace("\r\n", "  "))
        if "nfkc" in settings.name:
            steps.append(normalizers.NFKC())
        steps.append(normalizers.Precompiled(settings.precompiled_charsmap))
    if settings.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"\A (?:[ ▁]*\z)?|(?<![ ▁])[ ▁]+\z"), ""))
    if settings.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])


def check_texts(tokenizer: Tokenizer) -> Iterable[str]:
    """Yield texts that use the whole vocabulary, separately and mixed, and odd ones."""
    draw = random.Random(0)
    tokens = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
    yield from ("", "\n\n \t", "  a  b ", "a\r\nb\n\nc", " \u2581 ", "\xa0\u200bx\ufeff\x01", "\uff1c \uff76\uff9e")
    yield "naïve e\u0302\u0301 \uff41\u0301 \xbd 😀👩\u200d👧 漢字 שלום عليكم क्षत्रिय ไทยภาษา 한국어 \u1112\u1161\u11ab"
    yield from (character * 5000 for character in " a\n1!é")
    yield "<unk></s>a<s><0x41> <0x41>"
    for start in range(0, len(tokens), 64):
        yield "".join(tokens[start : start + 64])
        yield "".join(draw.choices(tokens, k=64))
        yield " ".join(draw.choices(tokens, k=32))


def compare(file: Path, converted: Converted, documents: Iterable[str]) -> str:
    """Return how many check texts and documents have the original's ids; raise UserError if one has others."""
    library, special, encode, equally_good = converted
    alike = ties = 0
    with TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(library, Path(folder), **special)
        for text in chain(check_texts(tokenizer), documents):
            try:
                ids = tokenizer.encode(text)
            except UserError as error:
                raise UserError(f"input: {file} cannot be converted: {error}") from None
            with _errors(f"{file} cannot encode a text"):
                original_ids = encode(text)
            if ids == original_ids:
                alike += 1
            elif equally_good(ids, original_ids):
                ties += 1
            else:
                raise UserError(f"input: the converted tokenizer gives other ids of {text[:80]!r}; it cannot be used")
    return f"{alike:,} texts have the original's ids" + f", {ties:,} others of the same score" * bool(ties)


@command
def main(argv: list[str]) -> int:
    parser = Parser(description="Convert a SentencePiece, tiktoken or tekken file to FOLDER/tokenizer.json.")
    add = parser.add_argument
    add("--input", required=True, type=Path, metavar="FILE", help="SentencePiece .model, tiktoken file or tekken.json")
    add("--encoding", choices=("llama3", "llama3.1"), help="the special tokens and the pattern of a tiktoken file")
    add("--output", required=True, type=Path, metavar="FOLDER")
    add("--check", **MANY, default=[], metavar="PATH", help="documents to compare ids on as well")
    add("--overwrite", action="store_true", help="replace an existing tokenizer")
    args = parser.parse_args(argv)
    check_new_tokenizer(args.output, args.overwrite)
    with args.input.open("rb") as file:  # Llama 3's tokenizer.model is a tiktoken file, Llama 2's a SentencePiece model
        is_tiktoken = args.input.suffix == ".tiktoken" or TIKTOKEN_LINE.fullmatch(file.readline(4096))
    if args.encoding and not is_tiktoken:
        raise UserError(
            f"encoding: {args.input} is no tiktoken file, and names its special tokens itself; leave it out"
        )
    if is_tiktoken:
        converted = convert_tiktoken(args.input, args.encoding)
    elif args.input.suffix == ".json":
        converted = convert_tekken(args.input)
    else:
        converted = convert_sentencepiece(args.input)
    comparison = compare(args.input, converted, (document.text for document in read_documents(args.check)))
    library, special, *_ = converted
    tokenizer = write_tokenizer(library, args.output, **special)
    print(f"{tokenizer.file}: {tokenizer.vocab_size:,} tokens, {special}; {comparison}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
