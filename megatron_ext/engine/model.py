"""Megatron-Core's GPTModel over packed batches, for the Llama, Qwen, Phi, Gemma, Olmo, gpt-oss and DeepSeek families.

Legend: t tokens of this rank, D hidden size, N query heads, G key heads, H head size, v vocabulary rows of this rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_ext import heartbeat, rope
from megatron_ext.attention.interface import Expand, Extend
from megatron_ext.batch import PackedBatch
from megatron_ext.config import Config
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.engine import activations
from megatron_ext.engine.blocks import layer_specs
from megatron_ext.engine.parallel import model_chunks
from megatron_ext.engine.platform import Platform
from megatron_ext.engine.transformer import PackedTransformerConfig, rotation_limit, transformer_config
from megatron_ext.loss import TokenLosses, VocabularyShard, cross_entropy


class PackedCall(PackedSeqParams):
    """Passes the batch, and the cache of its keys and values, through Megatron's layers.

    Its format is "sbhd" with one batch entry of t tokens, so that Megatron applies the given angles token by token,
    regardless of segments.
    """

    def __init__(self, batch: PackedBatch, extend: Extend | None = None) -> None:
        super().__init__(qkv_format="sbhd")
        self.batch = batch
        self.extend = extend


class PackedAttention(MegatronModule):
    """The `core_attention` of every layer: one packed call to the chosen backend."""

    def __init__(self, config: PackedTransformerConfig, layer_number: int, **unused: Any) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.local = config.packed_masks.is_local_layer(layer_number)
        self.scale = config.softmax_scale
        model = config.packed_model
        self.rotary_size = model.rotary_size
        # YaRN multiplies rotated queries and keys by a factor each, so its square multiplies the scores
        self.rotary_factor = 1.0
        if model.has_rope(layer_number) and not (self.local and model.rotary_base_local is not None):
            self.rotary_factor = rope.attention_factor(model) ** 2
        if self.rotary_size == config.kv_channels:  # the factor applies to all dimensions: fold it into the scale
            self.scale *= self.rotary_factor
            self.rotary_factor = 1.0
        self.backend = config.packed_backend
        self.softmax_offset: torch.nn.Parameter | None = None  # the sinks [N]; Megatron's name
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query_t1NH: Tensor,
        key_t1GH: Tensor,
        value_t1GW: Tensor,
        attention_mask: None,
        packed_seq_params: PackedCall,
        expand: Expand | None = None,
        **unused: Any,
    ) -> Tensor:
        """Return the attention output, [t, 1, N * W]; `packed_seq_params` defines which keys each query sees.

        `expand` as in `AttentionCall.run`.
        """
        query_tNH = query_t1NH.squeeze(1)
        key_tGH = key_t1GH.squeeze(1)
        value_tGW = value_t1GW.squeeze(1)
        batch = packed_seq_params.batch
        if self.rotary_factor != 1:
            rotated, plain = query_tNH.split((self.rotary_size, query_tNH.shape[-1] - self.rotary_size), dim=-1)
            query_tNH = torch.cat((rotated * self.rotary_factor, plain), dim=-1)
        if expand is not None and packed_seq_params.extend is not None:  # no token is expanded again for later ones
            key_tGH, value_tGW = expand(key_tGH, value_tGW)
            expand = None
        if batch.probe is not None:
            key = key_tGH
            if expand is not None:
                key, _ = expand(key_tGH, value_tGW)
            batch.probe.observe(self.layer_number, self.local, query_tNH, key, self.scale)
        if packed_seq_params.extend is not None:  # the cached keys and values of each text come first
            key_tGH, value_tGW = packed_seq_params.extend(self.layer_number, key_tGH, value_tGW)
        inputs = QKV(query_tNH, key_tGH, value_tGW, self.softmax_offset)
        out_tNH = batch.attention[self.local].run(self.backend, inputs, self.scale, expand)
        # a step may take longer than the watchdog's limit, but not a layer
        heartbeat.beat()
        if out_tNH.requires_grad:
            out_tNH.register_hook(_beat)
        return out_tNH.flatten(1).unsqueeze(1)


def _beat(gradient: Tensor) -> None:
    heartbeat.beat()


class PackedGPT(GPTModel):
    """Maps a `PackedBatch` to the loss of each token; Megatron's GPTModel with another head."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        transformer: PackedTransformerConfig,
        layers: TransformerBlockSubmodules,
        vp_stage: int | None,
    ) -> None:
        model = config.model
        weighting = config.weighting
        super().__init__(
            config=transformer,
            transformer_layer_spec=layers,
            vocab_size=model.padded_vocab_size(vocab_size),
            max_sequence_length=config.data.seq_length,
            pre_process=is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type="none",  # `forward` passes the angles itself
            vp_stage=vp_stage,
        )
        self.frequencies = rope.Frequencies(model, config.data.seq_length)
        self.fuses_rotation = transformer.apply_rope_fusion
        self.rotation_limit = rotation_limit(config)
        self.real_vocab_size = vocab_size
        self.loss_block_tokens = config.training.loss_block_tokens
        self.entropy = weighting.token_weighting == "unfrozen" and weighting.weight_score == "mile"
        self.embedding_scale = 1.0
        if model.traits.scaled_embedding:  # rounded to the embedding's precision, as in transformers
            self.embedding_scale = torch.tensor(model.hidden_size**0.5, dtype=transformer.params_dtype).item()
        if self.post_process and model.traits.output_bias:
            rows = self.output_layer.output_size_per_partition
            bias = torch.nn.Parameter(torch.zeros(rows, dtype=transformer.params_dtype))
            set_tensor_model_parallel_attributes(bias, True, 0, 1)
            self.output_layer.bias = bias  # Megatron's output layer never has a bias
        if self.post_process:
            # The loss multiplies by the output matrix block by block, so the layer itself is never run. It is still
            # called to get its matrix, because --overlap-param-gather waits for a parameter's gather when a module is
            # called.
            self.output_layer.forward = lambda: self.output_layer.weight

    def forward(self, batch: PackedBatch) -> Tensor | TokenLosses:
        """Return hidden states for the next stage, or on the last stage the losses of the requested tokens."""
        hidden = self._hidden(batch)
        if not self.post_process:
            return hidden
        group = self.pg_collection.tp
        hidden_tD, weight_vD = self._head(hidden, batch)
        labels_t = batch.labels_t
        if batch.wanted is not None:
            labels_t = labels_t.index_select(0, batch.wanted)
        shard = VocabularyShard(
            first=group.rank() * weight_vD.shape[0],
            size=self.real_vocab_size,
            group=group if group.size() > 1 else None,
        )
        weight_grad_vD = None
        if torch.is_grad_enabled():
            weight_grad_vD = _gradient_buffer(weight_vD)
        return cross_entropy(
            hidden_tD,
            weight_vD,
            labels_t,
            shard,
            self.loss_block_tokens,
            entropy=self.entropy,
            weight_grad_vD=weight_grad_vD,
        )

    def logits(self, batch: PackedBatch, extend: Extend | None = None) -> Tensor:
        """Return the logits of the requested tokens, float32 [wanted tokens, V], on every tensor-parallel rank.

        On all pipeline stages but the last, return the hidden states [t / s, 1, D] for the next stage, where s is the
        number of tensor-parallel ranks under sequence parallelism and otherwise 1. `extend` adds the tokens' keys and
        values to a cache; the batch's attention calls then also cover what is cached.
        """
        hidden_t1D = self._hidden(batch, extend)
        if not self.post_process:
            return hidden_t1D
        hidden_tD, weight_vD = self._head(hidden_t1D, batch)
        whole = gather_from_tensor_model_parallel_region(hidden_tD @ weight_vD.T, group=self.pg_collection.tp)
        return whole[:, : self.real_vocab_size].float()

    def _head(self, hidden_t1D: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the requested tokens and the output matrix [v, D]; their product is the logits.

        A bias is appended to the matrix, and a column of ones to the hidden states, so that the loss only handles
        matrices. Seven more columns of zeros keep the width a multiple of 8, which is faster on a GPU.
        """
        # every rank needs all tokens for its share of the vocabulary; backward sums the ranks' parts of the gradient
        if self.config.sequence_parallel:
            hidden_t1D = gather_from_sequence_parallel_region(hidden_t1D, group=self.pg_collection.tp)
        else:
            hidden_t1D = copy_to_tensor_model_parallel_region(hidden_t1D, group=self.pg_collection.tp)
        hidden_tD = hidden_t1D[:, 0]
        if batch.wanted is not None:
            hidden_tD = hidden_tD.index_select(0, batch.wanted)
        weight_vD = self.output_layer()
        if weight_vD is None:
            # tied weights on a stage that also has the embedding: the layer has no matrix; calling the embedding has
            # waited for it
            weight_vD = self.shared_embedding_or_output_weight()
        bias_v = self.output_layer.bias
        if bias_v is None:
            return hidden_tD, weight_vD
        ones_t1 = hidden_tD.new_ones(len(hidden_tD), 1)
        wider = [F.pad(column, (0, 7)) for column in (ones_t1, bias_v[:, None])]
        return torch.cat((hidden_tD, wider[0]), dim=1), torch.cat((weight_vD, wider[1]), dim=1)

    def _hidden(self, batch: PackedBatch, extend: Extend | None = None) -> Tensor:
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=batch.tokens_t[None], position_ids=None)
            if self.embedding_scale != 1.0:
                hidden = hidden * self.embedding_scale
        # micro-batches of chunks and evaluations may be longer than the micro-batches of training
        self.config.apply_rope_fusion = self.fuses_rotation and len(batch.positions_t) <= self.rotation_limit
        device = batch.positions_t.device
        angles = [rope.angles(batch.positions_t, self.frequencies.at(batch.rotary_base, device))]
        if self.config.packed_model.rotary_base_local is not None:
            angles.append(rope.angles(batch.positions_t, self.frequencies.at(None, device, local=True)))
        hidden_t1D: Tensor = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat(angles)[:, None, None, :],
            packed_seq_params=PackedCall(batch, extend),
        )
        return hidden_t1D


def _gradient_buffer(weight: Tensor) -> Tensor | None:
    """Return the fp32 buffer of a weight's gradient, and mark the gradient as added to it.

    Megatron then does not add autograd's gradient again, except where a tied embedding on the same stage contributes
    (`zero_out_wgrad`). Its hook asserts that there is a gradient, so zeros are put where backward computes none. Return
    None if the model is not wrapped for training, or if gradients are accumulated in bf16, which would round the sum
    after every block of tokens instead of every micro-batch.
    """
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    if buffer is None or buffer.dtype != torch.float32:
        return None
    if not hasattr(weight, "grad_added_to_main_grad_by_loss"):
        weight.grad_added_to_main_grad_by_loss = True  # type: ignore[attr-defined]

        def put_zeros(gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is None:  # autograd itself would copy expanded zeros to a tensor of the weight's size
                weight.grad = weight.new_zeros(()).expand_as(weight)

        node: Any = weight.expand_as(weight).grad_fn
        node.next_functions[0][0].register_prehook(put_zeros)  # Megatron's DDP keeps this node
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return buffer


def build_chunks(config: Config, vocab_size: int, platform: Platform) -> list[PackedGPT]:
    """Build the model chunks of this pipeline stage; their matrices are 0."""
    parallel = config.parallel
    transformer = transformer_config(config, platform)
    copies = None
    if parallel.offload_layer_inputs:
        copies = activations.HostCopies(platform.device)
    stages: Sequence[int | None] = range(model_chunks(parallel, config.model.num_layers))
    if len(stages) == 1:
        stages = [None]  # not interleaved
    chunks = []
    for vp_stage in stages:
        layers = layer_specs(transformer, PackedAttention, vp_stage, platform.transformer_engine)
        chunk = PackedGPT(config, vocab_size, transformer, layers, vp_stage)
        if parallel.mlp_block_tokens is not None:
            for layer in chunk.decoder.layers:
                activations.compute_in_blocks(layer.mlp, parallel.mlp_block_tokens)
        if copies is not None:
            received = not chunk.pre_process
            activations.keep_inputs_on_host(chunk.decoder, copies, parallel.recompute_num_layers, received=received)
        if parallel.compile:  # each layer, as one graph before attention and one after it
            # with layers without RoPE each layer is compiled separately, and beyond the limit it would run eagerly
            limit = torch.compiler.config.recompile_limit
            torch.compiler.config.recompile_limit = max(limit, len(chunk.decoder.layers) + 8)
            for layer in chunk.decoder.layers:
                attention = layer.self_attention.core_attention
                attention.forward = torch.compiler.disable(attention.forward)
                layer.forward = torch.compile(layer.forward)
        chunks.append(chunk.to(platform.device))
    return chunks
