"""Inputs of a run are checked before its processes wait for each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.config import CheckpointConfig, Config, ModelConfig
from megatron_ext.errors import UserError
from megatron_ext.run.inputs import first_weights

SHAPES = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "rms_norm_eps": 1e-5}
SHAPES |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}


def config(folder: Path, init_optimizer: bool = False, **shapes: int) -> Config:
    model = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2} | shapes
    model |= {"num_query_groups": 2, "untie_embeddings_and_output_weights": True}
    checkpoint = CheckpointConfig(init_from=str(folder), init_optimizer=init_optimizer)
    return Config(model=ModelConfig(**model), checkpoint=checkpoint)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES))
    return tmp_path


def test_a_missing_optimizer_state_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="is a Hugging Face folder, which has no optimizer state"):
        first_weights(config(folder, init_optimizer=True), 64)
