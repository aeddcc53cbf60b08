"""Compare a training step of a tiny Llama on a CPU with transformers': python -m benchmarks.peers.training_step

The same shapes, rows of random tokens (one document each), micro-batches, fp32, AdamW and clipping at 1, one process:

    ours                    the trainer's step, at the full window and at small ones
    transformers            LlamaForCausalLM and a loop; full causal attention
    transformers, blocks    the same with a block-diagonal mask of the window, as a dense 4D mask

Processor time, the minimum over alternating rounds; all models are in memory at once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from record import Records, parser_of, processor_seconds
from step import Training, configure
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_ext.checkpoint.hf.config import hugging_face_config
from megatron_ext.config import TrainingConfig

BETAS = (0.9, 0.95)
DECAY = 0.1
CLIP = 1.0


class Loop:
    """Optimizer steps of a model of transformers over micro-batches of one row, tokens and labels [1, s]."""

    def __init__(self, model: LlamaForCausalLM, rows: list[tuple[Tensor, Tensor]], **options: Tensor | None) -> None:
        self._model = model
        self._rows = rows
        self._options = options
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=BETAS, weight_decay=DECAY)

    def step(self) -> None:
        for tokens, labels in self._rows:
            loss = self._model(tokens, labels=labels, shift_labels=labels, **self._options).loss
            (loss / len(self._rows)).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()


def block_mask(length: int, window: int) -> Tensor:
    """Return bool [1, 1, s, s]: a token sees itself and earlier tokens in its own cell of the window's grid."""
    cell = torch.arange(length) // window
    return ((cell[:, None] == cell) & torch.ones(length, length, dtype=torch.bool).tril())[None, None]


def main() -> None:
    """Record the time of each loop."""
    parser = parser_of(__doc__)
    parser.add_argument("--preset", default="tiny-1M")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row [2048]")
    parser.add_argument("--rows", type=int, default=2, help="of a step, a micro-batch each [2]")
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 128], help="small windows [512 128]")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    length = chosen.length
    vocabulary = 4096
    built = configure(chosen.preset, length, chosen.rows)
    model = replace(built.model, vocab_size=vocabulary, untie_embeddings_and_output_weights=True)
    training = Training(replace(built, model=model, training=TrainingConfig()))  # fp32
    drawn = [torch.from_numpy(training.row_at(sample).tokens)[None] for sample in range(chosen.rows)]
    rows = [(row[:, :-1], row[:, 1:]) for row in drawn]  # inputs and labels [1, s] of the rows that ours trains on
    sizes = LlamaConfig.from_dict(hugging_face_config(model, vocabulary, length), use_cache=False)
    their_model = LlamaForCausalLM._from_config(sizes, attn_implementation="sdpa", dtype=torch.float32)
    parameters = {
        sum(parameter.numel() for parameter in model_part.parameters()) for model_part in (*training.model, their_model)
    }
    if len(parameters) != 1:
        raise SystemExit(f"the models differ in size: {sorted(parameters)}")

    cases: dict[str, Callable[[], object]] = {}
    for window in (length, *chosen.windows):
        cases[f"ours, window {window}"] = partial(training.seconds, training.batches(0, window))
    cases["transformers"] = Loop(their_model, rows).step
    for window in chosen.windows:
        positions = (torch.arange(length) % window)[None]
        masked = Loop(their_model, rows, attention_mask=block_mask(length, window), position_ids=positions)
        cases[f"transformers, blocks of {window}"] = masked.step
    for work in cases.values():
        work()
    seconds = processor_seconds(cases, chosen.rounds)
    records = Records("training_step", chosen.output)
    facts = {"parameters": parameters.pop(), "rows": chosen.rows, "length": length, "vocabulary": vocabulary}
    for case, seconds_taken in seconds.items():
        rates = {"step_s": seconds_taken, "tokens_per_s": chosen.rows * length / seconds_taken}
        rates["over_transformers"] = seconds_taken / seconds["transformers"]
        records.add(preset=chosen.preset, **facts, case=case, **rates)


if __name__ == "__main__":
    main()
