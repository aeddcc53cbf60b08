"""Compare the ids of gigatoken and of tokenizers on random texts.

    python benchmarks/fuzz_ids.py --texts 1000000
    python benchmarks/fuzz_ids.py --texts 100000 --tokenizers FOLDER ...      with other tokenizers

Without --tokenizers, small ones in the shapes of real ones are trained on Python's own sources and odd words. A text is
a mixture of words, spaces, signs and characters of all of Unicode, pieces of sources, and spelled special and added
tokens. The first texts hold each character once, beside letters, digits, spaces and combining marks. "left" is the
number of texts left to tokenizers because of their code points, "left_different" how many of these really differ, and
"different" how many others do, of which the shortest are printed. Exits with 1 if there is one.
"""

import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from record import Records, parser_of
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from megatron_ext.data.text import tokenizer as ours
from megatron_ext.data.text.fast import NO_NORMALIZER

VOCABULARY = 3000
SHOWN = 10
SPECIAL = "<|endoftext|>"
ADDED = ["<tool_call>", "<tool", "</think>", "abc def"]
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2, LLAMA3 = (_ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + _TAIL for numbers in (r"\p{N}", r"\p{N}{1,3}"))
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
O200K = _CASES.replace("%s", _ENGLISH + "?") + r"\p{N}{1,3}|" + _REST
NEMOTRON = _CASES.replace("%s", "") + r"\p{N}|" + _REST
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
WORDS = [
    *("the", " the", " of", "don't", "I'LL", "we'Ve", "'s", "'\u017f", " def", "return", "HTTPServer", "camelCase"),
    *("1", "12", "345", "6789", "१२", "²", "Ⅷ", "½", " ", "  ", "\t", "\n", "\r\n", "\n\n ", "\u00a0", "\u3000"),
    *(".", "...", " -", "--", "_", "://", "(", ")}", '"', "'", "/", "\\", "#", "@", "é", "e\u0301", "\u0301"),
    *("중국", "中国", "日本", "ひらがな", "カタカナ", "हिन्दी", "العربية", "Привет", "שלום", "ไทย", "ÀÉÎ"),
    *("▁", "▁▁", "<0x41>", "\0", "\u200b", "\ufeff", "\ufffd", "\u212b", "\u1e9b\u0323", "ǅ", "ﬁ", "😀", "🇩🇪"),
    *(SPECIAL, SPECIAL[:-1], "<s>", "</s>", "<unk>", *ADDED, "<tool_cal", "\U0001fa77", "\u2028", "\x85"),
]


def shapes() -> Iterator[tuple[str, models.BPE, Any, Any]]:
    """Yield the name, an untrained model, the normalizer and the pre_tokenizer of each tokenizer."""

    def by(*patterns: str) -> Any:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def fallback() -> models.BPE:
        return models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")

    spaces = normalizers.Replace(" ", "▁")
    yield "GPT-2", models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=False)
    yield "Llama 3", models.BPE(ignore_merges=True), None, by(LLAMA3)
    yield "GPT-4", models.BPE(), None, by(LLAMA3.replace(r"[\r\n]+|\s+(?", r"[\r\n]|\s+(?"))
    yield "Qwen 2", models.BPE(), normalizers.NFC(), by(QWEN2)
    yield "o200k", models.BPE(), None, by(O200K)
    yield "Llama 2", fallback(), normalizers.Sequence([normalizers.Prepend("▁"), spaces]), None
    yield "Gemma", fallback(), spaces, pre_tokenizers.Split(" ", "merged_with_previous")
    yield "Mistral", fallback(), None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    yield "Qwen 3.5", models.BPE(), normalizers.NFC(), by(QWEN35)
    yield "Nemotron", models.BPE(), None, by(NEMOTRON)
    yield "DeepSeek 3", models.BPE(), normalizers.Sequence([]), by(*DEEPSEEK)


def train(
    model: models.BPE, normalizer: Any, pre_tokenizer: Any, texts: list[str], folder: Path, vocabulary: int = VOCABULARY
) -> None:
    """Train a tokenizer on texts and write it, with a special token and ordinary added ones."""
    tokenizer = Tokenizer(model)
    pieces = list[str]()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.pre_tokenizer = pre_tokenizer
    if model.byte_fallback:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = []
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # otherwise a text would be one word
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[*pieces, SPECIAL], initial_alphabet=alphabet, limit_alphabet=600,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["content"] in (SPECIAL, "<unk>")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    normalizes_nothing = description["normalizer"] == NO_NORMALIZER  # such tokenizers have added tokens of both kinds
    tokenizer.add_tokens([AddedToken(text, normalized=normalizes_nothing and text == "</think>") for text in ADDED])
    ours.write_tokenizer(tokenizer, folder, eos_token=SPECIAL)


def texts_of(count: int, seed: int, sources: list[str], words: list[str]) -> Iterator[str]:
    """Yield `count` texts; the first, at most half, hold 16 of the characters of Python's Unicode each."""
    dice = random.Random(seed)
    places = ("a%sb", " %s1", "e\u0301%s", "A%s\u0323", "%s", "\n%s.", "'%s ")
    characters = [character for character in map(_character, range(0x40000)) if unicodedata.category(character) != "Cn"]
    dice.shuffle(characters)
    del characters[8 * count :]
    for first in range(0, len(characters), 16):
        yield "".join(dice.choice(places) % character for character in characters[first : first + 16])
    for _ in range(count - -(-len(characters) // 16)):
        yield "".join(_part(dice, sources, words) for _ in range(dice.choice((1, 2, 4, 8))))


def _part(dice: random.Random, sources: list[str], words: list[str]) -> str:
    kind = dice.random()
    if kind < 0.1:
        return dice.choice(words)
    if kind < 0.7:
        return dice.choice(WORDS) * dice.choice((1, 1, 1, 2, 5))
    if kind < 0.85:
        source = dice.choice(sources)
        start = dice.randrange(len(source))
        return source[start : start + dice.choice((5, 40, 200))]
    end = dice.choice((0x80, 0x800, 0x3000, 0x10000, 0x20000, 0x40000))
    drawn = [_character(dice.randrange(end)) for _ in range(dice.choice((1, 2, 8)))]
    return "".join(character for character in drawn if unicodedata.category(character) != "Cn" or dice.random() < 0.02)


def _character(number: int) -> str:
    return "\ufffd" if 0xD800 <= number < 0xE000 else chr(number)


def compare(name: str, folder: Path, count: int, seed: int, sources: list[str], records: Records) -> None:
    """Record the differences of one tokenizer."""
    tokenizer = ours.Tokenizer(folder, encoder="gigatoken")
    assert tokenizer.fast is not None
    unserved = unserved_different = 0
    different = list[str]()
    added = json.loads((folder / ours.HF_FILE).read_text(encoding="utf-8"))["added_tokens"]
    texts = texts_of(count, seed, sources, [token["content"] for token in added])
    for batch in iter(lambda: list(islice(texts, 1000)), []):
        for text, ids in zip(batch, map(tokenizer.encode, batch), strict=True):
            is_same = tokenizer.fast(text).tolist() == ids
            if not tokenizer.fast.serves(text):
                unserved += 1
                unserved_different += not is_same
            elif not is_same:
                different.append(text)
    for text in sorted(different, key=len)[:SHOWN]:
        print(f"  {name}: {tokenizer.compare(text)}")
    counts = {"left": unserved, "left_different": unserved_different, "different": len(different), "ok": not different}
    records.add(tokenizer=name, encoder=tokenizer.encoder, texts=count, **counts)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--texts", type=int, default=100_000, help="per tokenizer")
    parser.add_argument("--tokenizers", nargs="+", type=Path, default=[], metavar="FOLDER", help="instead of our own")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="of our own (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    records = Records("fuzz_ids", options.output)
    files = sorted(Path(random.__file__).parent.glob("*.py"))[:60]
    sources = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.stat().st_size]
    with tempfile.TemporaryDirectory() as temporary:
        folders = {str(folder): folder for folder in options.tokenizers}
        for name, *about in [] if folders else list(shapes()):
            if name not in (options.shapes or name):
                continue
            train(*about, [*sources, "\n".join(WORDS) * 20], Path(temporary, name))
            compare(name, Path(temporary, name), options.texts, options.seed, sources, records)
        for name, folder in folders.items():
            compare(name, folder, options.texts, options.seed, sources, records)
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
