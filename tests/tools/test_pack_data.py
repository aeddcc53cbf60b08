"""Plans made by the tool are what the trainer reads; without one it says how to make it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.data.rows.packed import PackedRows
from megatron_ext.run.identity import checked_vocab_size, row_identity
from megatron_ext.run.inputs import open_split, splits
from megatron_ext.token_weighting.gain import document_gains
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity
from tests.conftest import SmallData
from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER, read_jsonl, refused_command

TOOL = "tools/pack_data.py"


def copied(data: SmallData, folder: Path) -> list[object]:
    """Flags for a data set of its own, so that plans of other tests do not lie beside it."""
    for suffix in (".bin", ".idx"):
        (folder / f"corpus{suffix}").write_bytes(Path(f"{data.prefix}{suffix}").read_bytes())
    flags = ["--data-path", folder / "corpus", "--tokenizer-model", data.tokenizer, "--seq-length", 128]
    return [*flags, "--train-iters", 2, "--lr-warmup-iters", 1, "--document-mask", "--eval-interval", 0]


def test_a_run_reads_the_plan_that_its_flags_made(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    flags = [*copied(small_data, tmp_path), "--packing", "best_fit"]
    assert "has no best_fit plan for seq_length 128" in refused_command(alone, TRAINER, *CONFIG, *flags)
    (first,) = alone.run(TOOL, *flags)
    (line,) = [line for line in first.stdout.splitlines() if line.startswith("best_fit")]
    assert line.split()[1] == "100.0%"
    alone.run(TRAINER, *CONFIG, *flags, "--save", tmp_path / "run")
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2
    assert "has no best_fit plan" in refused_command(alone, TRAINER, *CONFIG, *flags, "--seed", 77)
    # it is made once, and again where it is damaged
    (pieces,) = (tmp_path / "corpus.packing").glob("*/pieces.npy")
    whole = pieces.read_bytes()
    inode = pieces.stat().st_ino
    (again,) = alone.run(TOOL, *flags)
    assert again.stdout.splitlines()[1:] == first.stdout.splitlines()[1:]
    assert pieces.stat().st_ino == inode
    pieces.write_bytes(whole[:200])
    alone.run(TOOL, *flags)
    assert pieces.read_bytes() == whole


def test_all_stages_are_packed_at_once(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    flags = copied(small_data, tmp_path)
    stages = [{"name": name, "data": {"packing": name}} for name in ("best_fit", "random", "carry_over")]
    (tmp_path / "run.yaml").write_text(json.dumps({"stages": stages}))
    alone.run(TOOL, "--config", tmp_path / "run.yaml", *flags)
    policies = [folder.name.split("-")[0] for folder in (tmp_path / "corpus.packing").iterdir()]
    assert sorted(policies) == ["best_fit", "carry_over"]


@pytest.mark.slow
def test_documents_are_kept_by_their_gain(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """Stores of the run's rows give it; a run reads the plan; other rows or the wrong order are refused."""
    flags = [*copied(small_data, tmp_path), "--packing", "best_fit"]
    alone.run(TOOL, *flags)
    config = parse([str(flag) for flag in flags])
    vocab_size = checked_vocab_size(config)
    identity: dict[str, Any] = row_identity(config, vocab_size)
    (split,) = splits(config, vocab_size, 0)
    rows = open_split(split, config)
    assert isinstance(rows, PackedRows)
    losses = np.random.default_rng(5).gamma(2.0, 1.0, (2, rows.plan.rows, 128)).astype(np.float32)

    def write_store(name: str, context: int, of_rows: np.ndarray) -> None:
        facts = StoreIdentity(rows=rows.plan.rows, short_context=context, short_stride=context, model="m", **identity)
        store = ScoreStore.create_or_resume(tmp_path / name, facts)
        for row, values in enumerate(of_rows):
            store.write(row, values)

    write_store("short", 16, losses[0])
    write_store("long", 128, losses[1])
    both_stores = [tmp_path / "short", tmp_path / "long"]
    alone.run(TOOL, *flags, "--filter-by-gain", 0.3, *both_stores)
    gains = document_gains(rows, *(ScoreStore.open(store) for store in both_stores), 0)
    kept = np.argsort(-gains[np.isfinite(gains)], kind="stable")[: math.ceil(0.3 * np.isfinite(gains).sum())]
    wanted = np.flatnonzero(np.isfinite(gains))[kept]
    (folder,) = [file.parent for file in tmp_path.glob("corpus.packing/*/plan.json") if "filter" in file.read_text()]
    assert set(np.load(folder / "pieces.npy")[:, 0].tolist()) == set(wanted.tolist())
    record = json.loads((folder / "plan.json").read_text())["filter"]
    assert (record["kept"], record["with_scores"]) == (len(wanted), np.isfinite(gains).sum())
    assert (record["least_gain"], record["short"]["short_context"]) == (gains[wanted].min(), 16)
    option = ["--packing-options", "filter_by_gain=0.3"]
    alone.run(TRAINER, *CONFIG, *flags, *option, "--save", tmp_path / "run")
    both_stores[0].rename(tmp_path / "before")
    write_store("short", 8, losses[0, ::-1])
    assert "was made with other scores" in refused_command(alone, TOOL, *flags, "--filter-by-gain", 0.3, *both_stores)
    folder.rename(tmp_path / "away")
    for wrong, text in (
        ([*flags, "--filter-by-gain", 1.5, *both_stores], "filter_by_gain"),
        ([*flags, "--filter-by-gain", "half", *both_stores], "filter_by_gain"),
        ([*flags, "--filter-by-gain", 0.3, *both_stores[::-1]], "name the short-context store first"),
        ([*flags, "--seed", 7, "--filter-by-gain", 0.3, *both_stores], "its seed is 1234"),
        ([*flags, "--no-document-mask", "--filter-by-gain", 0.3, *both_stores], "its packing is"),
        ([*copied(small_data, tmp_path), "--filter-by-gain", 0.3, *both_stores], "which needs no plan"),
        ([*flags, *option], "filter_by_gain: needs scores"),
    ):
        assert text in refused_command(alone, TOOL, *wrong)
