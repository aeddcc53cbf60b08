"""Compare a training step of a tiny Llama on a CPU with plain loops: python -m benchmarks.peers.training_step

The same shapes, rows of random tokens (one document each), micro-batches, fp32, AdamW and clipping at 1, one process:

    ours                     the trainer's step, at the full window and at small ones
    plain torch              a loop like TinyLlama's, written for this comparison; full causal attention
    transformers             LlamaForCausalLM and a loop; full causal attention
    transformers, blocks     the same with a block-diagonal mask of the window, as a dense 4D mask

Processor time, the minimum over alternating rounds; all models are in memory at once. Before timing, our model is
initialized by its own rule, so all losses are near ln V, and are not compared.

Legend: b rows, s tokens, D hidden, H head size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import Training, configure
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.checkouts import heading
from benchmarks.record import processor_seconds
from megatron_ext.checkpoint.hf.config import hugging_face_config
from megatron_ext.config import Config, ModelConfig, TrainingConfig

BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0


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


def configured(preset: str, length: int, rows: int, vocabulary: int) -> Config:
    """Configure a preset in fp32 with untied embeddings."""
    built = configure(preset, length, rows)
    model = replace(built.model, vocab_size=vocabulary, untie_embeddings_and_output_weights=True)
    return replace(built, model=model, training=TrainingConfig())


def rows_of(training: Training, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and labels [1, s] of the rows that ours trains on."""
    drawn = [torch.from_numpy(training.row_at(sample).tokens)[None] for sample in range(count)]
    return [(row[:, :-1], row[:, 1:]) for row in drawn]


class Loop:
    """Optimizer steps over micro-batches of one row, as in a plain trainer."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._model, self._loss = model, loss
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=BETAS, weight_decay=DECAY)

    def step(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        for tokens, labels in rows:
            (self._loss(tokens, labels) / len(rows)).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()


def block_mask(length: int, window: int) -> Tensor:
    """Return bool [1, 1, s, s]: a token sees itself and earlier tokens in its own cell of the window's grid."""
    cell = torch.arange(length) // window
    return ((cell[:, None] == cell) & torch.ones(length, length, dtype=torch.bool).tril())[None, None]


def table(preset: str, length: int, count: int, windows: list[int], vocabulary: int, rounds: int) -> Iterator[str]:
    """Yield the lines of one length."""
    config = configured(preset, length, count, vocabulary)
    training = Training(config)
    rows = rows_of(training, count)
    plain = PlainLlama(config.model, vocabulary, length)
    sizes = LlamaConfig.from_dict(hugging_face_config(config.model, vocabulary, length), use_cache=False)
    theirs = LlamaForCausalLM._from_config(sizes, attn_implementation="sdpa", dtype=torch.float32)
    parameters = {sum(each.numel() for each in model.parameters()) for model in (*training.model, plain, theirs)}
    if len(parameters) != 1:
        raise SystemExit(f"the models differ in size: {sorted(parameters)}")

    def transformers_loss(mask: Tensor | None, window: int) -> Callable[[Tensor, Tensor], Tensor]:
        positions = (torch.arange(length) % window)[None]

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            found: Tensor = theirs(
                tokens, attention_mask=mask, position_ids=positions, labels=labels, shift_labels=labels
            ).loss
            return found

        return loss

    cases: dict[str, Callable[[], object]] = {}
    for window in (length, *windows):
        batches = training.batches(0, window)
        cases[f"ours, window {window}"] = lambda batches=batches: training.stepper.train(batches)
    plain_loop = Loop(plain, plain)
    cases["plain torch"] = lambda: plain_loop.step(rows)
    whole = Loop(theirs, transformers_loss(None, length))
    cases["transformers"] = lambda: whole.step(rows)
    for window in windows:
        masked = Loop(theirs, transformers_loss(block_mask(length, window), window))
        cases[f"transformers, blocks of {window}"] = lambda masked=masked: masked.step(rows)
    for work in cases.values():
        work()
    seconds = processor_seconds(cases, rounds)
    yield (
        f"{preset}, {parameters.pop():,} parameters, {count} rows of {length}, vocabulary {vocabulary}"
        f"\n{'':32}{'s/step':>9}{'tokens/s':>10}   over plain torch, over transformers"
    )
    for name, taken in seconds.items():
        yield (
            f"{name:32}{taken:9.3f}{count * length / taken:10.0f}   {taken / seconds['plain torch']:.2f}, "
            f"{taken / seconds['transformers']:.2f}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny-1M")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row [2048]")
    parser.add_argument("--rows", type=int, default=2, help="of a step, a micro-batch each [2]")
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 128], help="small windows [512 128]")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)
    print(heading("training_step"), flush=True)
    sizes = (chosen.preset, chosen.length, chosen.rows, chosen.windows, chosen.vocabulary)
    for text in table(*sizes, chosen.rounds):
        print(text, flush=True)


if __name__ == "__main__":
    main()
