"""The table of parameter names against transformers' own models."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_ext.checkpoint.hf.config import hugging_face_config
from megatron_ext.checkpoint.hf.folder import shapes_in_files
from megatron_ext.checkpoint.parameters import count_active_parameters, count_parameters
from megatron_ext.config import ModelConfig
from megatron_ext.config.options import PRESETS


def apart(parameters: Iterable[tuple[str, Tensor]], model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as files have them: in transformers a layer's experts are two tensors, as in gpt-oss's files."""
    mixtral = not model.qk_layernorm and model.moe_router_score_function == "softmax"
    module, gate, up, down = (
        ("block_sparse_moe", "w1", "w3", "w2") if mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    for name, tensor in parameters:
        layer, _, parameter = name.partition(".mlp.")
        if model.block == "gpt_oss" or parameter not in ("experts.gate_up_proj", "experts.down_proj"):
            renamed = f"{layer}.{module}.gate.weight" if parameter == "gate.weight" else name
            yield renamed, tuple(tensor.shape)
            continue
        experts, rows, columns = tensor.shape
        for expert in range(experts):
            matrices = (gate, up) if "gate_up" in parameter else (down,)
            for matrix in matrices:
                yield f"{layer}.{module}.experts.{expert}.{matrix}.weight", (rows // len(matrices), columns)


def assert_same_parameters(model: ModelConfig, vocab_size: int) -> None:
    values = hugging_face_config(model, vocab_size, 128)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert [type(built).__name__] == values["architectures"]
    parameter_shapes = dict(apart(built.named_parameters(), model))
    biases = {
        name: tuple(bias.shape) for name, bias in built.named_buffers() if name.endswith("e_score_correction_bias")
    }
    assert shapes_in_files(model, vocab_size) == parameter_shapes | biases
    assert count_parameters(model, vocab_size) == sum(torch.Size(shape).numel() for shape in parameter_shapes.values())


LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "kv_lora_rank": 7, "qk_head_dim": 5, "qk_pos_emb_head_dim": 4, "v_head_dim": 3
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "num_experts": 4, "moe_ffn_hidden_size": 5, "moe_shared_expert_intermediate_size": 10,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip
KINDS = [
    ModelConfig(),
    ModelConfig(add_qkv_bias=True),
    ModelConfig(qk_layernorm=True),
    ModelConfig(no_rope_freq=1),
    ModelConfig(block="phi", rotary_percent=0.5),
    ModelConfig(block="gemma3"),
    ModelConfig(block="olmo3"),
    ModelConfig(num_experts=3),
    ModelConfig(num_experts=4, moe_router_topk=3, moe_ffn_hidden_size=5, qk_layernorm=True),
    ModelConfig(block="gpt_oss", num_experts=3),
    ModelConfig(**LATENT),
    ModelConfig(**LATENT, q_lora_rank=6, **DEEPSEEK),
]


@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.block)
@given(sizes=st.tuples(*[st.integers(1, 3)] * 4), own_head=st.booleans(), ffn=st.integers(1, 40))
@settings(max_examples=8, deadline=None)
def test_names_and_shapes_are_transformers(untied: bool, kind: ModelConfig, sizes, own_head: bool, ffn: int) -> None:
    layers, groups, share, quarter_head = sizes
    heads = groups * (1 if kind.multi_latent_attention else share)
    head = 4 * quarter_head
    own_head = own_head and not kind.multi_latent_attention
    width = heads * (head + 3 if own_head else head)  # transformers wants a multiple of the heads
    kind = replace(kind, num_layers=layers, ffn_hidden_size=ffn, untie_embeddings_and_output_weights=untied)
    kind = replace(kind, hidden_size=width, num_attention_heads=heads, num_query_groups=groups)
    assert_same_parameters(replace(kind, kv_channels=head if own_head else None), vocab_size=57)


PUBLISHED = """120M 121129728  360M 367563776  1B 1100048384  3B 3015355392  Llama-3-8B 8030261248
    Qwen2.5-0.5B 494032768  Qwen3-0.6B 596049920  Qwen3-1.7B 1720574976  Qwen3-4B 4022468096  Qwen3-8B 8190735360
    Gemma-3-1B 999885952  Olmo-3-7B 7298011136  Qwen3-30B-A3B 30532122624  Mixtral-8x7B 46702792704  Phi-2 2779683840
    Moonlight-16B-A3B 15960108544  Llama-3.2-1B 1235814400  Llama-3.2-3B 3212749824
    Llama-3.1-405B 405853388800  DeepSeek-V3 671026404352"""
ONE_OF_EACH = ("1B", "Qwen2.5-0.5B", "Qwen3-8B", "Phi-2", "Gemma-3-1B", "Olmo-3-7B")
ONE_OF_EACH += ("Qwen3-30B-A3B", "Mixtral-8x7B", "Moonlight-16B-A3B")


@pytest.mark.parametrize(("name", "parameters"), re.findall(r"(\S+) (\d+)", PUBLISHED))
def test_presets_have_their_size_and_are_transformers_models(name: str, parameters: str) -> None:
    model = ModelConfig(**PRESETS[name])
    vocab_size = PRESETS[name]["vocab_size"]
    assert count_parameters(model, vocab_size) == int(parameters)
    if name in ONE_OF_EACH:
        assert_same_parameters(model, vocab_size)


def test_a_token_meets_the_experts_that_it_goes_to() -> None:
    model = ModelConfig(**PRESETS["Qwen3-30B-A3B"])
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    norms = 2 * 128 + 2 * 2048
    layer = attention + norms + 128 * 2048 + 8 * 3 * 2048 * 768
    assert count_active_parameters(model, 151936) == 48 * layer + 2 * 151936 * 2048 + 2048
    mixtral = ModelConfig(**PRESETS["Mixtral-8x7B"])
    assert f"{count_active_parameters(mixtral, 32000) / 1e9:.1f}" == "12.9"  # arXiv 2401.04088
    assert count_active_parameters(ModelConfig(), 100) == count_parameters(ModelConfig(), 100)
