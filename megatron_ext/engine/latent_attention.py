"""Multi-head latent attention (MLA, arXiv 2405.04434), with Megatron's parameter names.

    latent, rotated = split(W_down x)                     [Z], [A]: one for all heads
    latent = norm(latent), rotated = rope(rotated)
    key_n, value_n = split(W_up latent, head n)           [B], [W]; key_n = (rotated, key_n)

Queries are W_q x, or W_up norm(W_down x) with `q_lora_rank`; the last A dimensions of a head are rotated. Here the
rotated dimensions come first in queries and keys. The files' matrices produce them in pairs (x0, x1), (x2, x3), ...;
these products are reordered, not the matrices.

A row of (rotated, latent) has Z + A numbers, its keys and values N (H + W). If a row has fewer, context-parallel ranks
exchange these rows, and every rank computes the keys and values that its queries see: `attention.interface.Expand`.

Tensor parallelism: every rank computes all rows of (rotated, latent), and from them the keys and values of its heads.
The gradients of the rows are summed over the ranks once, where rows are copied (or, with sequence parallelism,
gathered). The latent's up-projection does not communicate, since its input may come from a context-parallel rank.

Megatron's MLASelfAttention was not used: it computes its own angles, from positions that restart in each segment, and
calls attention with keys and values that are already expanded.

Legend: t tokens of this context-parallel rank, s of them on this tensor-parallel rank under sequence parallelism, D
hidden size, N heads of this rank, H = A + B size of a query or key head, W of a value head, Z of the latent.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import build_module
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.engine.compat import rotate

EPSILON = 1e-6  # of the latents' norms: fixed in transformers and in DeepSeek's own code


class LocalLinear(torch.nn.Module):
    """A matrix product without communication, x [..., inputs] -> [..., outputs].

    The matrix is whole on every tensor-parallel rank, or with `part` each rank has its own rows.
    """

    def __init__(self, inputs: int, outputs: int, config: Any, *, part: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        if part:
            set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        else:  # True: Megatron sums the gradients of the ranks, which have different tokens
            self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """The attention of a layer, x [s, 1, D] -> [s, 1, D], of Megatron's or Transformer Engine's linear layers."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        column: type,
        row: type,
        norm: type,
        core_attention: type,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self.group = pg_collection.tp
        model = config.packed_model
        heads = config.num_attention_heads
        self.heads = heads // self.group.size()
        self.sizes = model.qk_head_dim, model.v_head_dim
        self.row = model.kv_lora_rank, model.qk_pos_emb_head_dim
        query_size = heads * model.head_size
        build = functools.partial(build_module, config=config, is_expert=False, bias=False, tp_group=self.group)
        to_heads = functools.partial(
            build, column, init_method=config.init_method, gather_output=False, skip_bias_add=False
        )
        if model.q_lora_rank is None:
            self.linear_q_proj = to_heads(config.hidden_size, query_size, tp_comm_buffer_name="q_proj")
        else:
            self.linear_q_down_proj = LocalLinear(config.hidden_size, model.q_lora_rank, config)
            self.q_layernorm = norm(config=config, hidden_size=model.q_lora_rank, eps=EPSILON)
            self.linear_q_up_proj = to_heads(model.q_lora_rank, query_size, tp_comm_buffer_name="q_up_proj")
        self.linear_kv_down_proj = LocalLinear(config.hidden_size, sum(self.row), config)
        self.kv_layernorm = norm(config=config, hidden_size=model.kv_lora_rank, eps=EPSILON)
        self.linear_kv_up_proj = LocalLinear(model.kv_lora_rank, self.heads * sum(self.sizes), config, part=True)
        self.core_attention = core_attention(config, layer_number)
        self.linear_proj = build(
            row,
            heads * model.v_head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
        )
        self.exchanges_latent = sum(self.row) < self.heads * model.key_value_size
        self.recomputes_core = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, packed_seq_params: Any, **unused: Any
    ) -> tuple[Tensor, None]:
        """Return the output and no bias; the angles are [t, 1, 1, A]."""
        if self.config.packed_model.q_lora_rank is None:
            joint, _ = self.linear_q_proj(hidden_states)
        else:
            joint, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        query_t1NH = rotate(_rotated_first(joint.unflatten(-1, (self.heads, -1)), self.sizes[0]), rotary_pos_emb)

        latent, pairs = self.linear_kv_down_proj(hidden_states).split(self.row, dim=-1)
        rows = torch.cat((self.kv_layernorm(latent), pairs), dim=-1)
        if self.config.sequence_parallel:
            rows = gather_from_sequence_parallel_region(rows, group=self.group)
        else:
            rows = copy_to_tensor_model_parallel_region(rows, group=self.group)
        latent_t11Z, pairs_t11A = rows[:, :, None].split(self.row, dim=-1)
        key = rotate(_rotated_first(pairs_t11A, 0), rotary_pos_emb)
        value = latent_t11Z
        expand = None
        if self.exchanges_latent:
            expand = self.expand
        else:
            key, value = self.expand(key, value)
        attend = functools.partial(
            self.core_attention, attention_mask=None, packed_seq_params=packed_seq_params, expand=expand
        )
        if self.recomputes_core and self.training:
            attended = tensor_parallel.checkpoint(attend, False, query_t1NH, key, value)
        else:
            attended = attend(query_t1NH, key, value)
        return self.linear_proj(attended)

    def expand(self, rotated: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys [..., N, H] and values [..., N, W] from rotated [..., 1, A] and latent [..., 1, Z]."""
        keys_and_values = self.linear_kv_up_proj(latent.squeeze(-2)).unflatten(-1, (self.heads, -1))
        plain, value = keys_and_values.split(self.sizes, dim=-1)
        return torch.cat((rotated.expand(*plain.shape[:-1], -1), plain), dim=-1), value


def _rotated_first(x: Tensor, plain: int) -> Tensor:
    """Put the pairs (x0, x1), (x2, x3), ... after `plain` dimensions first, as (x0, x2, ..., x1, x3, ...)."""
    return torch.cat((x[..., plain::2], x[..., plain + 1 :: 2], x[..., :plain]), dim=-1)
