"""The table of parameter names: Megatron and Hugging Face names, and the conversion between them.

Megatron fuses queries, keys and values (interleaved by query group) and the two SwiGLU matrices, and distributes rows
or columns over tensor-parallel (TP) ranks. `fuse_into` and `unfuse` use the table in both directions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig


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
    """A row of the table; `{i}` stands for the layer, `{e}` for the expert, counted from 0 over the whole model.

    Attributes:
        megatron: its names in `named_parameters()`; the last one applies if a layer fuses a norm with the matrix after
            it, or several experts in one module.
        hugging_face: the tensors that it is assembled from.
        cut: how it is distributed.
        of, in_layer: return whether a model, and whether its layer, counted from 0, has it.
        trained: whether it has a gradient; otherwise it is a buffer.
    """

    megatron: tuple[str, ...]
    hugging_face: tuple[str, ...]
    cut: Cut
    of: Callable[[ModelConfig], bool] = lambda model: True
    in_layer: Callable[[ModelConfig, int], bool] = lambda model, layer: True
    trained: bool = True

    def checkpoint(self, place: Place) -> str:
        """Return its name in a checkpoint, independent of the run's layer classes; a norm has its fused name."""
        name = self.megatron[0] if self.of_experts else self.megatron[-1]
        return _at(name.replace("local_experts.", ""), place)

    @property
    def stacked(self) -> bool:
        """Whether layers have one each."""
        return "{i}" in self.megatron[0]

    @property
    def of_experts(self) -> bool:
        """Whether every expert of a layer has one."""
        return "{e}" in self.megatron[0]

    def places(self, model: ModelConfig) -> list[Place]:
        """Return its places in the model: each layer, each expert of each layer, or one empty place."""
        if not self.stacked:
            return [()]
        experts = (model.num_experts or 0) if self.of_experts else 1
        return [
            (layer, expert) if self.of_experts else (layer,)
            for layer in range(model.num_layers)
            if self.in_layer(model, layer)
            for expert in range(experts)
        ]

    def names(self, place: Place) -> tuple[str, ...]:
        """Return its Hugging Face names at a place."""
        return tuple(_at(name, place) for name in self.hugging_face)


def _at(name: str, place: Place) -> str:
    return name.format(**dict(zip("ie", place, strict=False)))


@dataclass(frozen=True)
class Rows:
    """Rows `first` to `last` (exclusive) of a parameter's `source`-th Hugging Face tensor."""

    source: int
    first: int
    last: int


Predicate = Callable[[ModelConfig], bool]


def _layer(
    megatron: str,
    hugging_face: str,
    cut: Cut,
    of: Predicate = lambda model: True,
    in_layer: Callable[[ModelConfig, int], bool] = lambda model, layer: True,
    *,
    trained: bool = True,
) -> Parameter:
    """Return a row for a parameter of layers; several names are separated by spaces."""
    return Parameter(
        tuple(f"decoder.layers.{{i}}.{name}" for name in megatron.split()),
        tuple(f"model.layers.{{i}}.{name}" for name in hugging_face.split()),
        cut,
        of,
        in_layer,
        trained,
    )


def _of_experts(
    megatron: str, hugging_face: str, cut: Cut, of: Predicate = lambda model: True, *, trained: bool = True
) -> Parameter:
    """Return a row for a parameter of the layers with experts."""
    return _layer(megatron, hugging_face, cut, of, ModelConfig.has_experts, trained=trained)


def _experts(
    module: str, gate_up: str, down: str, of: Predicate, router: str = "gate"
) -> tuple[Parameter, Parameter, Parameter]:
    """Return the rows of a router and its experts, with a family's names of the module and its matrices."""
    first, second = (
        f"mlp.experts.local_experts.{{e}}.linear_fc{n}.weight mlp.experts.linear_fc{n}.weight{{e}}" for n in (1, 2)
    )
    matrices = " ".join(f"{module}.experts.{{e}}.{name}.weight" for name in gate_up.split())
    return (
        _of_experts("mlp.router.weight", f"{module}.{router}.weight", Cut.WHOLE, of),
        _of_experts(first, matrices, Cut.GATE_UP, of),
        _of_experts(second, f"{module}.experts.{{e}}.{down}.weight", Cut.COLUMNS, of),
    )


def _latent(model: ModelConfig) -> bool:
    return model.multi_latent_attention


def _not_latent(model: ModelConfig) -> bool:
    return not model.multi_latent_attention


def _latent_queries(model: ModelConfig) -> bool:
    return model.multi_latent_attention and model.q_lora_rank is not None


def _block(*blocks: str) -> Predicate:
    return lambda model: model.block in blocks


_PHI, _GPT_OSS, _POST_NORMS = _block("phi"), _block("gpt_oss"), _block("gemma3", "olmo3")
_NOT_PHI = _block("llama", "gemma3", "olmo3", "gpt_oss")


def _sigmoid(model: ModelConfig) -> bool:
    return model.moe_router_score_function == "sigmoid"


def _shared(model: ModelConfig) -> bool:
    return model.moe_shared_expert_intermediate_size is not None


def _has_no_experts(model: ModelConfig, layer: int) -> bool:
    return not model.has_experts(layer)


_QKV = "self_attention.linear_qkv"
_FUSED_NORM = "mlp.linear_fc1.layer_norm_weight"
_HF_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

TABLE: tuple[Parameter, ...] = (
    Parameter(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Cut.VOCABULARY),
    _layer(
        f"input_layernorm.weight {_QKV}.layer_norm_weight",
        "input_layernorm.weight",
        Cut.WHOLE,
        lambda model: model.block != "olmo3" and _not_latent(model),
    ),
    _layer("input_layernorm.weight", "input_layernorm.weight", Cut.WHOLE, _latent),  # two matrices read its output
    _layer(f"input_layernorm.bias {_QKV}.layer_norm_bias", "input_layernorm.bias", Cut.WHOLE, _PHI),
    _layer(f"{_QKV}.weight", " ".join(f"{name}.weight" for name in _HF_QKV), Cut.QKV, _not_latent),
    _layer(f"{_QKV}.bias", " ".join(f"{name}.bias" for name in _HF_QKV), Cut.QKV, lambda model: model.has_qkv_bias),
    *(
        _layer(
            f"self_attention.{one}_layernorm.weight",
            f"self_attn.{one}_norm.weight",
            cut,
            of,
        )
        for one in "qk"
        for cut, of in (
            (Cut.WHOLE, lambda model: model.has_qk_norms and model.block != "olmo3"),
            (Cut.ROWS, _block("olmo3")),  # a weight for each head, distributed like the heads
        )
    ),
    *(
        _layer(f"self_attention.{ours}.weight", f"self_attn.{theirs}.weight", cut, of)
        for ours, theirs, cut, of in (
            ("linear_q_proj", "q_proj", Cut.ROWS, lambda model: _latent(model) and not _latent_queries(model)),
            ("linear_q_down_proj", "q_a_proj", Cut.WHOLE, _latent_queries),
            ("q_layernorm", "q_a_layernorm", Cut.WHOLE, _latent_queries),
            ("linear_q_up_proj", "q_b_proj", Cut.ROWS, _latent_queries),
            ("linear_kv_down_proj", "kv_a_proj_with_mqa", Cut.WHOLE, _latent),
            ("kv_layernorm", "kv_a_layernorm", Cut.WHOLE, _latent),
            ("linear_kv_up_proj", "kv_b_proj", Cut.ROWS, _latent),
        )
    ),
    _layer("self_attention.core_attention.softmax_offset", "self_attn.sinks", Cut.ROWS, lambda model: model.has_sinks),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Cut.COLUMNS, _NOT_PHI),
    _layer("self_attention.linear_proj.weight", "self_attn.dense.weight", Cut.COLUMNS, _PHI),
    _layer("self_attention.linear_proj.bias", "self_attn.dense.bias", Cut.WHOLE, _PHI),
    _layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias", Cut.WHOLE, _GPT_OSS),
    _layer(
        f"pre_mlp_layernorm.weight {_FUSED_NORM}",
        "post_attention_layernorm.weight",
        Cut.WHOLE,
        _block("llama"),
        _has_no_experts,
    ),
    _of_experts(  # not fused, because a router is between this norm and the matrices after it
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight",
        Cut.WHOLE,
    ),
    _layer("post_attention_norm.weight", "post_attention_layernorm.weight", Cut.WHOLE, _POST_NORMS),
    _layer(f"pre_mlp_layernorm.weight {_FUSED_NORM}", "pre_feedforward_layernorm.weight", Cut.WHOLE, _block("gemma3")),
    _layer("post_mlp_norm.weight", "post_feedforward_layernorm.weight", Cut.WHOLE, _POST_NORMS),
    _layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight mlp.up_proj.weight", Cut.GATE_UP, _NOT_PHI, _has_no_experts),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", Cut.COLUMNS, _NOT_PHI, _has_no_experts),
    *_experts("mlp", "gate_proj up_proj", "down_proj", lambda model: model.qk_layernorm or _sigmoid(model)),
    *_experts(
        "block_sparse_moe",
        "w1 w3",
        "w2",
        lambda model: not (model.qk_layernorm or _sigmoid(model) or _GPT_OSS(model)),
    ),
    _of_experts(
        "mlp.router.expert_bias",
        "mlp.gate.e_score_correction_bias",
        Cut.WHOLE,
        lambda model: model.moe_router_enable_expert_bias,
        trained=False,
    ),
    _of_experts(
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
        Cut.GATE_UP,
        _shared,
    ),
    _of_experts("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight", Cut.COLUMNS, _shared),
    # in files all experts of a layer are one tensor (stacked.py)
    *_experts("mlp", "gate_proj up_proj", "down_proj", _GPT_OSS, router="router"),
    _layer("mlp.router.bias", "mlp.router.bias", Cut.WHOLE, _GPT_OSS),
    _layer(
        "mlp.experts.local_experts.{e}.linear_fc1.bias mlp.experts.linear_fc1.bias{e}",
        "mlp.experts.{e}.gate_proj.bias mlp.experts.{e}.up_proj.bias",
        Cut.GATE_UP,
        _GPT_OSS,
    ),
    _layer(
        "mlp.experts.local_experts.{e}.linear_fc2.bias mlp.experts.linear_fc2.bias{e}",
        "mlp.experts.{e}.down_proj.bias",
        Cut.WHOLE,
        _GPT_OSS,
    ),
    _layer("mlp.linear_fc1.weight", "mlp.fc1.weight", Cut.ROWS, _PHI),
    _layer("mlp.linear_fc1.bias", "mlp.fc1.bias", Cut.ROWS, _PHI),
    _layer("mlp.linear_fc2.weight", "mlp.fc2.weight", Cut.COLUMNS, _PHI),
    _layer("mlp.linear_fc2.bias", "mlp.fc2.bias", Cut.WHOLE, _PHI),
    Parameter(("decoder.final_layernorm.weight",), ("model.norm.weight",), Cut.WHOLE, _NOT_PHI),
    Parameter(("decoder.final_layernorm.weight",), ("model.final_layernorm.weight",), Cut.WHOLE, _PHI),
    Parameter(("decoder.final_layernorm.bias",), ("model.final_layernorm.bias",), Cut.WHOLE, _PHI),
    Parameter(
        ("output_layer.weight",),
        ("lm_head.weight",),
        Cut.VOCABULARY,
        lambda model: model.untie_embeddings_and_output_weights,
    ),
    Parameter(("output_layer.bias",), ("lm_head.bias",), Cut.VOCABULARY, _PHI),
)


_LAYER_NUMBER = re.compile(r"(?<=\.layers\.)\d+")
_EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$")


@cache
def _by_megatron_name(model: ModelConfig) -> dict[str, list[Parameter]]:
    rows: dict[str, list[Parameter]] = {}
    for parameter in parameters_of(model):
        for name in parameter.megatron:
            rows.setdefault(name, []).append(parameter)
    return rows


def find(megatron_name: str, first_layer: int, model: ModelConfig, first_expert: int = 0) -> tuple[Parameter, Place]:
    """Find the row of a Megatron parameter, and its place in the whole model.

    Args:
        megatron_name: as in `named_parameters()` of one model chunk.
        first_layer: the chunk's first layer in the whole model, from 0.
        model: the whole model's shapes.
        first_expert: the first of this process's experts, from 0.

    Raises:
        KeyError: no row of this model has this name.
    """
    place = []
    pattern = megatron_name
    for number, letter, first in ((_LAYER_NUMBER, "i", first_layer), (_EXPERT_NUMBER, "e", first_expert)):
        match = number.search(pattern)
        if match:
            place.append(int(match.group()) + first)
            pattern = f"{pattern[: match.start()]}{{{letter}}}{pattern[match.end() :]}"
    rows = _by_megatron_name(model)[pattern]
    return next(row for row in rows if not place or row.in_layer(model, place[0])), tuple(place)


def full_shape(hugging_face_name: str, model: ModelConfig, vocab_size: int) -> tuple[int, ...]:
    """Return the shape of a Hugging Face parameter of this model."""
    width, heads, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    rows = {
        "q_proj": heads * model.head_size,
        "k_proj": groups * model.head_size,
        "v_proj": groups * model.head_size,
    }
    shapes = {name: (size, width) for name, size in rows.items()} | {
        "embed_tokens": (vocab_size, width),
        "lm_head": (vocab_size, width),
        "o_proj": (width, heads * model.value_size),
        "q_a_proj": (model.q_lora_rank or 0, width),
        "q_a_layernorm": (model.q_lora_rank or 0,),
        "q_b_proj": (heads * model.head_size, model.q_lora_rank or 0),
        "kv_a_proj_with_mqa": (model.kv_lora_rank + model.qk_pos_emb_head_dim, width),
        "kv_a_layernorm": (model.kv_lora_rank,),
        "kv_b_proj": (heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank),
        "gate_proj": (model.ffn_hidden_size, width),
        "up_proj": (model.ffn_hidden_size, width),
        "down_proj": (width, model.ffn_hidden_size),
        "dense": (width, heads * model.head_size),
        "fc1": (model.ffn_hidden_size, width),
        "fc2": (width, model.ffn_hidden_size),
        "gate": (model.num_experts or 0, width),
        "router": (model.num_experts or 0, width),
        "w1": (model.expert_width, width),
        "w2": (width, model.expert_width),
        "w3": (model.expert_width, width),
        "q_norm": (model.head_size * (heads if model.block == "olmo3" else 1),),
        "k_norm": (model.head_size * (groups if model.block == "olmo3" else 1),),
        "self_attn": (heads,),  # the sinks
    }
    for module, inner in (
        ("experts", model.expert_width),
        ("shared_experts", model.moe_shared_expert_intermediate_size or 0),
    ):
        if f".{module}." in hugging_face_name:
            shapes |= {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    module, ending = hugging_face_name.split(".")[-2:]
    shape = shapes.get(module, (width,))
    return shape[:1] if ending.endswith("bias") else shape


def rows_of(parameter: Parameter, model: ModelConfig, vocab_size: int) -> list[Rows]:
    """Return the rows of which a whole Megatron tensor in a checkpoint consists, top to bottom, before any padding.

    QKV:      q of group 0 | k of group 0 | v of group 0 | q of group 1 | ...
    GATE_UP:  gate | up
    """
    if parameter.cut is Cut.QKV:
        head = model.head_size
        sizes = (model.num_attention_heads // model.num_query_groups * head, head, head)
        groups = range(model.num_query_groups)
        return [Rows(part, group * size, (group + 1) * size) for group in groups for part, size in enumerate(sizes)]
    counts = [full_shape(name, model, vocab_size)[0] for name in parameter.hugging_face]
    return [Rows(part, 0, count) for part, count in enumerate(counts)]


def parameters_of(model: ModelConfig) -> list[Parameter]:
    """Return the rows of the table that apply to this model."""
    layers = range(model.num_layers)
    return [row for row in TABLE if row.of(model) and any(row.in_layer(model, layer) for layer in layers)]


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
    for rows in rows_of(parameter, model, vocab_size):
        end = row + rows.last - rows.first
        first, last = max(row, 0), min(end, len(part))
        if first < last:
            wanted = slice(rows.first + first - row, rows.first + last - row)
            part[first:last].copy_(tensors[rows.source][(wanted, *columns)])
        row = end
    part[max(row, 0) :].zero_()


def unfuse(parameter: Parameter, whole: Tensor, model: ModelConfig, vocab_size: int) -> tuple[Tensor, ...]:
    """Return the Hugging Face tensors of which a whole Megatron tensor is assembled, without padding."""
    runs = rows_of(parameter, model, vocab_size)
    counts = [rows.last - rows.first for rows in runs]
    parts = whole[: sum(counts)].split(counts)
    return tuple(
        torch.cat([part for rows, part in zip(runs, parts, strict=True) if rows.source == source])
        for source in range(len(parameter.hugging_face))
    )


def all_names(model: ModelConfig) -> list[str]:
    """Return every Hugging Face parameter name of this model."""
    return [
        name
        for parameter in parameters_of(model)
        for place in parameter.places(model)
        for name in parameter.names(place)
    ]


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the whole model, without vocabulary padding."""
    return sum(
        len(parameter.places(model)) * math.prod(full_shape(name, model, vocab_size))
        for parameter in parameters_of(model)
        if parameter.trained
        for name in parameter.hugging_face
    )


def count_active_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters used per token: with experts, only those of the token's experts."""
    if model.num_experts is None:
        return count_parameters(model, vocab_size)
    router_row = model.hidden_size + int(_GPT_OSS(model))
    return count_parameters(replace(model, num_experts=model.moe_router_topk), vocab_size) + (
        (model.num_experts - model.moe_router_topk) * router_row * model.expert_layers  # other router rows
    )
