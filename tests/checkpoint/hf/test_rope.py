"""Rotary entries of config.json: the frequencies of transformers, there and back, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

from megatron_ext.checkpoint.hf.config import hugging_face_config, model_config
from megatron_ext.config import ModelConfig
from megatron_ext.rope import angles, attention_factor, model_frequencies, score_factor
from tests.checkpoint.models import ARCHITECTURES, SCALED, SIZES
from tests.conftest import refused

OLMO_AND_GEMMA = {"olmo3": Olmo3RotaryEmbedding, "gemma3": Gemma3RotaryEmbedding}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def content(rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    plain = {name: value for name, value in SIZES.items() if name != "rope_parameters"}
    return plain | {"model_type": "llama", "rope_parameters": {"rope_theta": 500.0} | rope} | more


def assert_same_angles(entries: dict[str, Any], model: ModelConfig, length: int) -> None:
    """Compare transformers' rotations at positions up to `length` with our frequencies and factor."""
    embedding = LlamaRotaryEmbedding(AutoConfig.for_model(**entries))
    positions = torch.arange(length)[None]
    cos, sin = embedding(torch.zeros(1), positions)
    expected_angles = angles(positions[0], model_frequencies(model, length))
    factor = attention_factor(model)
    torch.testing.assert_close(cos[0], expected_angles.cos() * factor, rtol=0, atol=2e-5 * factor)
    torch.testing.assert_close(sin[0], expected_angles.sin() * factor, rtol=0, atol=2e-5 * factor)


@pytest.mark.parametrize("length", [20, 128, 200])
@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"factor": 1.0, "rope_type": "linear"},
        *({"rope_type": kind, **entries} for kind, entries in SCALED.items()),
        YARN | {"beta_fast": 16, "beta_slow": 2},
        YARN | {"beta_fast": None, "beta_slow": None, "truncate": True},
        YARN | {"attention_factor": 1.5},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], length: int) -> None:
    """Where an original length is missing, transformers takes max_position_embeddings; dynamic follows the length.

    What we write is read at the rows' length, under which training saw every position.
    """
    entries = content(rope)
    model = model_config(entries)
    for read in (entries, hugging_face_config(model, 300, length)):
        assert_same_angles(read, model, length)


@pytest.mark.parametrize("architecture", ["olmo3", "gemma3"])
@pytest.mark.parametrize("place", ["full_attention", "rope_parameters", "original"])
def test_entries_for_kinds_of_layers_are_read_where_transformers_reads_them(architecture: str, place: str) -> None:
    """`truncate` beside the kinds of layers, the original length with its kind; both ways."""
    yarn = YARN | {"rope_theta": 500.0, "beta_fast": 7.3, "beta_slow": 1.7}
    parameters: dict[str, Any] = {"full_attention": yarn}
    parameters["sliding_attention"] = {"rope_type": "default", "rope_theta": 500.0}
    entries = SIZES | ARCHITECTURES[architecture] | {"rope_parameters": parameters}
    if place == "original":
        entries["original_max_position_embeddings"] = 100
    else:
        (parameters if place == "rope_parameters" else yarn)["truncate"] = False
    model = model_config(entries)
    embedding = OLMO_AND_GEMMA[architecture]
    for read in (entries, hugging_face_config(model, 300, entries["max_position_embeddings"])):
        theirs = embedding(AutoConfig.for_model(**read)).full_attention_inv_freq
        torch.testing.assert_close(theirs.double(), model_frequencies(model, 128), rtol=1e-5, atol=0)


def test_an_export_says_the_same_to_transformers_4() -> None:
    """Which reads these entries at the top alone."""
    phi = model_config(SIZES | ARCHITECTURES["phi"] | {"partial_rotary_factor": 0.25, "rope_parameters": None})
    assert hugging_face_config(phi, 300, 64)["partial_rotary_factor"] == 0.25
    local = {"rope_type": "default", "rope_theta": 70.0}
    gemma = SIZES | ARCHITECTURES["gemma3"] | {"rope_parameters": {"sliding_attention": local}}
    assert hugging_face_config(model_config(gemma), 300, 64)["rope_local_base_freq"] == 70.0


def test_old_entries_beside_new_ones_mean_what_they_do_to_transformers() -> None:
    for old in ({"rope_theta": 9.0}, {"rope_scaling": {"type": "linear", "factor": 2.0}}):
        entries = content({"rope_type": "default"}, **old)
        assert_same_angles(entries, model_config(entries), 128)


@pytest.mark.parametrize(
    "scales",
    [
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"mscale_all_dim": 0.7},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"attention_factor": 0.5, "mscale_all_dim": 0.7},
    ],
    ids=str,
)
def test_deepseeks_factors_both_ways(scales: dict[str, float]) -> None:
    """The factors of rotated queries and keys, and of all scores, are read and written."""
    entries = SIZES | ARCHITECTURES["deepseek_v3-dense"] | {"rope_parameters": YARN | {"rope_theta": 500.0} | scales}
    model = model_config(entries)
    for content in (entries, hugging_face_config(model, 300, 128)):
        config = AutoConfig.for_model(**content)
        assert attention_factor(model) == pytest.approx(LlamaRotaryEmbedding(config).attention_scaling, rel=1e-9)
        factor = DeepseekV3Attention(config, 0).scaling * model.head_size**0.5
        assert score_factor(model) == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize(
    ("rope", "text"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type 'longrope': Input should be 'default'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, this model has 1.0 only"),
        ({"mrope_section": [2, 1, 1]}, "mrope_section [2, 1, 1] in its rope_parameters, which default does not read"),
        ({"full_attention": {"rope_theta": 1e4}}, "full_attention"),
        ({"rope_type": "linear", "factor": 0.5}, "cannot run here: rope_scaling_factor: got 0.5"),
        (YARN | {"beta_fast": 1, "beta_slow": 2}, "cannot run here: rope_beta_fast"),
    ],
)
def test_angles_that_ours_are_not(rope: dict[str, Any], text: str) -> None:
    assert text in refused(model_config, content(rope))


def test_a_base_that_followed_the_window_is_the_last_one() -> None:
    model = ModelConfig(vocab_size=300, rotary_base=7e15, rope_window_bases=("32:10000",))
    entries = hugging_face_config(model, 300, 128)
    assert entries["rope_parameters"] == {"rope_type": "default", "rope_theta": 7e15}
    assert "rope_scaling" not in entries
