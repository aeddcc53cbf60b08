"""The table of parameter names: Megatron and Hugging Face names, and the conversion between them.

Megatron fuses queries, keys and values (interleaved by query group) and the two SwiGLU matrices, and distributes rows
or columns over tensor-parallel (TP) ranks. `fuse_into` and `unfuse` use the table in both directions.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.config.blocks import BLOCKS


class Cut(Enum):
    """How a full tensor is distributed over TP ranks."""

    WHOLE = auto()  # every rank holds all of it
    COLUMNS = auto()
    ROWS = auto()
    VOCABULARY = auto()  # rows, after padding
    QKV = auto()  # queries, keys and values are interleaved by query group; groups are distributed
    GATE_UP = auto()  # rows of gate and of up are distributed separately, then stacked


Place = tuple[int, ...]  # (), (layer,) or (layer, expert)


@dataclass(frozen=True)
class Parameter:
    """A row of the table; `{0}` stands for the layer, `{1}` for the expert, counted from 0 over the whole model."""

    # the traits of models that have it, see `parameters_of`; "dense" and "experts" also limit it to the layers without
    # and with experts
    traits: frozenset[str]
    cut: Cut  # how it is distributed
    # its names in `named_parameters()`; the last one applies if a layer fuses a norm with the matrix after it, or
    # several experts in one module
    megatron: tuple[str, ...]
    hugging_face: tuple[str, ...]  # the tensors that it is assembled from
    trained: bool = True  # whether it has a gradient; otherwise it is a buffer

    def in_layer(self, model: ModelConfig, layer: int) -> bool:
        """Return whether a layer, counted from 0, has this parameter, in a model that has it."""
        if model.has_experts(layer):
            return "dense" not in self.traits
        return "experts" not in self.traits

    def checkpoint(self, place: Place) -> str:
        """Return its name in a checkpoint, independent of the run's layer classes; a norm has its fused name."""
        name = self.megatron[0] if self.of_experts else self.megatron[-1]
        return name.replace("local_experts.", "").format(*place)

    @property
    def stacked(self) -> bool:
        """Whether layers have one each."""
        return "{0}" in self.megatron[0]

    @property
    def of_experts(self) -> bool:
        """Whether every expert of a layer has one."""
        return "{1}" in self.megatron[0]

    def places(self, model: ModelConfig) -> list[Place]:
        """Return its places in the model: each layer, each expert of each layer, or one empty place."""
        if not self.stacked:
            return [()]
        layers = [layer for layer in range(model.num_layers) if self.in_layer(model, layer)]
        if self.of_experts:
            return list(itertools.product(layers, range(model.num_experts or 0)))
        return [(layer,) for layer in layers]

    def names(self, place: Place) -> tuple[str, ...]:
        """Return its Hugging Face names at a place."""
        return tuple(name.format(*place) for name in self.hugging_face)


def _row(
    traits: str, cut: Cut, megatron: str, hugging_face: str, prefixes: Sequence[str] = ("", ""), *, trained: bool = True
) -> Parameter:
    """Return a row of the table; several traits or names are separated by spaces."""
    megatron_names = tuple(prefixes[0] + name for name in megatron.split())
    hugging_face_names = tuple(prefixes[1] + name for name in hugging_face.split())
    return Parameter(frozenset(traits.split()), cut, megatron_names, hugging_face_names, trained)


_layer = partial(_row, prefixes=("decoder.layers.{0}.", "model.layers.{0}."))  # a parameter of each layer


def _experts(
    traits: str, module: str, router: str, gate_up: str, down: str, kind: str = "weight"
) -> tuple[Parameter, ...]:
    """Return the rows of a router and its experts, with a family's names."""
    first, second = (
        f"mlp.experts.local_experts.{{1}}.linear_fc{n}.{kind} mlp.experts.linear_fc{n}.{kind}{{1}}" for n in (1, 2)
    )
    matrices = " ".join(f"{module}.experts.{{1}}.{name}.{kind}" for name in gate_up.split())
    columns = Cut.COLUMNS if kind == "weight" else Cut.WHOLE
    return (
        _layer(f"{traits} experts", Cut.WHOLE, f"mlp.router.{kind}", f"{module}.{router}.{kind}"),
        _layer(f"{traits} experts", Cut.GATE_UP, first, matrices),
        _layer(f"{traits} experts", columns, second, f"{module}.experts.{{1}}.{down}.{kind}"),
    )


@cache
def parameters_of(model: ModelConfig) -> tuple[Parameter, ...]:
    """Return the rows of the table that apply to this model."""
    block = model.traits
    latent = model.multi_latent_attention
    low_rank = model.q_lora_rank is not None
    as_qwen = model.qk_layernorm or model.moe_router_score_function == "sigmoid"
    traits = {
        **{family if family == model.block else f"not_{family}": True for family in BLOCKS},
        "layer_norm": block.norm == "LayerNorm",
        "post_norms": block.post_norm,
        "mlp_norm": block.pre_mlp_norm and not block.post_norm,
        "input_norm": block.pre_norm and not latent,
        "qkv": not latent,
        "qkv_bias": model.has_qkv_bias,
        "head_norms": model.has_qk_norms and block.qk_norm != "all_heads",
        "whole_norms": block.qk_norm == "all_heads",
        "latent": latent,
        "full_rank_queries": latent and not low_rank,
        "low_rank_queries": latent and low_rank,
        "sinks": model.has_sinks,
        "gated": block.gated_mlp,
        "output_bias": block.output_bias,
        "dense": model.expert_layers < model.num_layers,
        "experts": model.expert_layers > 0,
        "as_qwen": as_qwen,
        "as_mixtral": not (as_qwen or block.stacked_experts),
        "router_bias": model.moe_router_enable_expert_bias,
        "shared_experts": model.moe_shared_expert_intermediate_size is not None,
        "untied": model.untie_embeddings_and_output_weights,
    }
    return tuple(row for row in TABLE if all(traits.get(trait) for trait in row.traits))


_QKV = "self_attention.linear_qkv"
_MLP_NORM = "pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight"
_QUERY_NORM = "self_attention.q_layernorm.weight self_attention.linear_q_up_proj.layer_norm_weight"
_LATENT_NORM = "self_attention.kv_layernorm.weight self_attention.linear_kv_up_proj.layer_norm_weight"

TABLE: tuple[Parameter, ...] = (
    _row("", Cut.VOCABULARY, "embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    _layer("input_norm", Cut.WHOLE, f"input_layernorm.weight {_QKV}.layer_norm_weight", "input_layernorm.weight"),
    _layer("latent", Cut.WHOLE, "input_layernorm.weight", "input_layernorm.weight"),  # two matrices read its output
    _layer("layer_norm", Cut.WHOLE, f"input_layernorm.bias {_QKV}.layer_norm_bias", "input_layernorm.bias"),
    _layer("qkv", Cut.QKV, f"{_QKV}.weight", "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight"),
    _layer("qkv_bias", Cut.QKV, f"{_QKV}.bias", "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"),
    _layer("head_norms", Cut.WHOLE, "self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _layer("head_norms", Cut.WHOLE, "self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    # these have a weight for each head, distributed like the heads
    _layer("whole_norms", Cut.ROWS, "self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _layer("whole_norms", Cut.ROWS, "self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    _layer("full_rank_queries", Cut.ROWS, "self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    _layer("low_rank_queries", Cut.WHOLE, "self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    _layer("low_rank_queries", Cut.WHOLE, _QUERY_NORM, "self_attn.q_a_layernorm.weight"),
    _layer("low_rank_queries", Cut.ROWS, "self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    _layer("latent", Cut.WHOLE, "self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    _layer("latent", Cut.WHOLE, _LATENT_NORM, "self_attn.kv_a_layernorm.weight"),
    _layer("latent", Cut.ROWS, "self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    _layer("sinks", Cut.ROWS, "self_attention.core_attention.softmax_offset", "self_attn.sinks"),
    _layer("not_phi", Cut.COLUMNS, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    _layer("phi", Cut.COLUMNS, "self_attention.linear_proj.weight", "self_attn.dense.weight"),
    _layer("phi", Cut.WHOLE, "self_attention.linear_proj.bias", "self_attn.dense.bias"),
    _layer("gpt_oss", Cut.WHOLE, "self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
    _layer("mlp_norm dense", Cut.WHOLE, _MLP_NORM, "post_attention_layernorm.weight"),
    # not fused, because a router is between this norm and the matrices after it
    _layer("experts", Cut.WHOLE, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _layer("post_norms", Cut.WHOLE, "post_attention_norm.weight", "post_attention_layernorm.weight"),
    _layer("gemma3", Cut.WHOLE, _MLP_NORM, "pre_feedforward_layernorm.weight"),
    _layer("post_norms", Cut.WHOLE, "post_mlp_norm.weight", "post_feedforward_layernorm.weight"),
    _layer("gated dense", Cut.GATE_UP, "mlp.linear_fc1.weight", "mlp.gate_proj.weight mlp.up_proj.weight"),
    _layer("gated dense", Cut.COLUMNS, "mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    *_experts("as_qwen", "mlp", "gate", "gate_proj up_proj", "down_proj"),
    *_experts("as_mixtral", "block_sparse_moe", "gate", "w1 w3", "w2"),
    _layer(
        "router_bias experts", Cut.WHOLE, "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", trained=False
    ),
    _layer(
        "shared_experts experts",
        Cut.GATE_UP,
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
    ),
    _layer(
        "shared_experts experts",
        Cut.COLUMNS,
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight",
    ),
    # in files all experts of a layer are one tensor (folder.py)
    *_experts("gpt_oss", "mlp", "router", "gate_proj up_proj", "down_proj"),
    *_experts("gpt_oss", "mlp", "router", "gate_proj up_proj", "down_proj", "bias"),
    _layer("phi", Cut.ROWS, "mlp.linear_fc1.weight", "mlp.fc1.weight"),
    _layer("phi", Cut.ROWS, "mlp.linear_fc1.bias", "mlp.fc1.bias"),
    _layer("phi", Cut.COLUMNS, "mlp.linear_fc2.weight", "mlp.fc2.weight"),
    _layer("phi", Cut.WHOLE, "mlp.linear_fc2.bias", "mlp.fc2.bias"),
    _row("not_phi", Cut.WHOLE, "decoder.final_layernorm.weight", "model.norm.weight"),
    _row("phi", Cut.WHOLE, "decoder.final_layernorm.weight", "model.final_layernorm.weight"),
    _row("phi", Cut.WHOLE, "decoder.final_layernorm.bias", "model.final_layernorm.bias"),
    _row("untied", Cut.VOCABULARY, "output_layer.weight", "lm_head.weight"),
    _row("output_bias", Cut.VOCABULARY, "output_layer.bias", "lm_head.bias"),
)


_LAYER_NUMBER = re.compile(r"(?<=\.layers\.)\d+")
_EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$")


def find(megatron_name: str, first_layer: int, model: ModelConfig, first_expert: int = 0) -> tuple[Parameter, Place]:
    """Find the row of a parameter of a model chunk, and its place in the whole model; KeyError if there is none.

    `first_layer` and `first_expert`: the numbers, from 0, of the chunk's first layer and this process's first expert.
    """
    place = []
    pattern = megatron_name
    for number, field, first in ((_LAYER_NUMBER, "0", first_layer), (_EXPERT_NUMBER, "1", first_expert)):
        match = number.search(pattern)
        if match:
            place.append(int(match.group()) + first)
            pattern = f"{pattern[: match.start()]}{{{field}}}{pattern[match.end() :]}"
    for row in parameters_of(model):
        if pattern in row.megatron and (not place or row.in_layer(model, place[0])):
            return row, tuple(place)
    raise KeyError(megatron_name)


def full_shape(hugging_face_name: str, model: ModelConfig, vocab_size: int) -> tuple[int, ...]:
    """Return the shape of a Hugging Face parameter of this model."""
    width = model.hidden_size
    heads = model.num_attention_heads
    query_width = heads * model.head_size
    key_width = model.num_query_groups * model.head_size
    rank = model.q_lora_rank or 0
    query_norm = key_norm = model.head_size
    if model.traits.qk_norm == "all_heads":
        query_norm = query_width
        key_norm = key_width
    inner = model.ffn_hidden_size
    if ".experts." in hugging_face_name:
        inner = model.expert_width
    elif ".shared_experts." in hugging_face_name:
        inner = model.moe_shared_expert_intermediate_size or 0
    shapes = {
        "embed_tokens": (vocab_size, width),
        "lm_head": (vocab_size, width),
        "q_proj": (query_width, width),
        "k_proj": (key_width, width),
        "v_proj": (key_width, width),
        "q_norm": (query_norm,),
        "k_norm": (key_norm,),
        "self_attn": (heads,),  # the sinks
        "q_a_proj": (rank, width),
        "q_a_layernorm": (rank,),
        "q_b_proj": (query_width, rank),
        "kv_a_proj_with_mqa": (model.kv_lora_rank + model.qk_pos_emb_head_dim, width),
        "kv_a_layernorm": (model.kv_lora_rank,),
        "kv_b_proj": (heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank),
        "o_proj": (width, heads * model.value_size),
        "dense": (width, query_width),
        "gate": (model.num_experts or 0, width),
        "router": (model.num_experts or 0, width),
        **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3", "fc1"), (inner, width)),
        **dict.fromkeys(("down_proj", "w2", "fc2"), (width, inner)),
    }
    module = hugging_face_name.split(".")[-2]
    shape = shapes.get(module, (width,))
    if hugging_face_name.endswith("bias"):
        return shape[:1]
    return shape


def _rows_of(parameter: Parameter, model: ModelConfig, vocab_size: int) -> list[tuple[int, range]]:
    """Return the parts of a whole Megatron tensor, top to bottom: the index of a Hugging Face tensor, and its rows.

    QKV:      q of group 0 | k of group 0 | v of group 0 | q of group 1 | ...
    GATE_UP:  gate | up
    """
    if parameter.cut is Cut.QKV:
        head = model.head_size
        sizes = (model.num_attention_heads // model.num_query_groups * head, head, head)
        return [
            (part, range(group * size, (group + 1) * size))
            for group in range(model.num_query_groups)
            for part, size in enumerate(sizes)
        ]
    counts = [full_shape(name, model, vocab_size)[0] for name in parameter.hugging_face]
    return [(part, range(count)) for part, count in enumerate(counts)]


def fuse_into(
    part: Tensor,
    offset: Sequence[int],
    parameter: Parameter,
    tensors: Sequence[Any],
    model: ModelConfig,
    vocab_size: int,
) -> None:
    """Set a part of a Megatron tensor from the Hugging Face tensors that it is assembled from; padding becomes 0.

    Args:
        part: rows and columns of the whole Megatron tensor, from `offset` on.
        offset: the first row of the part and, of a matrix, the first column.
        parameter: the row of the table.
        tensors: its Hugging Face tensors, or safetensors slices, of which only what the part needs is read.
        model, vocab_size: shapes of the whole model.
    """
    columns = [slice(first, first + size) for first, size in zip(offset[1:], part.shape[1:], strict=True)]
    row = -offset[0]  # where the next rows begin in the part
    for source, rows in _rows_of(parameter, model, vocab_size):
        first = max(row, 0)
        last = min(row + len(rows), len(part))
        if first < last:
            source_rows = rows[first - row : last - row]
            part[first:last].copy_(tensors[source][(slice(source_rows.start, source_rows.stop), *columns)])
        row += len(rows)
    part[max(row, 0) :].zero_()


def unfuse(parameter: Parameter, whole: Tensor, model: ModelConfig, vocab_size: int) -> tuple[Tensor, ...]:
    """Split a whole Megatron tensor into the Hugging Face tensors that it is assembled from, without padding."""
    parts: list[list[Tensor]] = [[] for _ in parameter.hugging_face]
    end = 0
    for source, rows in _rows_of(parameter, model, vocab_size):
        start = end
        end += len(rows)
        parts[source].append(whole[start:end])
    return tuple(map(torch.cat, parts))


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the whole model, without vocabulary padding."""
    return sum(
        len(parameter.places(model)) * math.prod(full_shape(name, model, vocab_size))
        for parameter in parameters_of(model)
        if parameter.trained
        for name in parameter.hugging_face
    )


def count_active_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters used per token: with experts, the router and the token's experts."""
    if model.num_experts is None:
        return count_parameters(model, vocab_size)
    router_row = model.hidden_size + int(model.traits.biases)
    other_router_rows = (model.num_experts - model.moe_router_topk) * model.expert_layers
    with_chosen_experts = replace(model, num_experts=model.moe_router_topk)
    return count_parameters(with_chosen_experts, vocab_size) + other_router_rows * router_row
