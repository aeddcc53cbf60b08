"""The window schedule in transformers' Trainer, without Megatron.

    python examples/transformers_trainer.py --model FOLDER --from-scratch --data-path PREFIX --seq-length 8192 \
        --window-rate 6.4 --attention flash_attention_2 --output_dir runs/hf --max_steps 2000 --bf16

All flags of `TrainingArguments` work; --from-scratch starts from random weights, --weighted reads weights of tokens.
`WindowedRows` and `collate` are all that a script of your own needs, and `weighted_loss` if its rows have token
weights. PREFIX.bin and PREFIX.idx are a data set of tools/preprocess_data.py.

The window of a row follows from its number, not from a callback: the Trainer collates batches ahead of the step that
trains on them, in other processes if there are workers, and reads them again when a run resumes. So the Trainer must
read rows in their order (`train_sampling_strategy="sequential"`); `RowDataset` has shuffled them.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.row import TokenRow
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.layout import PackedLayout, build_layout, concatenate
from megatron_ext.schedule import ScheduleKind, WindowSchedule, build_schedule

UNTRAINED = -100  # transformers' label of a token whose loss does not count

Example = tuple[TokenRow, PackedLayout]


class WindowedRows(Dataset[Example]):
    """The rows of all steps in order, each with the segments of its step's window.

    `row_at` returns the row of a number: its tokens, where its documents end, which of its labels are trained, and
    weights or None. A step trains on the next `rows_per_step` rows, over all processes and accumulated batches.
    """

    def __init__(
        self, row_at: Callable[[int], TokenRow], schedule: WindowSchedule, rows_per_step: int, steps: int
    ) -> None:
        self.row_at, self.schedule = row_at, schedule
        self.rows_per_step, self.steps = rows_per_step, steps

    def __len__(self) -> int:
        return self.rows_per_step * self.steps

    def __getitem__(self, number: int) -> Example:
        row = self.row_at(number)
        window = self.schedule.window_at(number // self.rows_per_step)
        return row, build_layout(len(row.tokens) - 1, row.document_ends, window)


def collate(examples: Sequence[Example]) -> dict[str, Any]:
    """Build one batch of B rows of L tokens, in which no token attends beyond its segment.

    Positions restart in each segment, which `sdpa` and `eager` attention understand; flash attention takes the borders
    of the segments of all rows laid end to end. There must be no `attention_mask`. The label of a token is the next
    token of its row, also of the row's last one, so labels are already shifted.
    """
    rows, layouts = zip(*examples, strict=True)
    packed = concatenate(layouts)
    borders, longest = torch.from_numpy(packed.cu_seqlens), int(packed.lengths.max())
    tokens_BL = np.stack([row.tokens for row in rows])
    trained_BL = np.stack([row.trained for row in rows])
    labels_BL = torch.from_numpy(np.where(trained_BL, tokens_BL[:, 1:], UNTRAINED))
    batch: dict[str, Any] = {
        "input_ids": torch.from_numpy(tokens_BL[:, :-1]),
        "position_ids": torch.from_numpy(packed.positions()).long().view(labels_BL.shape),
        "labels": labels_BL,
        "shift_labels": labels_BL,
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    if rows[0].weights is not None:
        weights_BL = torch.from_numpy(np.stack([row.weights for row in rows]))
        batch["labels"] = (labels_BL, weights_BL)  # the only values of a batch that `compute_loss_func` gets
    return batch


def weighted_loss(outputs: Any, labels: tuple[Tensor, Tensor], num_items_in_batch: Tensor | None = None) -> Tensor:
    """Compute -1/N sum of w log p over the N trained tokens of the step (arXiv 2503.09202): `compute_loss_func`."""
    labels_BL, weights_BL = labels
    count = num_items_in_batch
    if count is None:  # in an evaluation
        count = labels_BL.ne(UNTRAINED).sum()
    losses = F.cross_entropy(outputs.logits.float().flatten(0, 1), labels_BL.flatten(), reduction="none")
    return (losses * weights_BL.flatten()).sum() / count


class WindowInLog(TrainerCallback):
    """Adds the window of the last step to what the Trainer logs."""

    def __init__(self, schedule: WindowSchedule) -> None:
        self.schedule = schedule

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        window = self.schedule.window_at(max(state.global_step - 1, 0))
        logs["window"] = window
        state.log_history[-1]["window"] = window


@dataclass
class Options:
    """What the Trainer itself has no flags for."""

    model: str  # folder or name of a Hugging Face model
    data_path: str  # PREFIX of a data set
    from_scratch: bool = False  # random weights in the shape of `model`
    weighted: bool = False  # weigh losses by PREFIX.weights.npy, one float32 per token
    attention: str = "sdpa"  # attn_implementation
    seq_length: int = 8192
    window_schedule: ScheduleKind = ScheduleKind.LINEAR
    window_start: int = 32
    window_rate: float = 0.125


def main(argv: Sequence[str] | None = None) -> None:
    parser = HfArgumentParser((Options, TrainingArguments))
    options, training = parser.parse_args_into_dataclasses(sys.argv[1:] if argv is None else argv)
    if training.max_steps < 1:
        parser.error(f"--max_steps: got {training.max_steps}, needs >= 1: the schedule counts steps")
    if training.n_gpu > 1:  # DataParallel would divide the borders of segments as if they were rows
        parser.error(f"one process sees {training.n_gpu} GPUs; start one per GPU with torchrun")
    training.train_sampling_strategy = "sequential"
    training.remove_unused_columns = False

    set_seed(training.seed)
    if options.from_scratch:
        shape = AutoConfig.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_config(shape, attn_implementation=options.attention)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation=options.attention)
    source = IndexedSource(options.data_path, model.config.vocab_size, weighted=options.weighted)
    rows = RowDataset(source, range(source.document_count), options.seq_length, training.seed)
    schedule = build_schedule(
        options.window_schedule, start=options.window_start, end=options.seq_length, rate=options.window_rate
    )
    rows_per_step = training.train_batch_size * training.world_size * training.gradient_accumulation_steps
    trainer = Trainer(
        model,
        training,
        data_collator=collate,
        train_dataset=WindowedRows(rows.row, schedule, rows_per_step, training.max_steps),
        compute_loss_func=weighted_loss if options.weighted else None,
        callbacks=[WindowInLog(schedule)],
    )
    if trainer.get_cp_size() * trainer.get_sp_size() > 1:
        parser.error("context parallelism of accelerate drops the borders of segments; train with data parallelism")
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
