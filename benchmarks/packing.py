"""What packing policies keep, cut and cost: python benchmarks/packing.py

First, every policy but bm25 on a million documents of log-normal length like FineWeb-Pro's (median 849, mean 1,364
tokens; arXiv 2503.15450, Table 26) at several row lengths: the report, and the seconds that the plan takes. `mean C` is
the mean number of keys that a token may attend to under the document mask. Then the histogram of C at the first row
length.

Then bm25 on the functions and classes of the Python sources of this machine, words and symbols as terms, by block
size: microseconds for each document, and how often the next document comes from the same file, against a random order.
With --topics, the same for the million documents, made up from 1,000 topics: how often the topic stays the same.
"""

from __future__ import annotations

import argparse
import re
import resource
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_ext.data.packing import PackingPolicy, PackingReport, build_plan, report
from megatron_ext.data.packing.bm25 import order_by_similarity
from megatron_ext.errors import UserError

K = 1024
ROW_LENGTHS = (8 * K, 32 * K, 512 * K)
WITHOUT_TEXT = [policy for policy in PackingPolicy if policy is not PackingPolicy.BM25]
FIRST_TOKENS = 512
TOPICS, VOCABULARY, TOPIC_WORDS = 1000, 50_000, 200
PARTS = re.compile(r"^(?=(?:    )?(?:async )?(?:def|class) )", re.MULTILINE)
WORDS = re.compile(r"[A-Za-z]+|\d+|[^\w\s]")
LEAST_CHARACTERS = 100


class Lengths:
    """Documents of which only the lengths are known."""

    def __init__(self, count: int) -> None:
        drawn = np.random.default_rng(0).lognormal(np.log(849), 0.974, size=count)
        self.document_lengths = np.maximum(drawn.astype(np.int64), 1)

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        raise AssertionError("no policy but bm25 reads tokens")


class Topics(Lengths):
    """Documents of made-up words: by Zipf's law, a third of them out of 200 words of the document's topic."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.labels = np.random.default_rng(1).integers(TOPICS, size=count)

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        """Draw the first tokens only, anew from the document's number."""
        assert offset == 0
        rng = np.random.default_rng((2, document))
        common = np.minimum(rng.zipf(1.2, size=length), VOCABULARY)
        own = VOCABULARY + (self.labels[document] * 100 + rng.integers(TOPIC_WORDS, size=length)) % VOCABULARY
        return np.where(rng.random(length) < 1 / 3, own, common).astype(np.int64)


class Functions:
    """Functions, methods and classes of the Python sources here; their files as labels."""

    def __init__(self) -> None:
        vocabulary: dict[str, int] = {}
        texts, labels = [], []
        for number, text in enumerate(sources()):
            for part in PARTS.split(text):
                if len(part) >= LEAST_CHARACTERS:
                    ids = [vocabulary.setdefault(word, len(vocabulary)) for word in WORDS.findall(part)]
                    texts.append(np.array(ids, dtype=np.int32))
                    labels.append(number)
        self.texts, self.labels = texts, np.array(labels)
        self.document_lengths = np.array([len(text) for text in texts], dtype=np.int64)

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        return self.texts[document][offset : offset + length].astype(np.int64)


def sources() -> Iterator[str]:
    """Yield the texts of the standard library and of the installed packages."""
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    for path in sorted({path for folder in folders for path in folder.rglob("*.py") if path.is_file()}):
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def line(policy: str, row_length: int, found: PackingReport, seconds: float) -> str:
    return (
        f"{policy:15}{row_length // K:5}K{found.rows:10}{found.kept_share:9.2%}{found.dropped_documents:10}"
        f"{found.truncated_documents:11}{found.padding_share:9.3%}{found.mean_context:9.0f}{seconds:7.1f}"
    )


def compare(count: int) -> None:
    """Print the table of all policies, then the histogram of C."""
    source, documents = Lengths(count), range(count)
    header = f"{'policy':15}{'L':>6}{'rows':>10}{'kept':>9}{'dropped':>10}{'truncated':>11}{'padding':>9}"
    print(f"{count} documents, {source.document_lengths.sum()} tokens\n{header}{'mean C':>9}{'s':>7}")
    histograms = {}
    for row_length in ROW_LENGTHS:
        for policy in WITHOUT_TEXT:
            began = time.process_time()
            try:
                plan = build_plan(policy.value, source, documents, row_length, 0)
            except UserError:
                print(f"{policy.value:15}{row_length // K:5}K      no document is long enough")
                continue
            seconds = time.process_time() - began
            found = report(plan, source, documents)
            print(line(policy.value, row_length, found, seconds), flush=True)
            if row_length == ROW_LENGTHS[0]:
                histograms[policy.value] = found.context_histogram
    print(f"\nshare of tokens by C, L = {ROW_LENGTHS[0]}\n{'C from':15}", end="")
    print("".join(f"{2**power:7}" for power in range(ROW_LENGTHS[0].bit_length())))
    for name, histogram in histograms.items():
        print(f"{name:15}" + "".join(f"{entry / sum(histogram):7.1%}" for entry in histogram))


def walk(source: Functions | Topics, blocks: list[int], same: str) -> None:
    """Print one line for each block size, and one for a random order."""
    count = len(source.labels)
    shuffled = np.random.default_rng(0).permutation(count)
    by_chance = np.mean(np.diff(source.labels[shuffled]) == 0)
    print(f"\nbm25, {count} documents, {source.document_lengths.sum()} tokens; random order: {by_chance:.2%} {same}")
    for block in sorted({min(block, count) for block in blocks}):
        began = time.process_time()
        options = {"first_tokens": FIRST_TOKENS, "block_documents": block}
        found = order_by_similarity(source, np.arange(count), shuffled, options)
        seconds = time.process_time() - began
        kept = np.mean(np.diff(source.labels[found.order]) == 0)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"blocks of {block:7}: {seconds:7.1f} s, {seconds / count * 1e6:6.0f} us a document, hits "
            f"{found.hits / max(found.queries, 1):.2%}, {kept:.2%} {same}, at most {memory:.1f} GiB so far",
            flush=True,
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, help="made-up documents")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4096, 32768, 131072], help="block sizes of bm25")
    parser.add_argument("--topics", action="store_true", help="bm25 on the made-up documents as well (long)")
    parser.add_argument("--only-bm25", action="store_true", help="leave the other policies out")
    chosen = parser.parse_args()
    if not chosen.only_bm25:
        compare(chosen.documents)
    if chosen.topics:
        walk(Topics(chosen.documents), chosen.blocks, "same topic")
    else:
        walk(Functions(), chosen.blocks, "same file")


if __name__ == "__main__":
    main()
