"""The table of Megatron-LM's arguments against the real ones, and the translation of a run's into our options."""

from typing import Any

import pytest
import yaml

from megatron_ext.config import megatron_lm
from megatron_ext.config.from_megatron_lm import translate
from megatron_ext.config.megatron_lm import ARGUMENTS, find_argument
from megatron_ext.config.schema import FIELDS, flag
from tests.config.megatron_lm import VERSIONS, defaults
from tests.conftest import ROOT

MODEL = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_has_every_argument_and_its_default(version: str) -> None:
    theirs = defaults(version)
    assert [name for name in theirs if find_argument(name) is None] == []
    named = {name: argument.default for name, argument in ARGUMENTS.items() if name in theirs}
    assert {name for name in named if named[name] != theirs[name] and (named[name] or theirs[name])} <= {
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
    given = defaults(version) | MODEL
    result = translate(given)
    assert (result.options["ffn_hidden_size"], result.options["num_query_groups"]) == (2048, 8)
    assert result.model.keys() == {"swiglu", "normalization", "add_bias_linear", "position_embedding_type"}
    assert {"attention_dropout", "calculate_per_token_loss"} == result.training.keys()
    assert result.unknown == {}
    assert translate(given | {"swiglu": True}).options["ffn_hidden_size"] == 1344


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
    ],
)  # fmt: skip
def test_values_are_converted(given: dict[str, Any], options: dict[str, Any]) -> None:
    assert translate(MODEL | given).options.items() >= options.items()


def test_a_clause_of_the_table_is_exact_before_it_is_a_pattern() -> None:
    """mtp_* has no effect by itself, but mtp_num_layers changes the model."""
    places = [find_argument(name) for name in ("mtp_num_layers", "mtp_loss_scaling_factor", "no_such_argument")]
    assert [place and place.group for place in places] == ["model", "silent", None]
    assert megatron_lm.set_by("--no-such-argument") is None
