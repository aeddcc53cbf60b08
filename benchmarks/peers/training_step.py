"""Compare a training step of a tiny Llama on a CPU with plain loops: python -m benchmarks.peers.training_step

The same shapes, rows of random tokens (one document each), micro-batches, fp32, AdamW and clipping at 1, one process:

    ours                     the trainer's step, at the full window and at small ones
    plain torch              a loop like TinyLlama's, written for this comparison (plain_llama.py); full causal
    attention
    transformers             LlamaForCausalLM and a loop; full causal attention
    transformers, blocks     the same with a block-diagonal mask of the window, as a dense 4D mask

Processor time, the minimum over alternating rounds; all models are in memory at once. Before timing, our model is
initialized by its own rule, so all losses are near ln V, and are not compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from training import Training, shape
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.checkouts import heading, processor_seconds
from benchmarks.peers.plain_llama import PlainLlama
from megatron_ext.config import Config, TrainingConfig

BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0


def configured(preset: str, length: int, rows: int, vocabulary: int) -> Config:
    """Configure a preset in fp32 with untied embeddings."""
    built = shape(preset, length, rows)
    model = replace(built.model, vocab_size=vocabulary, untie_embeddings_and_output_weights=True)
    return replace(built, model=model, training=TrainingConfig())


def transformers_model(config: Config, length: int) -> LlamaForCausalLM:
    """Build the same shapes in transformers."""
    model = config.model
    sizes = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        max_position_embeddings=length,
        rope_theta=model.rotary_base,
        rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(sizes)


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
    theirs = transformers_model(config, length)
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
        batches = training.batches(config, 0, window)
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
