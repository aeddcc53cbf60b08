"""tools/score_tokens.py against transformers' own models, under every layout; and a run that reads its store."""

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
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
LENGTH = 128
STEPS = 2
BATCH = 4
ROWS = STEPS * BATCH
COMMON = [*CONFIG, "--window-schedule", "constant", "--lr-warmup-iters", "0", "--distributed-timeout-minutes", "2"]
RUN = [*COMMON, "--seq-length", LENGTH, "--train-iters", STEPS, "--global-batch-size", BATCH]
SHORT = ["--context", 24, "--stride", 10]
TOLERANCE = 1e-5
Models = Callable[[str], Path]
Score = Callable[..., np.ndarray]
Row = tuple[np.ndarray, np.ndarray]  # as training saw it: L + 1 tokens and the exclusive ends of its documents


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, its rows by sample, and Hugging Face folders of its first and its last weights."""

    folder: Path
    rows: list[Row]
    initial: Path
    final: Path


@pytest.fixture(scope="module")
def trained(alone: Commands, small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train two steps with unfrozen weights, whose short context is `SHORT`'s."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    weighting = ["--token-weighting", "unfrozen", "--short-context", 24, "--short-stride", 10]
    dump = folder / "trajectory"
    alone.run(TRAIN, *RUN, *small_data.flags, *weighting, "--save", folder, "--dump-trajectory", dump)
    return Trained(folder, rows_of(dump), exported(dump, "initial"), exported(dump, "final"))


def rows_of(trajectory: Path) -> list[Row]:
    rows: list[Row] = []
    for path in sorted(trajectory.glob("step_*.npz")):
        step = dict(np.load(path))
        ends = np.split(step["document_ends"], step["document_ends_offsets"][1:-1])
        rows += [(tokens, row_ends) for tokens, row_ends in zip(step["tokens"], ends, strict=True)]
    return rows


def exported(trajectory: Path, name: str) -> Path:
    folder = trajectory / name
    folder.mkdir()
    shutil.copy(trajectory / "config.json", folder)
    shutil.copy(trajectory / f"{name}.safetensors", folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Random tiny models as transformers saves them, by family."""
    # the data's token ids are fewer than 1031, which is no multiple of anything
    return cache(lambda family: write_model(tmp_path_factory.mktemp(family), family, shard="100KB", vocab_size=1031))


@pytest.fixture
def score(small_data: SmallData, tmp_path: Path) -> Score:
    """Score the rows of RUN with a checkpoint; returns the store, float32 [rows, L], NaN where a row is missing."""

    def scored(store: str, checkpoint: Path, *flags: object, processes: int = 1) -> np.ndarray:
        where = ["--checkpoint", checkpoint, "--output", tmp_path / store]
        Commands(processes).run(SCORE, *where, *RUN, *small_data.flags, *flags)
        scores: np.ndarray = zarr.open_array(tmp_path / store, mode="r")[:]
        return scores

    return scored


def independently(folder: Path, rows: Sequence[Row], n: int, s: int, *, document_mask: bool = False) -> np.ndarray:
    """Chunk k holds the tokens [ks, ks + n) and scores the last s of those places, the first chunk all of its own.

    Under the document mask the model is given the piece of each document inside the chunk as a text of its own.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    all_losses = np.full((len(rows), LENGTH), np.nan, dtype=np.float64)
    for (tokens, ends), losses in zip(rows, all_losses, strict=True):
        for start in range(0, len(losses), s):
            first = start + n - s if start else 0
            borders = [start, *(end for end in ends if document_mask and start < end), start + n]
            pieces = [(a, min(b, start + n, len(losses))) for a, b in itertools.pairwise(borders)]
            for a, b in pieces:
                if first < b and a < b:
                    scored = slice(max(first, a), b)
                    assert np.isnan(losses[scored]).all(), "a token is scored once"
                    losses[scored] = token_losses(model, tokens[a : b + 1])[scored.start - a :]
    return all_losses


@torch.no_grad()
def token_losses(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    text = torch.from_numpy(tokens)
    logits = model(input_ids=text[None, :-1]).logits[0]
    return torch.nn.functional.cross_entropy(logits, text[1:], reduction="none").numpy()


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare to 1e-5 of the loss, or of 1 where it is smaller."""
    assert actual.shape == expected.shape
    assert (np.abs(actual - expected) / np.maximum(expected, 1)).max() <= TOLERANCE  # not where one is NaN either


@pytest.mark.parametrize(
    ("family", "n", "s", "more"),
    [
        ("llama", 24, 18, ()),  # the default stride, 3/4 of the chunk
        ("llama", LENGTH, LENGTH, ("--stride", LENGTH, "--document-mask")),
        ("llama", 3, 1, ("--stride", 1, "--loss-block-tokens", 17)),
        ("qwen2", 24, 10, ("--stride", 10, "--micro-batch-size", 4)),
        ("mistral-window", 24, 10, ("--stride", 10, "--document-mask")),
    ],
)
def test_the_store_is_what_transformers_computes(
    score: Score, models: Models, trained: Trained, family: str, n: int, s: int, more: tuple[object, ...]
) -> None:
    stored = score("store", models(family), "--context", n, "--rows", 3, *more)
    assert_close(stored, independently(models(family), trained.rows[:3], n, s, document_mask="--document-mask" in more))


TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", 2]


def test_layouts_store_the_same(score: Score, models: Models) -> None:
    flags = [models("llama"), "--context", 23, "--stride", 9, "--rows", 7, "--document-mask"]
    by_one_process = score("one", *flags)
    vpp2 = [*PP2, "--num-layers-per-virtual-pipeline-stage", 1]
    for number, layout in enumerate(([], ["--context-parallel-size", 2], TP2, PP2, vpp2)):
        assert_close(score(f"two-{number}", *flags, *layout, processes=2), by_one_process)


def test_rows_from_a_first_sample_on(
    alone: Commands, small_data: SmallData, score: Score, models: Models, tmp_path: Path
) -> None:
    """Scoring leaves earlier ones alone, training asks for later ones alone; parts fill a store."""
    model = models("llama")
    store = tmp_path / "store"
    whole = score("whole", model, *SHORT, "--rows", 5 + ROWS)
    later = score("store", model, *SHORT, "--first-sample", 5)
    assert later.shape == (5 + ROWS, LENGTH)
    assert np.isnan(later[:5]).all()
    assert_close(later[5:], whole[5:])
    frozen = [*RUN, *small_data.flags, "--token-weighting", "frozen", "--score-store", store, "--first-sample", 5]
    alone.run(TRAIN, *frozen)
    (store / "c.6.0").unlink()
    (done,) = alone.attempt(TRAIN, *frozen)
    assert f"1 of the {ROWS} rows that this run needs are missing, row 6 the first" in done.stderr
    assert_close(score("store", model, *SHORT, "--first-sample", 5, "--rows", ROWS)[5:], whole[5:])
    first = score("parts", model, *SHORT, "--rows", 5, "--micro-batch-size", 1, "--part", "1/2")
    assert [row for row in range(5) if not np.isnan(first[row]).any()] == [1, 3]
    assert_close(score("parts", model, *SHORT, "--rows", 5, "--micro-batch-size", 1, "--part", "0/2"), whole[:5])


def test_a_store_fits_the_score_that_reads_it(
    alone: Commands, small_data: SmallData, score: Score, models: Models, tmp_path: Path
) -> None:
    """The scores of long context need losses in a shorter one, rho1 those of whole rows."""
    frozen = [*RUN, *small_data.flags, "--token-weighting", "frozen", "--dry-run", "--score-store"]
    rho1 = ["--weight-score", "rho1", "--weight-post", "sparse"]
    for context, fitting, other in ((24, [], rho1), (LENGTH, rho1, [])):
        store = tmp_path / str(context)
        score(store.name, models("llama"), "--context", context)
        alone.run(TRAIN, *frozen, store, *fitting)
        (done,) = alone.attempt(TRAIN, *frozen, store, *other)
        assert f"its losses are in a context of {context}, but weight_score " in done.stderr


def test_a_run_scores_as_its_export(score: Score, trained: Trained) -> None:
    """A run folder, its checkpoint under another layout, and the Hugging Face folder of the same weights."""
    exported = score("exported", trained.final, *SHORT)
    np.testing.assert_array_equal(score("run", trained.folder, *SHORT), exported)
    checkpoint = trained.folder / "checkpoints" / f"iter_{STEPS:07d}"
    assert_close(score("tp", checkpoint, *SHORT, *TP2, processes=2), exported)
    assert_close(exported, independently(trained.final, trained.rows, 24, 10))
    assert np.abs(exported - score("first", trained.initial, *SHORT)).max() > 1000 * TOLERANCE
    with pytest.raises(AssertionError, match=": its model is "):
        score("first", trained.final, *SHORT)


def test_a_scorer_of_the_first_weights(
    alone: Commands, trained: Trained, small_data: SmallData, score: Score, tmp_path: Path
) -> None:
    """The trained model has moved away from its scorer from the second step on."""
    score("store", trained.initial, *SHORT)
    frozen_flags = ["--token-weighting", "frozen", "--score-store", tmp_path / "store", "--save", tmp_path / "run"]
    alone.run(TRAIN, *RUN, *small_data.flags, *frozen_flags)
    frozen, itself = (read_jsonl(run / "metrics.jsonl") for run in (tmp_path / "run", trained.folder))
    assert [len(frozen), len(itself)] == [STEPS, STEPS]
    for name in ("lm_loss", "train_loss", "grad_norm", "weight_std", "weight_max", "score_mean"):
        assert frozen[0][name] == pytest.approx(itself[0][name], rel=1e-5)
    assert abs(itself[0]["train_loss"] - itself[0]["lm_loss"]) > 1e-3, "the weights matter"
    assert frozen[1]["score_mean"] != pytest.approx(itself[1]["score_mean"], rel=1e-3)
