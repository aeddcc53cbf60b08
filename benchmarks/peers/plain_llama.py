"""A Llama and its optimizer steps in plain torch, like TinyLlama-style trainers: a baseline.

Fused queries, keys and values, RMSNorm, rotary angles in real arithmetic, SwiGLU, torch's causal attention, whole
logits.

Legend: b rows, s tokens, D hidden, N query heads, G key heads, H head size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.config import ModelConfig


class Block(nn.Module):
    """One layer: attention and SwiGLU, each with a pre-norm and a residual connection."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head = model.num_attention_heads, model.num_query_groups, model.head_size
        width, hidden = model.hidden_size, model.ffn_hidden_size
        self.norm_1, self.norm_2 = (nn.RMSNorm(width, eps=model.norm_epsilon) for _ in range(2))
        self.qkv = nn.Linear(width, (self.heads + 2 * self.key_heads) * self.head, bias=False)
        self.out = nn.Linear(self.heads * self.head, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_bsD: Tensor, cos_sH: Tensor, sin_sH: Tensor) -> Tensor:
        rows, tokens, _ = x_bsD.shape
        sizes = [heads * self.head for heads in (self.heads, self.key_heads, self.key_heads)]
        query, key, value = (
            part.view(rows, tokens, -1, self.head).transpose(1, 2)
            for part in self.qkv(self.norm_1(x_bsD)).split(sizes, dim=-1)
        )
        query, key = (part * cos_sH + _turned(part) * sin_sH for part in (query, key))
        grouped = self.heads != self.key_heads
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        x_bsD = x_bsD + self.out(seen.transpose(1, 2).reshape(rows, tokens, -1))
        gate, up = self.gate_up(self.norm_2(x_bsD)).chunk(2, dim=-1)
        added: Tensor = x_bsD + self.down(F.silu(gate) * up)
        return added


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class PlainLlama(nn.Module):
    """The whole model; its forward pass returns the mean loss."""

    def __init__(self, model: ModelConfig, vocab_size: int, row_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, model.hidden_size)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
        self.head = nn.Linear(model.hidden_size, vocab_size, bias=False)
        speeds = model.rotary_base ** (-torch.arange(0, model.head_size, 2) / model.head_size)
        angles = torch.outer(torch.arange(row_length), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=model.init_method_std)

    def forward(self, tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        x_bsD = self.embedding(tokens_bs)
        for block in self.blocks:
            x_bsD = block(x_bsD, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x_bsD)).flatten(0, 1), labels_bs.flatten())
