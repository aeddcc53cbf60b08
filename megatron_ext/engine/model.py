"""Megatron-Core's GPTModel as a Llama over packed batches.

Legend: t tokens of this rank, D hidden, N query heads, G key heads, H head size, v vocabulary rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from megatron_ext import rope
from megatron_ext.attention.backends import select
from megatron_ext.attention.cache import Appended
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.batch import PackedBatch
from megatron_ext.config import Config
from megatron_ext.engine.compat import RMSNorm
from megatron_ext.engine.parallel import model_chunks
from megatron_ext.engine.platform import Platform
from megatron_ext.loss import TokenLosses, VocabularyShard, cross_entropy
from megatron_ext.masks import MaskOptions


@dataclass(kw_only=True)
class PackedTransformerConfig(TransformerConfig):
    """Adds to Megatron's configuration what `PackedAttention` reads, which Megatron builds from it alone.

    Attributes:
        packed_backend: computes every layer's attention.
        packed_masks: says which layers are local.
        packed_score_factors: for each layer, what its attention scores are multiplied by.
    """

    packed_backend: Attend
    packed_masks: MaskOptions
    packed_score_factors: tuple[float, ...]


class PackedCall(PackedSeqParams):
    """Carries the attention calls through Megatron's layers.

    Its format is "sbhd" with one batch entry of t tokens: Megatron then applies the angles that it is given,
    token by token, whatever the segments are.
    """

    def __init__(self, batch: PackedBatch, appended: Appended | None = None) -> None:
        super().__init__(qkv_format="sbhd")
        self._batch, self._appended = batch, appended

    def of_layer(self, local: bool) -> AttentionCall:
        """Return the call of a layer that follows the window's schedule, or of a local one."""
        call = self._batch.local_attention if local else self._batch.attention
        assert call is not None
        return call

    def seen(self, layer_number: int, key_tGH: Tensor, value_tGH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the call is about: the given ones, after the cached ones of their texts."""
        if self._appended is None:
            return key_tGH, value_tGH
        return self._appended.extend(layer_number, key_tGH, value_tGH)


class PackedAttention(MegatronModule):
    """Serves as the `core_attention` of every layer: one packed call to the chosen backend."""

    def __init__(
        self, config: PackedTransformerConfig, layer_number: int, softmax_scale: float | None = None, **unused: Any
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.local = config.packed_masks.is_local(layer_number)
        self.scale = (softmax_scale or config.kv_channels**-0.5) * config.packed_score_factors[layer_number - 1]
        self.backend = config.packed_backend

    def forward(
        self,
        query_t1NH: Tensor,
        key_t1GH: Tensor,
        value_t1GH: Tensor,
        attention_mask: None,
        packed_seq_params: PackedCall,
        **unused: Any,
    ) -> Tensor:
        """Return [t, 1, N * H]; which keys each query sees is in `packed_seq_params` alone."""
        key_uGH, value_uGH = packed_seq_params.seen(self.layer_number, key_t1GH.squeeze(1), value_t1GH.squeeze(1))
        out_tNH = packed_seq_params.of_layer(self.local).run(
            self.backend, query_t1NH.squeeze(1), key_uGH, value_uGH, self.scale
        )
        return out_tNH.flatten(1).unsqueeze(1)

    def sharded_state_dict(self, *unused: Any, **also_unused: Any) -> dict[str, Any]:
        """Return {}: there is nothing to save."""
        return {}


class PackedGPT(GPTModel):
    """Maps a `PackedBatch` to the loss of each token, as Megatron's GPTModel with another head."""

    def __init__(
        self,
        *args: Any,
        frequencies: rope.Frequencies,
        real_vocab_size: int,
        loss_block_tokens: int,
        entropy: bool = False,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.frequencies = frequencies
        self.real_vocab_size = real_vocab_size
        self.loss_block_tokens = loss_block_tokens
        self.entropy = entropy
        if self.post_process:
            # The loss multiplies by the output matrix block by block, so the layer is never run. It is called for its
            # matrix all the same: --overlap-param-gather awaits a parameter's gather where a module is called.
            self.output_layer.forward = lambda: self.output_layer.weight

    def forward(self, batch: PackedBatch) -> Tensor | TokenLosses:
        """Return hidden states for the next stage, or on the last stage the losses of the tokens asked for."""
        hidden = self._hidden(batch)
        return self._losses(hidden, batch) if self.post_process else hidden

    def logits(self, batch: PackedBatch) -> Tensor:
        """Return float32 [t, V], whole: for short texts, on one process that holds all layers."""
        hidden_tD = self._hidden(batch)[:, 0]
        return (hidden_tD @ self._output_weight()[: self.real_vocab_size].T).float()

    def next_logits(self, batch: PackedBatch, appended: Appended) -> Tensor:
        """Continue cached texts: return float32 [wanted tokens, V], whole on every tensor-parallel rank.

        Args:
            batch: the new tokens; its attention calls are those of `appended`, `wanted` is the last token of each text.
            appended: where their keys and values go.
        """
        assert batch.wanted is not None
        hidden_tD = self._hidden(batch, appended)[:, 0].index_select(0, batch.wanted)
        logits_wv = hidden_tD @ self._output_weight().T
        whole = gather_from_tensor_model_parallel_region(logits_wv, group=self.pg_collection.tp)
        return whole[:, : self.real_vocab_size].float()

    def _output_weight(self) -> Tensor:
        """Return the output matrix [v, D], as this step's optimizer left it on all data-parallel ranks."""
        weight_vD = self.output_layer()
        # tied on a stage that has the embedding too: the layer has no matrix, and calling the embedding awaited it
        return self.shared_embedding_or_output_weight() if weight_vD is None else weight_vD

    def _hidden(self, batch: PackedBatch, appended: Appended | None = None) -> Tensor:
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=batch.tokens_t[None], position_ids=None)
        frequencies = self.frequencies.at(batch.rotary_base, batch.positions_t.device)
        hidden_t1D: Tensor = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=rope.angles(batch.positions_t, frequencies)[:, None, None, :],
            packed_seq_params=PackedCall(batch, appended),
        )
        return hidden_t1D

    def _losses(self, hidden: Tensor, batch: PackedBatch) -> TokenLosses:
        group = self.pg_collection.tp
        # every rank needs all tokens for its share of the vocabulary; backward sums the ranks' parts of the gradient
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        weight_vD = self._output_weight()
        shard = VocabularyShard(
            first=group.rank() * weight_vD.shape[0],
            size=self.real_vocab_size,
            group=group if group.size() > 1 else None,
        )
        hidden_tD, labels_t = hidden[:, 0], batch.labels_t
        if batch.wanted is not None:
            hidden_tD, labels_t = hidden_tD.index_select(0, batch.wanted), labels_t.index_select(0, batch.wanted)
        return cross_entropy(hidden_tD, weight_vD, labels_t, shard, self.loss_block_tokens, entropy=self.entropy)


def build_chunks(config: Config, vocab_size: int, platform: Platform) -> list[PackedGPT]:
    """Build the model chunks of this pipeline stage, with uninitialised weights."""
    model, transformer = config.model, transformer_config(config, platform)
    count = model_chunks(config.parallel, model.num_layers)
    chunks = []
    for number in range(count):
        vp_stage = number if count > 1 else None  # None: Megatron's pipeline is not interleaved
        chunk = PackedGPT(
            config=transformer,
            transformer_layer_spec=_layers(transformer, platform, vp_stage),
            vocab_size=model.padded_vocab_size(vocab_size),
            max_sequence_length=config.data.seq_length,
            pre_process=is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type="none",  # `forward` hands over the angles itself
            frequencies=rope.Frequencies(model, config.data.seq_length),
            real_vocab_size=vocab_size,
            loss_block_tokens=config.training.loss_block_tokens,
            entropy=config.weighting.token_weighting == "unfrozen" and config.weighting.weight_score == "mile",
            vp_stage=vp_stage,
        )
        chunks.append(chunk.to(platform.device))
    return chunks


def _layers(transformer: TransformerConfig, platform: Platform, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Describe a chunk's layers: Transformer Engine's where it is, else Megatron's own, with our attention."""
    if platform.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(), TENorm
    else:
        layer, norm = get_gpt_layer_local_spec(normalization="RMSNorm"), RMSNorm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(module=PackedAttention)
    layers = get_num_layers_to_build(transformer, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


def _leave(weight: Tensor) -> Tensor:
    """Initialise nothing: engine/weights.py does."""
    return weight


def transformer_config(config: Config, platform: Platform) -> PackedTransformerConfig:
    """Translate a run's configuration into Megatron's, with our attention backend and masks."""
    model, parallel = config.model, config.parallel
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    chunked = parallel.num_layers_per_virtual_pipeline_stage is not None
    recompute: dict[str, Any] = {"recompute_granularity": parallel.recompute_granularity}
    if parallel.recompute_granularity == "full":
        recompute |= {
            "recompute_method": parallel.recompute_method,
            "recompute_num_layers": parallel.recompute_num_layers,
        }
    rotated = [model.has_rope(number) for number in range(1, model.num_layers + 1)]
    return PackedTransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=model.add_qkv_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=0.0,
        no_rope_freq=[int(not has_rope) for has_rope in rotated],
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=model_chunks(parallel, model.num_layers) if chunked else None,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # with batch_p2p_comm the interleaved schedule is silently wrong on gloo
        overlap_p2p_comm=chunked,
        batch_p2p_comm=not chunked,
        batch_p2p_sync=platform.device.type == "cuda",
        bf16=config.training.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Megatron's pass over the weights stays, for it also marks what is tensor-parallel
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        use_cpu_initialization=platform.device.type == "cpu",
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        packed_backend=select(parallel.attention_backend, platform.device, dtype, model.head_size),
        packed_masks=config.mask_options(),
        # YaRN multiplies turned queries and keys: the same, and exact in fp32, in the scale of their product
        packed_score_factors=tuple(rope.attention_factor(model) ** 2 if has_rope else 1.0 for has_rope in rotated),
        **recompute,
    )
