"""tools/score_tokens.py against transformers' own models, under every layout; and a run that reads its store."""

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoint.models import write_model
from tests.conftest import SmallData
from tests.launcher import Commands
from tests.runs import CONFIG, read_jsonl

SCORE, TRAIN = "tools/score_tokens.py", "pretrain_skyladder.py"
LENGTH, STEPS, BATCH = 128, 2, 4
ROWS = STEPS * BATCH
COMMON = [*CONFIG, "--window-schedule", "constant", "--lr-warmup-iters", "0", "--distributed-timeout-minutes", "2"]
RUN = [*COMMON, "--seq-length", LENGTH, "--train-iters", STEPS, "--global-batch-size", BATCH]
SHORT = ["--context", 24, "--stride", 10]
TOLERANCE = 1e-5
Flags = Sequence[object]


@dataclass(frozen=True)
class Row:
    """A row as training saw it: L + 1 tokens and the exclusive ends of its documents."""

    tokens: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, its rows by sample, and Hugging Face folders of its first and its last weights."""

    folder: Path
    rows: list[Row]
    initial: Path
    final: Path


@pytest.fixture(scope="module")
def trained(alone: Commands, small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two steps with unfrozen weights, whose short context is that of `SHORT`."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    weighting = ["--token-weighting", "unfrozen", "--short-context", 24, "--short-stride", 10]
    dump = folder / "trajectory"
    alone.run(TRAIN, *RUN, *small_data.flags, *weighting, "--save", folder, "--dump-trajectory", dump)
    return Trained(folder, rows_of(dump), exported(dump, "initial"), exported(dump, "final"))


def rows_of(trajectory: Path) -> list[Row]:
    rows = []
    for path in sorted(trajectory.glob("step_*.npz")):
        step = dict(np.load(path))
        ends = np.split(step["document_ends"], step["document_ends_offsets"][1:-1])
        rows += [Row(tokens, mine) for tokens, mine in zip(step["tokens"], ends, strict=True)]
    return rows


def exported(trajectory: Path, name: str) -> Path:
    folder = trajectory / name
    folder.mkdir()
    shutil.copy(trajectory / "config.json", folder)
    shutil.copy(trajectory / f"{name}.safetensors", folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random tiny models as transformers saves them, by family."""
    folder = tmp_path_factory.mktemp("models")
    # the data's token ids are fewer than 1031, which is no multiple of anything
    changed = {"llama": {"head_dim": 12}, "qwen2": {}, "mistral": {"sliding_window": 7}}

    def saved(family: str) -> Path:
        if not (folder / family).exists():
            write_model(folder / family, family, shard="100KB", vocab_size=1031, **changed[family])
        return folder / family

    return saved


def scores(commands: Commands, store: Path, checkpoint: Path, *flags: object) -> np.ndarray:
    """float32 [rows, L]: what the tool stores; NaN where a row is missing."""
    commands.run(SCORE, "--checkpoint", checkpoint, "--output", store, *flags)
    return zarr.open_array(store, mode="r")[:]


def independently(folder: Path, rows: Sequence[Row], n: int, s: int, *, document_mask: bool = False) -> np.ndarray:
    """Chunk k holds the tokens [ks, ks + n) and scores the last s of those places, the first chunk all of its own.

    Under the document mask the model is given the piece of each document inside the chunk as a text of its own.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    found = np.full((len(rows), len(rows[0].tokens) - 1), np.nan, dtype=np.float64)
    for row, losses in zip(rows, found, strict=True):
        for start in range(0, len(losses), s):
            first = start + n - s if start else 0
            borders = [start, *(end for end in row.ends if document_mask and start < end), start + n]
            pieces = [(a, min(b, start + n, len(losses))) for a, b in itertools.pairwise(borders)]
            for a, b in pieces:
                if first < b and a < b:
                    scored = slice(max(first, a), b)
                    assert np.isnan(losses[scored]).all(), "a token is scored once"
                    losses[scored] = token_losses(model, row.tokens[a : b + 1])[scored.start - a :]
    return found


@torch.no_grad()
def token_losses(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    text = torch.from_numpy(tokens)
    logits = model(input_ids=text[None, :-1]).logits[0]
    return torch.nn.functional.cross_entropy(logits, text[1:], reduction="none").numpy()


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    """To 1e-5 of the loss, or of 1 where it is smaller."""
    assert ours.shape == theirs.shape
    assert (np.abs(ours - theirs) / np.maximum(theirs, 1)).max() <= TOLERANCE  # not where one is NaN either


@pytest.mark.parametrize(
    ("family", "n", "s", "more"),
    [
        ("llama", 24, 18, ()),  # the default stride, 3/4 of the chunk
        ("llama", LENGTH, LENGTH, ("--stride", LENGTH, "--document-mask")),
        ("llama", 3, 1, ("--stride", 1, "--loss-block-tokens", 17)),
        ("qwen2", 24, 10, ("--stride", 10, "--micro-batch-size", 4)),
        ("mistral", 24, 10, ("--stride", 10, "--document-mask")),
    ],
)
def test_the_store_is_what_transformers_computes(
    alone: Commands,
    trained: Trained,
    small_data: SmallData,
    models: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    n: int,
    s: int,
    more: tuple[object, ...],
) -> None:
    rows = 3
    ours = scores(
        alone, tmp_path / "store", models(family), *RUN, *small_data.flags, "--context", n, "--rows", rows, *more
    )
    theirs = independently(models(family), trained.rows[:rows], n, s, document_mask="--document-mask" in more)
    assert_close(ours, theirs)


LAYOUTS: dict[str, Flags] = {
    "DP2": [],
    "CP2": ["--context-parallel-size", 2],
    "TP2": ["--tensor-model-parallel-size", 2, "--sequence-parallel"],
    "PP2": ["--pipeline-model-parallel-size", 2],
    "VPP2": ["--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1],
}


def test_layouts_store_the_same(
    alone: Commands, small_data: SmallData, models: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = [*RUN, *small_data.flags, "--context", 23, "--stride", 9, "--rows", 7, "--document-mask"]
    one = scores(alone, tmp_path / "alone", models("llama"), *flags)
    for name, layout in LAYOUTS.items():
        assert_close(scores(Commands(2), tmp_path / name, models("llama"), *flags, *layout), one)


def test_a_run_that_begins_later_needs_the_rows_from_there_on(
    alone: Commands, small_data: SmallData, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Scoring leaves the rows before --first-sample alone, and training does not ask for them; a hole later it does."""
    flags, store = [*RUN, *small_data.flags], tmp_path / "store"
    whole = scores(alone, tmp_path / "whole", models("llama"), *flags, *SHORT, "--rows", 5 + ROWS)
    later = scores(alone, store, models("llama"), *flags, *SHORT, "--first-sample", 5)
    assert later.shape == (5 + ROWS, LENGTH)
    assert np.isnan(later[:5]).all()
    assert_close(later[5:], whole[5:])
    frozen = [*flags, "--token-weighting", "frozen", "--score-store", store]
    alone.run(TRAIN, *frozen, "--first-sample", 5)
    (store / "c.6.0").unlink()
    (done,) = alone.attempt(TRAIN, *frozen, "--first-sample", 5)
    assert f"1 of the {ROWS} rows that this run needs are missing, row 6 the first" in done.stderr
    again = scores(alone, store, models("llama"), *flags, *SHORT, "--first-sample", 5, "--rows", ROWS)
    assert_close(again[5:], whole[5:])


def test_our_checkpoints_and_their_export_score_alike(
    alone: Commands, trained: Trained, small_data: SmallData, tmp_path: Path
) -> None:
    """A run folder, its checkpoint under another layout, and the Hugging Face folder of the same weights."""
    flags = [*RUN, *small_data.flags, *SHORT]
    exported = scores(alone, tmp_path / "exported", trained.final, *flags)
    np.testing.assert_array_equal(scores(alone, tmp_path / "run", trained.folder, *flags), exported)
    checkpoint = trained.folder / "checkpoints" / f"iter_{STEPS:07d}"
    assert_close(scores(Commands(2), tmp_path / "tp", checkpoint, *flags, *LAYOUTS["TP2"]), exported)
    assert_close(exported, independently(trained.final, trained.rows, 24, 10))
    assert np.abs(exported - scores(alone, tmp_path / "first", trained.initial, *flags)).max() > 1000 * TOLERANCE
    (done,) = alone.attempt(SCORE, "--checkpoint", trained.final, "--output", tmp_path / "first", *flags)
    assert done.status == 2
    assert ": its model is " in done.stderr


def test_a_frozen_scorer_of_the_first_weights_weighs_the_first_step_as_the_model_itself(
    alone: Commands, trained: Trained, small_data: SmallData, tmp_path: Path
) -> None:
    """From the second step on the trained model has moved away from its scorer."""
    store, folder = tmp_path / "store", tmp_path / "run"
    scores(alone, store, trained.initial, *RUN, *small_data.flags, *SHORT)
    alone.run(TRAIN, *RUN, *small_data.flags, "--token-weighting", "frozen", "--score-store", store, "--save", folder)
    frozen, itself = (read_jsonl(run / "metrics.jsonl") for run in (folder, trained.folder))
    assert [len(frozen), len(itself)] == [STEPS, STEPS]
    for name in ("lm_loss", "train_loss", "grad_norm", "weight_std", "weight_max", "score_mean"):
        assert frozen[0][name] == pytest.approx(itself[0][name], rel=1e-5)
    assert abs(itself[0]["train_loss"] - itself[0]["lm_loss"]) > 1e-3, "the weights matter"
    assert frozen[1]["score_mean"] != pytest.approx(itself[1]["score_mean"], rel=1e-3)


def test_parts_fill_one_store(
    alone: Commands, small_data: SmallData, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each part scores its own rows and no other's; together they are the whole."""
    flags = [*RUN, *small_data.flags, *SHORT, "--micro-batch-size", 1, "--rows", 5]
    whole = scores(alone, tmp_path / "whole", models("llama"), *flags)
    first = scores(alone, tmp_path / "parts", models("llama"), *flags, "--part", "1/2")
    assert [row for row in range(5) if not np.isnan(first[row]).any()] == [1, 3]
    both = scores(alone, tmp_path / "parts", models("llama"), *flags, "--part", "0/2")
    np.testing.assert_array_equal(both, whole)
