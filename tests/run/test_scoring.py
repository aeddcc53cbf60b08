"""Which rows each process scores with a frozen model, and which it refuses."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, WindowConfig
from megatron_ext.data.row import TokenRow
from megatron_ext.errors import UserError
from megatron_ext.inference.model import open_model
from megatron_ext.run.scoring import score_missing, score_rows
from megatron_ext.short_context import ShortContext
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity
from tests.checkpoint.models import write_model
from tests.launcher import call
from tests.theirs import write_theirs

LENGTH = 24
CHUNK = 6
VOCABULARY = 50
WHOLE_CHUNKS = ShortContext(CHUNK, CHUNK, every_token=True)
RUN = Config(
    model=ModelConfig(num_layers=8, vocab_size=VOCABULARY),
    data=DataConfig(seq_length=LENGTH, data_path=("data",)),
    window=WindowConfig(window_start=2, window_schedule="constant"),
)


@pytest.mark.parametrize("largest", [VOCABULARY - 2, VOCABULARY - 1])
def test_only_rows_with_an_id_that_the_scorer_lacks_are_refused(largest: int, tmp_path: Path) -> None:
    scorer = write_model(tmp_path / "scorer", "llama", vocab_size=VOCABULARY - 1)
    write_theirs(tmp_path / "data", [np.full(LENGTH + 1, largest)] * 2, VOCABULARY)
    run = replace(RUN, data=replace(RUN.data, data_path=(str(tmp_path / "data"),), split="100,0,0"))
    outcome = call(scored, 1, run, scorer, tmp_path / "store")[0]
    assert outcome == ("" if largest < VOCABULARY - 1 else f"token id {largest}")


def scored(rank: int, run: Config, scorer: Path, store: Path) -> str:
    """Score one row; the token id that is refused, if one is."""
    try:
        score_rows(run, VOCABULARY, Pretrained.find(scorer), WHOLE_CHUNKS, 1, store)
    except UserError as error:
        return str(re.search(r"token id \d+", str(error))[0])  # type: ignore[index]
    return ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "llama", vocab_size=VOCABULARY)


def row_at(sample: int) -> TokenRow:
    """Row s: the same chunk of random tokens again and again."""
    chunk = np.random.default_rng(sample).integers(0, VOCABULARY, CHUNK)
    return TokenRow(np.resize(chunk, LENGTH + 1), np.array([LENGTH]), np.ones(LENGTH, dtype=np.bool_))


def score(rank: int, model: Path, store: Path, rows: int, wanted: range) -> None:
    """Score rows of `row_at` into a store, of which this process computes its share."""
    run = replace(RUN, parallel=ParallelConfig(device="cpu"))
    scorer = Pretrained.find(model)
    with open_model(scorer, run.parallel, CHUNK) as opened_model:
        score_missing(opened_model, run, WHOLE_CHUNKS, row_at, opened(store, rows), wanted)
    dist.destroy_process_group()


def opened(store: Path, rows: int) -> ScoreStore:
    sizes = {"rows": rows, "row_length": LENGTH, "short_context": CHUNK, "short_stride": CHUNK, "seed": 1}
    contents = dict.fromkeys(("data", "packing", "tokenizer", "model"), "0" * 64)
    return ScoreStore.create_or_resume(store, StoreIdentity(vocab_size=VOCABULARY, **sizes, **contents))  # type: ignore[arg-type]


@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_only_rows_that_are_wanted_and_missing_are_computed(model: Path, tmp_path: Path, processes: int) -> None:
    """Rows 1 to 5 of 0 to 6 are wanted, and 2 is there: of three processes one computes two, the others one."""
    rows = 7
    there = np.full(LENGTH, 1e9, dtype=np.float32)
    opened(tmp_path / "store", rows).write(2, there)
    call(score, processes, model, tmp_path / "store", rows, range(1, 6), group=False)
    store = opened(tmp_path / "store", rows)
    assert store.missing(range(rows)) == [0, 6]
    np.testing.assert_array_equal(store.read(2), there)
    call(score, 1, model, tmp_path / "alone", rows, range(rows), group=False)
    for row in (1, 3, 4, 5):
        np.testing.assert_allclose(store.read(row), opened(tmp_path / "alone", rows).read(row), rtol=1e-5)
