"""The configuration that a loaded model is given."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, WindowConfig
from megatron_ext.config.checks import check
from megatron_ext.errors import UserError
from megatron_ext.inference.model import inference_config

LENGTH, CHUNK, VOCABULARY = 24, 6, 50
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
