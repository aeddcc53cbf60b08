"""tools/evaluate.py perplexity against a plain loop over transformers' own models, under every layout."""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.checkpoint.models import write_model
from tests.conftest import SmallData
from tests.launcher import Commands
from tests.runs import CONFIG

TOOL = "tools/evaluate.py"
SOURCES = ["one", "two"]
# long, short and middling documents
TEXTS = {
    "one": ["The window grows with every step, and the row stays. " * 3, "Yes.", "Documents wait for their turn."],
    "two": ["naïve café 😀 " * 4, "x = {i: i ** 2 for i in range(10)}\n" * 4],
}
END = 256  # of the byte tokenizer
TOLERANCE = 1e-4


@torch.no_grad()
def loop(folder: Path, documents: Sequence[Sequence[int]], length: int, stride: int) -> list[list[tuple[float, int]]]:
    """The loss of each label of each document, and how many tokens its window holds up to it: one window at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scored: list[list[tuple[float, int]]] = []
    for tokens in documents:
        labels, begin, done = len(tokens) - 1, 0, 0
        own: list[tuple[float, int]] = []
        while done < labels:
            end = min(begin + length, labels)
            model(torch.tensor([tokens[:1]]))  # dynamic angles keep the longest text's base until a short one comes
            logits = model(torch.tensor([tokens[begin:end]]), use_cache=False).logits[0].double()
            losses = F.cross_entropy(logits, torch.tensor(tokens[begin + 1 : end + 1]), reduction="none").tolist()
            own += [(loss, place + 1) for place, loss in enumerate(losses)][done - begin :]
            begin, done = begin + stride, end
        assert len(own) == labels
        scored.append(own)
    return scored


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def figures(scored: Sequence[tuple[float, int]]) -> dict[str, Any]:
    losses = np.array([loss for loss, _ in scored])
    bins: dict[str, list[float]] = {}
    for loss, keys in scored:
        bins.setdefault(str(2 ** int(math.log2(keys))), []).append(loss)
    means = {keys: float(np.mean(values)) for keys, values in bins.items()}
    return {"loss": losses.mean(), "perplexity": math.exp(losses.mean()), "tokens": len(losses), "by_position": means}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["tokens"] == theirs["tokens"]
    for name in ("loss", "by_position"):
        assert ours[name] == pytest.approx(theirs[name], abs=TOLERANCE), name
    assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=TOLERANCE)


def found(record: dict[str, Any], length: int, task: str = "all", model: str | None = None) -> dict[str, Any]:
    """The figures of a task at a length, of a model or of the only one."""
    name = model or next(iter(record["models"]))
    own = [one for one in record["results"] if (one["model"], one["task"], one["length"]) == (name, task, length)]
    whole = {one["metric"]: one for one in own if "position" not in one}
    return {
        "loss": whole["loss"]["value"],
        "perplexity": whole["perplexity"]["value"],
        "tokens": whole["loss"]["count"],
        "documents": whole["loss"]["documents"],
        "by_position": {str(one["position"]): one["value"] for one in own if "position" in one},
    }


def write_texts(folder: Path) -> list[Path]:
    files = [folder / f"{source}.jsonl" for source in SOURCES]
    for source, file in zip(SOURCES, files, strict=True):
        file.write_text("".join(json.dumps({"text": text, "domain": source}) + "\n" for text in TEXTS[source]))
    return files


def tokens_of(source: str) -> list[list[int]]:
    return [[*text.encode(), END] for text in TEXTS[source]]


def evaluated(commands: Commands, output: Path, *flags: object) -> dict[str, Any]:
    commands.run(TOOL, "perplexity", *flags, "--output", output, "--overwrite")
    record: dict[str, Any] = json.loads((output / "perplexity.json").read_text())
    return record


@pytest.mark.parametrize("architecture", ["llama-dynamic", "gemma3"])
def test_each_length_and_stride_is_what_a_plain_loop_gives(alone: Commands, tmp_path: Path, architecture: str) -> None:
    """Angles that follow the text, local layers: windows shorter and longer than the trained length of 64."""
    model = write_model(tmp_path / "model", architecture, max_position_embeddings=64)
    flags = [model, "--input", *write_texts(tmp_path), "--tokenizer", "bytes", "--batch-tokens", 100]
    for lengths, stride in (((16, 96), 7), ((48,), None)):
        strided = [] if stride is None else ["--stride", stride]
        record = evaluated(alone, tmp_path / "out", *flags, "--lengths", *lengths, *strided)
        assert record["settings"]["document_mask"] is True
        for length in lengths:
            assert record["settings"]["stride"][str(length)] == (stride or length // 2)
            by_source = []
            for source in SOURCES:
                scored = loop(model, tokens_of(source), length, stride or length // 2)
                by_source.append(joined(scored))
                assert_same(found(record, length, str(tmp_path / f"{source}.jsonl")), figures(by_source[-1]))
            assert_same(found(record, length), figures(joined(by_source)))


def test_without_the_document_mask_documents_are_one_text(alone: Commands, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    write_texts(tmp_path)
    flags = [model, "--input", tmp_path / "*.jsonl", "--source-key", "domain", "--tokenizer", "bytes"]
    for documents, per_source in ((["--documents", 4], [3, 1]), (["--documents-per-source", 1], [1, 1])):
        record = evaluated(alone, tmp_path / "out", *flags, "--lengths", 40, *documents)
        assert [found(record, 40, source)["documents"] for source in SOURCES] == per_source
    record = evaluated(alone, tmp_path / "out", *flags, "--lengths", 40, "--stride", 24, "--no-document-mask")
    assert record["settings"]["document_mask"] is False
    assert "document_mask: False" in (tmp_path / "out/perplexity.md").read_text()
    for source in SOURCES:
        (scored,) = loop(model, [joined(tokens_of(source))], 40, 24)
        assert_same(found(record, 40, source), figures(scored))


LAYOUTS: list[list[object]] = [
    [],
    ["--tensor-model-parallel-size", 2, "--sequence-parallel"],
    ["--context-parallel-size", 2],
    ["--pipeline-model-parallel-size", 2],
]


def test_two_processes_find_what_a_plain_loop_finds(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    flags = [model, "--input", *write_texts(tmp_path), "--tokenizer", "bytes", "--lengths", 30, 64, "--stride", 21]
    documents = joined(tokens_of(source) for source in SOURCES)
    expected = {length: figures(joined(loop(model, documents, length, 21))) for length in (30, 64)}
    for layout in LAYOUTS:
        record = evaluated(Commands(2), tmp_path / "out", *flags, "--batch-tokens", 70, *layout)
        for length in (30, 64):
            assert_same(found(record, length), expected[length])


def test_a_run_of_four_processes_and_its_export_side_by_side(
    alone: Commands, small_data: SmallData, tmp_path: Path
) -> None:
    """A dataset's documents, cut and chosen; an export differs from its run in nothing, an earlier checkpoint does."""
    run, export = tmp_path / "run", tmp_path / "export"
    short = ["--train-iters", 4, "--save-interval", 1, "--global-batch-size", 4, "--seq-length", 128]
    layout = ["--tensor-model-parallel-size", 2, "--context-parallel-size", 2, "--lr-warmup-iters", 0, "--lr", 1e-3]
    Commands(4).run("pretrain_skyladder.py", *CONFIG, *small_data.flags, *short, *layout, "--save", run)
    alone.run("tools/convert_checkpoint.py", "megatron-to-hf", "--input", run, "--output", export)
    earlier = run / "checkpoints/iter_0000001"
    flags = [run, export, earlier, "--data-path", small_data.prefix, "--lengths", 64, "--documents", 20]
    record = evaluated(alone, tmp_path / "out", *flags, "--min-tokens", 50, "--max-tokens", 200)
    at = {name: found(record, 64, model=name) for name in record["models"]}
    assert list(at) == ["run", "export", "iter_0000001"]
    assert at["run"]["documents"] == 20
    from megatron_ext.data.indexed import IndexedSource

    source = IndexedSource(small_data.prefix)
    chosen = [n for n, length in enumerate(source.document_lengths) if length >= 50][:20]
    documents = [source.read(n, 0, int(source.document_lengths[n]))[:200].tolist() for n in chosen]
    assert_same(at["run"], figures(joined(loop(export, documents, 64, 32))))
    same, worse = record["differences"]
    assert (same["first"], same["second"]) == ("run", "export")
    assert abs(same["value"]) < 1e-6
    assert worse["value"] == pytest.approx(at["iter_0000001"]["loss"] - at["run"]["loss"])
    assert 0 < worse["low"] < worse["value"] < worse["high"]
