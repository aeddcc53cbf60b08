"""The configuration that a loaded model is given, and when two models count as the same."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig, WindowConfig
from megatron_ext.config.checks import check
from megatron_ext.errors import UserError
from megatron_ext.inference.compare import Comparison, _transformers_logits
from megatron_ext.inference.model import inference_config
from tests.checkpoint.models import SIZES
from tests.conftest import refused

LENGTH = 24
CHUNK = 6
VOCABULARY = 50
SCORER = Pretrained(Path("scorer"), ModelConfig(num_layers=4, vocab_size=VOCABULARY), length=LENGTH)
RUN = Config(
    model=ModelConfig(num_layers=8, vocab_size=VOCABULARY),
    data=DataConfig(seq_length=LENGTH, data_path=("data",), global_batch_size=7),
    window=WindowConfig(window_start=2, window_schedule="constant"),
)


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        ({}, 3),
        ({"context_parallel_size": 2}, 6),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, 6),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 60}, 3),
    ],
)
def test_every_layout_may_score(layout: dict[str, Any], processes: int) -> None:
    """The run itself could not be trained in these: none of them shares out 7 rows evenly."""
    parallel = ParallelConfig(**layout)
    config = inference_config(SCORER, parallel, CHUNK, processes, bf16=False)
    check(config, processes, training=False)
    assert config.model == SCORER.model
    with pytest.raises(UserError, match="global_batch_size"):
        check(replace(RUN, parallel=parallel), processes)


def test_dynamic_angles_are_those_of_a_chunk() -> None:
    """A Hugging Face folder's model turns by the length of each text, one of ours by the length of its rows."""
    model = replace(SCORER.model, rope_scaling="dynamic", rope_scaling_factor=4.0, rope_original_length=CHUNK)
    scorer = replace(SCORER, model=model)
    lengths = CHUNK, 4 * CHUNK
    bases = [inference_config(scorer, RUN.parallel, n, 1, bf16=False).model.rotary_base for n in lengths]
    assert bases[0] == model.rotary_base < bases[1]


SAME = Comparison(9e-4, 9e-5, 10.0, (2.0, 2.000009), ([1], [1]), "float32")


def test_each_bound_counts() -> None:
    assert SAME.agrees
    losses = (2.0, 2.000011)
    greedy = ([1], [2])
    for beyond in (
        {"largest": 1.1e-3},
        {"mean": 1.1e-4},
        {"losses": losses},
        {"greedy": greedy},
        {"largest": math.nan},
    ):
        assert not replace(SAME, **beyond).agrees, beyond  # type: ignore[arg-type]
    assert replace(SAME, greedy=([1], [2]), dtype="bfloat16").agrees  # where greedy tokens may differ


def test_any_error_of_transformers_when_it_loads_a_model_is_one_line(tmp_path: Path) -> None:
    """An example is safetensors' error, which is a bare Exception."""
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert "transformers does not load" in refused(_transformers_logits, tmp_path, "float32")
