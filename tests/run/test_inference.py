"""A frozen scorer: the configuration that it is given, and which rows each process computes."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from checkpoint.models import write_model
from launcher import call
from theirs import write_theirs

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, WindowConfig
from megatron_ext.config.checks import check
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.errors import UserError
from megatron_ext.run.inference import inference_config, open_model, score_missing, score_rows
from megatron_ext.short_context import ShortContext
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity

LENGTH, CHUNK, VOCABULARY = 24, 6, 50
WHOLE_CHUNKS = ShortContext(CHUNK, CHUNK, every_token=True)
SCORER = Pretrained(Path("scorer"), ModelConfig(num_layers=4, vocab_size=VOCABULARY), length=LENGTH)
RUN = Config(
    model=ModelConfig(num_layers=8, vocab_size=VOCABULARY),
    data=DataConfig(seq_length=LENGTH, data_path=("data",)),
    window=WindowConfig(window_start=2, window_schedule="constant"),
)


@pytest.mark.parametrize("microbatch", [1, 3])
@pytest.mark.parametrize(
    ("parallel", "processes"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(), 3),
        (ParallelConfig(context_parallel_size=2), 6),
        (ParallelConfig(pipeline_model_parallel_size=2), 2),
        (ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1), 6),
        (ParallelConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=60), 1),
    ],
)
def test_every_layout_may_score(parallel: ParallelConfig, processes: int, microbatch: int) -> None:
    """Also where the run itself could not be trained: 7 rows are shared out evenly by few of these layouts."""
    data = replace(RUN.data, micro_batch_size=microbatch, global_batch_size=7)
    run = replace(RUN, parallel=parallel, data=data)
    config = inference_config(SCORER, run.parallel, CHUNK, processes, bf16=False)
    check(config, processes, training=False)
    assert config.model == SCORER.model
    if 7 % (microbatch * config.data_parallel_size(processes)):
        with pytest.raises(UserError, match="global_batch_size"):
            check(run, processes)


def test_dynamic_angles_are_those_of_a_chunk() -> None:
    """A Hugging Face folder's model turns by the length of each text, one of ours by that of its rows."""
    model = replace(SCORER.model, rope_scaling="dynamic", rope_scaling_factor=4.0, rope_original_length=CHUNK)
    theirs = replace(SCORER, model=model)
    lengths = CHUNK, 4 * CHUNK
    bases = [inference_config(theirs, RUN.parallel, n, 1, bf16=False).model.rotary_base for n in lengths]
    assert bases[0] == model.rotary_base < bases[1]


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
    """Of rows 0 to 6, 1 to 5 are wanted, and 2 is there: of three processes one computes two, the others one."""
    rows, there = 7, np.full(LENGTH, 1e9, dtype=np.float32)
    opened(tmp_path / "store", rows).write(2, there)
    call(score, processes, model, tmp_path / "store", rows, range(1, 6), group=False)
    store = opened(tmp_path / "store", rows)
    assert store.missing(range(rows)) == [0, 6]
    np.testing.assert_array_equal(store.read(2), there)
    call(score, 1, model, tmp_path / "alone", rows, range(rows), group=False)
    for row in (1, 3, 4, 5):
        np.testing.assert_allclose(store.read(row), opened(tmp_path / "alone", rows).read(row), rtol=1e-5)
