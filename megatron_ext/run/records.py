"""Write a run's records: metrics of each step and validation, config.yaml, history.jsonl, and the progress line."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_ext.attention.health import AttentionHealth
from megatron_ext.config import Config
from megatron_ext.config.arguments import dump_yaml, to_dict
from megatron_ext.engine.step import StepResult
from megatron_ext.evaluation.by_position import losses_by_position, mean_loss
from megatron_ext.files.atomic import atomic_write
from megatron_ext.monitoring.metrics import MetricsWriter, note_history
from megatron_ext.monitoring.progress import Progress
from megatron_ext.planning.flops import step_flops, utilisation


@dataclass(frozen=True)
class RunInfo:
    """Describes a run and its machine."""

    parameters: int  # of the whole model; only the selected experts of a token count
    peak_flops: float | None  # FLOP/s of all GPUs together, in the dtype of the matrix products; None if unknown
    facts: Mapping[str, Any]  # other facts that history.jsonl records at a start


@dataclass
class StepRecord:
    """The record of a step; every field except `samples` and `result` is a key of metrics.jsonl."""

    step: int  # counted from 0
    samples: range  # the rows of its global batch
    consumed_samples: int  # rows that the run has trained on, including this step
    window: int
    learning_rate: float
    result: StepResult
    cp_bytes: int  # sent through all context-parallel groups
    peak_memory_bytes: int  # maximum over processes
    step_time_s: float
    data_wait_s: float  # the wait for its batches, part of `step_time_s`
    save_stall_s: float  # training time lost to saving since the previous step
    spike: int = 0  # 1 if its loss is a spike; set by `Incidents`
    source_rows: Mapping[str, int] | None = None  # its rows from each dataset of a mixture; None for a single dataset


class RunRecords:
    """Shows progress on process 0 (`first`) after `step` completed steps and, after `open`, writes the metrics."""

    def __init__(self, config: Config, info: RunInfo, step: int, *, first: bool) -> None:
        self.config, self.info = config, info
        self.tokens_per_step = config.data.global_batch_size * config.data.seq_length
        self.metrics: MetricsWriter | None = None
        self._noted: set[str | None] = set()
        self._s_max_warned = False
        self._began = step
        every = config.logging.log_interval
        self.progress = Progress(config.training.train_iters, step, enabled=first, every_steps=every)

    def open(self, folder: Path) -> None:
        """Write config.yaml and the start to the run's folder; open its metrics, without the steps to be repeated.

        Raises:
            UserError: a damaged line of metrics, or a requested view that is not installed.
            OSError: a file cannot be written.
        """
        self.metrics = MetricsWriter(
            folder, resume_step=self._began, logging=self.config.logging, config=to_dict(self.config)
        )
        with atomic_write(folder / "config.yaml") as aside:
            aside.write_text(dump_yaml(self.config))
        note_history(folder, "start", self._began, self.info.facts)

    def after_step(self, done: StepRecord) -> None:
        """Write the metrics of a step."""
        result, model, parameters = done.result, self.config.model, self.info.parameters
        work = (model, parameters, self.tokens_per_step, result.effective_context)
        record: dict[str, Any] = {
            **{name: value for name, value in vars(done).items() if name not in ("samples", "result")},
            "time": time.time(),
            "consumed_tokens": done.consumed_samples * self.config.data.seq_length,
            "lm_loss": result.lm_loss,
            "train_loss": result.train_loss,
            "segments": result.segments,
            "effective_context": result.effective_context,
            "grad_norm": result.grad_norm,
            "denominator": result.denominator,
            "skipped": int(result.skipped),
            "tokens_per_s": self.tokens_per_step / done.step_time_s,
            "flops": step_flops(*work),
        }
        if done.source_rows is None:
            del record["source_rows"]
        if self.info.peak_flops is not None:
            record["mfu"] = utilisation(*work, seconds=done.step_time_s, peak=self.info.peak_flops)
        if self.config.weighting.token_weighting != "none":
            terms = result.terms
            record |= {
                "weight_std": result.weight_std,
                "weight_max": result.weight_max,
                "zero_share": terms.zero_count / (terms.token_count or 1.0),
                "score_mean": terms.score_sum / (terms.token_count or 1.0),
                "score_time_s": result.score_seconds,
            }
        if result.attention is not None:
            record |= {f"attention_{name}": by_layer for name, by_layer in result.attention._asdict().items()}
            self._watch_s_max(done.step, result.attention)
        if self.config.training.moe_aux_loss_coeff:
            record["moe_aux_loss"] = result.moe_aux_loss
        self.progress.update(record)
        if result.without_tokens:
            nothing = f"step {done.step} has no trained token: no weight changed (logged once; see `skipped`)"
            self.note(nothing, once="skipped")
        if self.metrics is not None:
            self.metrics.write("train", record)

    def evaluation(self, step: int, sums: Mapping[int, Tensor]) -> None:
        """Record a validation after `step` steps: its `sums_by_position` by context length."""
        training, longest = self.config.training, sums[max(sums)]
        loss = mean_loss(longest)  # None without trained tokens
        record = {
            "step": step,
            "valid_loss": loss,
            "valid_perplexity": None if loss is None else math.exp(min(loss, 700.0)),  # avoid float overflow
            "tokens": training.eval_iters * self.tokens_per_step,
            # records are comparable only if these two are equal
            "document_mask": training.eval_document_mask,
            "stride": training.eval_stride,
            "by_length": {length: mean_loss(at) for length, at in sums.items()},
            "by_position": losses_by_position(longest),
        }
        if loss is not None:
            self.note(f"validation after {step} steps: loss {loss:.4f} at context {max(sums)}")
        else:
            self.note(
                f"validation after {step} steps: no trained token in its rows, so its loss is null (logged once); "
                "raise --eval-iters or the second share of --split",
                once="no validation loss",
            )
        if self.metrics is not None:
            self.metrics.write("validation", record)

    def note(self, text: str, *, once: str | None = None) -> None:
        """Print a line above the progress bar; only the first one of each kind `once`."""
        if once is None or once not in self._noted:
            self._noted.add(once)
            self.progress.note(text)

    def close(self, step: int, how: str) -> None:
        """Close the metrics, end the progress line and record the end after `step` steps: how the run ended."""
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()
            note_history(self.metrics.folder, "end", step, {"how": how})

    def _watch_s_max(self, step: int, attention: AttentionHealth) -> None:
        """Warn if attention scores exceed the limit, once until they are below it again."""
        limit = self.config.logging.attention_s_max_warning
        largest = float(np.max(attention.s_max_scaled))  # NaN exceeds every limit
        above = not largest <= limit
        if above and not self._s_max_warned:
            layer = 1 + int(np.argmax(attention.s_max_scaled))
            self.note(
                f"warning: step {step}: S_max of layer {layer} is {largest:.1f}, above attention_s_max_warning "
                f"{limit:g}: its softmax nears a choice of one key; lower --lr"
            )
        self._s_max_warned = above
