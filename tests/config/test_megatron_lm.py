"""The table of Megatron-LM's arguments against the real ones, and the translation of a run's into our options."""

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import yaml
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_ext.config import megatron_lm
from megatron_ext.config.from_megatron_lm import translate
from megatron_ext.config.megatron_lm import ARGUMENTS, find_argument
from megatron_ext.config.options import ParallelConfig
from megatron_ext.config.schema import FIELDS, flag
from tests.config.megatron_lm import VERSIONS, defaults
from tests.conftest import ROOT

MODEL = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
LATENT = {"multi_latent_attention": True, "qk_layernorm": True, "layernorm_epsilon": 1e-6}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_has_every_argument_and_its_default(version: str) -> None:
    expected = defaults(version)
    assert [name for name in expected if find_argument(name) is None] == []
    named = {name: argument.default for name, argument in ARGUMENTS.items() if name in expected}
    assert {name for name in named if named[name] != expected[name] and (named[name] or expected[name])} <= {
        "attention_backend",  # an enum
        "muon_tp_mode",  # changed in the last version
    }


def test_the_page_has_the_table_of_differences() -> None:
    """python -m megatron_ext.config.megatron_lm prints it, from the defaults of both."""
    page = (ROOT / "docs/howto/from-megatron-lm.md").read_text(encoding="utf-8")
    rows = megatron_lm.differences()
    assert rows in page
    for name in ("weight_decay", "adam_beta2", "lr_decay_style", "ffn_hidden_size", "log_interval"):
        assert f"`{flag(name)}` | {ARGUMENTS[name].default or 'none'} | {FIELDS[name].default}" in rows


def test_no_argument_has_two_places() -> None:
    table = yaml.safe_load((ROOT / "megatron_ext/config/megatron_lm.yaml").read_text(encoding="utf-8"))
    names = [name for group in ("carried", "model", "training") for names in table[group].values() for name in names]
    names += [name for text in table["silent"].values() for name in text.split()]
    assert len(names) == len(set(names))
    assert table["only"].keys() <= ARGUMENTS.keys()
    assert all(find_argument(name) for part in ("flags", "switched_off_by") for name in table[part].values())


@pytest.mark.parametrize("version", VERSIONS)
def test_defaults_are_those_of_megatron_lm(version: str) -> None:
    """A flag that is not given means Megatron-LM's default: four times the width, all heads with keys, GELU."""
    arguments = defaults(version) | MODEL
    result = translate(arguments)
    assert (result.options["ffn_hidden_size"], result.options["num_query_groups"]) == (2048, 8)
    assert result.model.keys() == {"swiglu", "normalization", "add_bias_linear", "position_embedding_type"}
    assert {"attention_dropout", "calculate_per_token_loss"} == result.training.keys()
    assert result.unknown == {}
    assert translate(arguments | {"swiglu": True}).options["ffn_hidden_size"] == 1344


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"window_size": (127, 0)}, {"local_window": 128}),
        ({"window_size": "(127,0)", "window_attn_skip_freq": 4}, {"local_window": 128, "window_attn_skip_freq": 4}),
        ({"num_query_groups": 2}, {"num_query_groups": 8}),
        ({"num_query_groups": 2, "group_query_attention": True}, {"num_query_groups": 2}),
        ({"norm_epsilon": 1e-6}, {"norm_epsilon": 1e-6}),  # 0.15
        ({"layernorm_epsilon": 1e-6}, {"norm_epsilon": 1e-6}),
        ({"num_experts": 4, "moe_layer_freq": "([0]+[1])*2"}, {"moe_layer_freq": [0, 1, 0, 1]}),
        ({"num_experts": 4, "moe_layer_freq": 2}, {"moe_layer_freq": [1, 0, 1, 0]}),
        ({"num_experts": 4, "moe_aux_loss_coeff": 0.01},
         {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}),
        ({"num_experts": 4, "moe_aux_loss_coeff": [0, 0.2], "moe_router_load_balancing_type": ["none", "seq_aux_loss"]},
         {"moe_aux_loss_coeff": 0.2, "moe_router_load_balancing_type": "seq_aux_loss"}),
        ({"use_rope_scaling": True, "rope_scaling_factor": 4.0}, {"rope_scaling": "llama3", "rope_scaling_factor": 4}),
        ({"rotary_seq_len_interpolation_factor": 2}, {"rope_scaling": "linear", "rope_scaling_factor": 2}),
        (LATENT | {"kv_channels": 64},
         {"kv_lora_rank": 32, "num_query_groups": 8, "multi_latent_attention": True, "v_head_dim": 128}),
        (LATENT | {"rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0},
         {"rope_scaling": "yarn", "rope_scaling_factor": 40.0, "rope_original_length": 4096, "rope_mscale_all_dim": 1}),
        ({"mock_data": True, "data_path": ["a"]}, {"data_path": ["a"]}),
        ({"train_data_path": ["a"], "valid_data_path": ["b"]}, {"data_path": ["a"], "split": "100,0,0"}),
    ],
)  # fmt: skip
def test_values_are_converted(given: dict[str, Any], options: dict[str, Any]) -> None:
    assert translate(MODEL | given).options.items() >= options.items()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}, "use_rope_scaling"),
        (LATENT | {"qk_layernorm": False}, "multi_latent_attention"),
        (LATENT | {"layernorm_epsilon": 1e-5}, "multi_latent_attention"),
        (LATENT | {"rotary_scaling_factor": 0.5}, "use_rope_scaling"),
        (LATENT | {"rotary_scaling_factor": 4, "rope_type": "rope", "mscale_all_dim": 1}, "use_rope_scaling"),
        ({"window_size": 128}, "window_size"),
        ({"window_size": "$W"}, "window_size"),
        ({"num_experts": 4, "moe_layer_freq": 2, "num_layers": None}, "moe_layer_freq"),
        ({"num_experts": 4, "moe_layer_freq": 0}, "moe_layer_freq"),
    ],
)
def test_values_that_cannot_be_converted_are_refused_in_one_line(given: dict[str, Any], line: str) -> None:
    text = translate(MODEL | given).model[line]
    assert "needs" in text
    assert "\n" not in text


def test_options_of_latent_attention_are_read_with_it_alone() -> None:
    names = {"kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
    assert not translate(MODEL | {"kv_channels": 64}).options.keys() & names
    latent = translate(MODEL | LATENT | {"kv_channels": 64}).options
    assert latent.keys() > names
    assert not latent.keys() & {"kv_channels", "qk_layernorm"}


@pytest.mark.parametrize(
    "given",
    [
        *({"first_last_layers_bf16": True}, {"num_layers_at_start_in_bf16": 2}, {"num_layers_at_end_in_bf16": 2}),
        *({"fp8_wgrad": False}, {"fp8_output_proj": True}, {"fp32_residual_connection": True}),
        *({"logit_dtype": "fp32"}, {"fp16_lm_cross_entropy": True}, {"moe_dispatch_fwd_dtype": "fp8"}),
    ],
)
def test_other_precisions_change_the_training(given: dict[str, Any]) -> None:
    assert translate(given).training.keys() >= given.keys()


PP4: dict[str, Any] = {"pipeline_model_parallel_size": 4}
PIPELINE = {*PP4, "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"}


@pytest.mark.parametrize(
    ("layers", "given"),
    [
        (10, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
        (15, {"account_for_loss_in_pipeline_split": True, "num_layers_per_virtual_pipeline_stage": 2}),
        (11, {"decoder_first_pipeline_num_layers": 2}),
        (13, {"decoder_last_pipeline_num_layers": 1}),
        (12, {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 4}),
        (20, {"decoder_first_pipeline_num_layers": 2, "num_virtual_stages_per_pipeline_rank": 2}),
        (16, {"num_virtual_stages_per_pipeline_rank": 2}),
        (16, {"num_layers_per_virtual_pipeline_stage": 1}),
        (13, {"pipeline_model_parallel_layout": "Et*3,|(t*4|)*2,t*2L"}),
    ],
)
def test_stages_have_the_layers_that_megatron_builds(layers: int, given: dict[str, Any]) -> None:
    """Megatron-Core's own count is the same for each stage and virtual stage."""
    result = translate(MODEL | PP4 | given | {"num_layers": layers})
    parallel = ParallelConfig(**{name: result.options[name] for name in result.options if name in PIPELINE})
    chunks = parallel.layers_of_chunks(layers)
    virtual = len(chunks) // 4
    sizes = given.copy()
    for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        sizes.pop(name, None)
    for end in ("first", "last"):
        number = sizes.pop(f"decoder_{end}_pipeline_num_layers", None)
        sizes[f"num_layers_in_{end}_pipeline_stage"] = number
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None, **PP4, **sizes,
    )  # fmt: skip
    layout = config.pipeline_model_parallel_layout
    for number, size in enumerate(chunks):
        part, stage = divmod(number, 4)
        if layout is None:
            built = get_num_layers_to_build(config, part if virtual > 1 else None, stage)
        else:
            built = layout.layout[stage][part].count(LayerType.decoder)
        assert size == built


def test_layers_that_fill_no_stages_are_refused_in_one_line() -> None:
    arguments = {"decoder_first_pipeline_num_layers": 2, "num_layers": 10}
    assert "10 layers" in translate(MODEL | PP4 | arguments).training["pipeline_model_parallel_layout"]
    assert "needs" in translate(MODEL | PP4 | {"pipeline_model_parallel_layout": "Ettm|L"}).training.popitem()[1]


def test_the_old_switch_for_rotary_positions_is_read() -> None:
    assert "position_embedding_type" not in translate({"use_rotary_position_embeddings": True}).model


def test_the_vocabulary_of_null_tokenizers_is_for_the_user_to_decide() -> None:
    """The installed Megatron-Core pads it to one of the two numbers."""
    tokenizer = NullTokenizer(100)
    result = translate({"tokenizer_type": "NullTokenizer", "vocab_size": 100})
    assert "vocab_size" not in result.options
    assert {"100", "101", str(tokenizer.vocab_size)} <= set(re.findall(r"\d{3}", result.training["tokenizer_type"]))


def test_what_is_always_saved_is_not_called_unsaved() -> None:
    for word in ("--no-save-optim", "--no-save-rng"):
        assert "always saved" in str(megatron_lm.equivalent(word, ""))


# option with another place than silent: the arguments that are read only with one of its values that is refused
READ_WITH = {
    "mtp_num_layers": "mtp_*",
    "experimental_attention_variant": "dsa_*",
    "linear_attention_freq": "linear_*",
    "is_hybrid_model": "mamba_* use_mamba_mem_eff_path",
    "use_mup": "mup_*",
    "enable_mhc_connections": "mhc_*",
    "qk_clip": "qk_clip_*",
    "optimizer": "lion_* sgd_*",
    "fp8_recipe": "fp8_interval fp8_margin fp8_amax_history_len",
    "fp16": "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    "position_embedding_type": "mrope_section",
    "moe_expert_capacity_factor": "moe_pad_expert_input_to_capacity",
    "moe_router_load_balancing_type": "moe_router_quantile_balancing_ema",
}
# reason: the arguments that change nothing but the rounding of the result
SAME_RESULT = {
    "the order of sums": "masked_softmax_fusion bias_dropout_fusion apply_rope_fusion fused_residual_rmsnorm "
    "moe_permute_fusion* moe_router_fusion use_fused_weighted_squared_relu use_te_activation_func batch_invariant_mode "
    "use_transformer_engine_op_fuser apply_query_key_layer_scaling disable_bf16_reduced_precision_matmul "
    "attention_softmax_in_fp32 moe_use_legacy_grouped_gemm use_grouped_gemm_* "
    "moe_single_grouped_* use_torch_optimizer_for_cpu_offload",
    "memory": "init_model_with_meta_device distribute_saved_activations clone_scatter_output_in_embedding "
    "moe_layer_recompute *offload* pin_cpu_* mlp_chunks_for_training moe_paged_stash* moe_enable_routing_replay "
    "reuse_grad_buf_for_mxfp8_param_ag",
    "communication": "moe_shared_expert_overlap moe_enable_deepep moe_deepep_num_sms moe_flex_dispatcher_num_sms "
    "moe_hybridep_* moe_ncclep_* moe_router_padding_for_* overlap_* high_priority_a2a_comm_stream",
    "launches": "enable_cuda_graph external_cuda_graph cuda_graph_* optimizer_cuda_graph "
    "moe_pad_experts_for_cuda_graph_inference",
    "logs and tests": "log_* moe_per_layer_logging barrier_with_L1_time test_mode",
    "inference": "flash_decode inference_* mlp_chunks_for_prefill nccl_all_reduce_for_prefill",
}


@pytest.mark.parametrize("config", [TransformerConfig, OptimizerConfig])
def test_switches_and_numbers_of_megatron_core_are_silent_for_a_reason(config: type) -> None:
    """What its two configurations read may change the result, so each silent argument of them is listed above."""
    reasons = [pattern for names in (READ_WITH | SAME_RESULT).values() for pattern in names.split()]
    places = {option: find_argument(option) for option in READ_WITH}
    assert [option for option, place in places.items() if place is None or place.group == "silent"] == []
    arguments = defaults(VERSIONS[-1])
    unexplained = []
    for name, hint in config.__annotations__.items():
        place = find_argument(name)
        is_number = re.search(r"bool|int|float", str(hint)) is not None
        is_silent = place is not None and place.group == "silent" and name in arguments
        if is_number and is_silent and not any(fnmatchcase(name, pattern) for pattern in reasons):
            unexplained.append(name)
    assert unexplained == []


def test_a_clause_of_the_table_is_exact_before_it_is_a_pattern() -> None:
    """mtp_* has no effect by itself, but mtp_num_layers changes the model."""
    places = [find_argument(name) for name in ("mtp_num_layers", "mtp_loss_scaling_factor", "no_such_argument")]
    assert [place and place.group for place in places] == ["model", "silent", None]
    assert megatron_lm.set_by("--no-such-argument") is None
