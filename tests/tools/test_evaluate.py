"""tools/evaluate.py: perplexity equals a plain loop's over models of transformers."""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megatron_ext.data.indexed import IndexedSource
from megatron_ext.inference.evaluate import share_of
from tests.checkpoint.models import write_model
from tests.conftest import SmallData
from tests.launcher import Commands
from tests.runs import CONFIG, refusal

TOOL = "tools/evaluate.py"
# long, short and middling documents
TEXTS = {
    "one": ["The window grows with every step, and the row stays. " * 3, "Yes.", "Documents wait for their turn."],
    "two": ["naïve café 😀 " * 4, "x = {i: i ** 2 for i in range(10)}\n" * 4],
}
TOKENS = {source: [[*text.encode(), 256] for text in texts] for source, texts in TEXTS.items()}  # 256 ends a text
ALL = [*TOKENS["one"], *TOKENS["two"]]
Figures = dict[str, float]


@torch.no_grad()
def loop(folder: Path, documents: Sequence[Sequence[int]], length: int, stride: int) -> Figures:
    """The loss of each label of each document, one window at a time, as means over all and by tokens up to it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses: list[float] = []
    bins: dict[str, list[float]] = defaultdict(list)
    for tokens in documents:
        labels = len(tokens) - 1
        begin = 0
        done = 0
        while done < labels:
            end = min(begin + length, labels)
            model(torch.tensor([tokens[:1]]))  # dynamic angles keep the longest text's base until a short one comes
            logits = model(torch.tensor([tokens[begin:end]]), use_cache=False).logits[0].double()
            scored = F.cross_entropy(logits, torch.tensor(tokens[begin + 1 : end + 1]), reduction="none").tolist()
            for place in range(done - begin, end - begin):
                losses.append(scored[place])
                bins[str(2 ** int(math.log2(place + 1)))].append(scored[place])
            begin = begin + stride
            done = end
    mean = float(np.mean(losses))
    means = {keys: float(np.mean(values)) for keys, values in bins.items()}
    return {"loss": mean, "perplexity": math.exp(mean), "tokens": len(losses)} | means


def found(record: dict[str, Any], length: int, task: str = "all", model: str | None = None) -> Figures:
    """The figures of a task at a length, of a model or of the only one."""
    name = model or next(iter(record["models"]))
    results = [
        result
        for result in record["results"]
        if (result["model"], result["task"], result["length"]) == (name, task, length)
    ]
    values = {
        str(result["position"]) if "position" in result else result["metric"]: result["value"] for result in results
    }
    return values | {
        "tokens": next(result["count"] for result in results if result["metric"] == "loss" and "position" not in result)
    }


def close(figures: Figures) -> Any:
    return pytest.approx(figures, rel=1e-4, abs=1e-4)


def write_texts(folder: Path) -> list[Path]:
    files = [folder / f"{source}.jsonl" for source in TEXTS]
    for file, (source, texts) in zip(files, TEXTS.items(), strict=True):
        file.write_text("".join(json.dumps({"text": text, "domain": source}) + "\n" for text in texts))
    return files


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
            for task, documents in (("one", TOKENS["one"]), ("two", TOKENS["two"]), ("all", ALL)):
                name = task if task == "all" else str(tmp_path / f"{task}.jsonl")
                assert found(record, length, name) == close(loop(model, documents, length, stride or length // 2))


def test_without_the_document_mask_documents_are_one_text(alone: Commands, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    write_texts(tmp_path)
    flags = [model, "--input", tmp_path / "*.jsonl", "--source-key", "domain", "--tokenizer", "bytes"]
    for documents, per_source in ((["--documents", 4], [3, 1]), (["--documents-per-source", 1], [1, 1])):
        record = evaluated(alone, tmp_path / "out", *flags, "--lengths", 40, *documents)
        counts = {result["task"]: result["documents"] for result in record["results"] if "documents" in result}
        assert [counts["one"], counts["two"]] == per_source
    record = evaluated(alone, tmp_path / "out", *flags, "--lengths", 40, "--stride", 24, "--no-document-mask")
    assert record["settings"]["document_mask"] is False
    assert "document_mask: False" in (tmp_path / "out/perplexity.md").read_text()
    for source, documents in TOKENS.items():
        whole = [*itertools.chain.from_iterable(documents)]
        assert found(record, 40, source) == close(loop(model, [whole], 40, 24))


def test_a_share_of_a_source_is_spread_over_it(alone: Commands, tmp_path: Path) -> None:
    """Each third of the documents that are long enough has one of three; their lengths tell which."""
    model = write_model(tmp_path / "model", "llama")
    file = tmp_path / "texts.jsonl"
    data = tmp_path / "data"
    long = ["a" * (20 + 2**number) for number in range(9)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("short", *long[:4], "short", *long[4:])))
    tokenizer = ["--tokenizer-model", "bytes"]
    alone.run("tools/preprocess_data.py", "--input", file, "--output-prefix", data, *tokenizer)
    share = ["--lengths", 32, "--min-tokens", 20, "--documents-per-source", 3]
    for source in (["--input", file, "--tokenizer", "bytes"], ["--data-path", data, "--tokenizer", "bytes"]):
        settings = evaluated(alone, tmp_path / "out", model, *source, *share)["settings"]
        assert settings["documents"] == 3
        chosen = settings["tokens"] - 3 * 21  # an end token each
        thirds = [sum(chosen >> number & 1 for number in part) for part in (range(3), range(3, 6), range(6, 9))]
        assert thirds == [1, 1, 1]


@pytest.mark.parametrize("lengths", [[8192, 807] * 100, [8192, 5904] * 100, [16384, 16384, 230] * 50])
def test_processes_get_as_many_tokens(lengths: list[int]) -> None:
    windows = np.array(lengths)
    for ranks in (2, 3, 4):
        shares = [share_of(windows, rank, ranks) for rank in range(ranks)]
        assert sorted(np.concatenate(shares)) == list(range(len(windows)))
        tokens = [windows[share].sum() for share in shares]
        assert max(tokens) - min(tokens) <= max(lengths)


def test_what_would_be_lost_or_wrong_is_refused_at_once(alone: Commands, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": "The window grows.", "domain": "all"}) + "\n")
    common = [TOOL, "perplexity", model, "--tokenizer", "bytes"]
    for flags, text in (
        (["--input", file, "--source-key", "domain"], "got a source named 'all'"),
        (["--input", file, "--output", file], "texts.jsonl"),
        (["--data-path", tmp_path / "data", "--bos"], "bos: got --bos with --data-path"),
    ):
        (done,) = alone.attempt(*common, *flags)
        assert text in refusal(done)


def test_results_of_a_model_outlive_a_later_one(alone: Commands, tmp_path: Path) -> None:
    models = [write_model(tmp_path / name, "llama") for name in ("good", "damaged")]
    weights = models[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    flags = ["--input", *write_texts(tmp_path), "--tokenizer", "bytes", "--lengths", 64, "--output", tmp_path / "out"]
    (done,) = alone.attempt(TOOL, "perplexity", *models, *flags)
    assert "model.safetensors" in refusal(done)
    record = json.loads((tmp_path / "out/perplexity.json").read_text())
    assert [*record["models"]] == ["good"]
    assert found(record, 64) == close(loop(models[0], ALL, 64, 32))


def test_two_processes_find_what_a_plain_loop_finds(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    flags = [model, "--input", *write_texts(tmp_path), "--tokenizer", "bytes", "--lengths", 30, 64, "--stride", 21]
    expected = {length: loop(model, ALL, length, 21) for length in (30, 64)}
    layouts = "", "--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size 2"
    for layout in (*layouts, "--pipeline-model-parallel-size 2"):
        record = evaluated(Commands(2), tmp_path / "out", *flags, "--batch-tokens", 70, *layout.split())
        for length in (30, 64):
            assert found(record, length) == close(expected[length])


def test_a_run_and_its_export_side_by_side(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
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
    source = IndexedSource(small_data.prefix)
    chosen = [n for n, length in enumerate(source.document_lengths) if length >= 50][:20]
    documents = [source.read(n, 0, int(source.document_lengths[n]))[:200].tolist() for n in chosen]
    assert at["run"] == close(loop(export, documents, 64, 32))
    of_export, of_earlier = record["differences"]
    assert (of_export["first"], of_export["second"]) == ("run", "export")
    assert abs(of_export["value"]) < 1e-6
    assert of_earlier["value"] == pytest.approx(at["iter_0000001"]["loss"] - at["run"]["loss"])
    assert 0 < of_earlier["low"] < of_earlier["value"] < of_earlier["high"]
