"""Act on the results of each step: records, loss spikes, validation.

RunRecords    metrics of each step and validation, config.yaml, history.jsonl, and the progress line
Incidents     loss spikes and non-finite values: whether a step changes the weights, and whether the run goes on
Validation    when, on which rows, and at which context lengths; early stopping
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext import heartbeat
from megatron_ext.attention.health import AttentionHealth
from megatron_ext.config import Config, TrainingConfig
from megatron_ext.config.arguments import dump_yaml, to_dict
from megatron_ext.data.row import RowSource
from megatron_ext.engine.step import Stepper, StepResult
from megatron_ext.errors import DivergedError
from megatron_ext.evaluation.by_position import BINS, losses_by_position, mean_loss
from megatron_ext.files.atomic import atomic_write
from megatron_ext.monitoring.metrics import EVALUATION_FILE, MetricsWriter, note_history, read_by_step
from megatron_ext.monitoring.progress import Progress
from megatron_ext.planning.flops import step_flops, utilisation
from megatron_ext.run.batches import BatchMaker
from megatron_ext.run.signals import VALIDATION_LOSS, StopRequest

RESULTS = ("lm_loss", "train_loss", "segments", "effective_context", "grad_norm", "denominator")  # of each step
SPIKE = "loss spike"
_CONSEQUENCES = {
    "continue": "training continues",
    "skip": "the step is skipped, no weight changed",
    "stop": "the run ends",
}
_ROUNDING = 1e-6  # relative to the mean: a constant loss has no standard deviation
Losses = dict[int, float | None]  # by completed steps, ascending, or by context length; None without trained tokens


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
            **{name: getattr(result, name) for name in RESULTS},
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

    def evaluation(self, step: int, losses: Losses, by_position: Mapping[int, float]) -> None:
        """Record a validation after `step` steps: its losses by context length, those of the longest by position."""
        training, loss = self.config.training, losses[max(losses)]
        record = {
            "step": step,
            "valid_loss": loss,
            "valid_perplexity": None if loss is None else math.exp(min(loss, 700.0)),  # avoid float overflow
            "tokens": training.eval_iters * self.tokens_per_step,
            # records are comparable only if these two are equal
            "document_mask": training.eval_document_mask,
            "stride": training.eval_stride,
            "by_length": losses,
            "by_position": by_position,
        }
        if loss is not None:
            self.note(f"validation after {step} steps: loss {loss:.4f} at context {max(losses)}")
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


def spike_bound(losses: Sequence[float], window: int, deviations: float) -> float | None:
    """Return the bound above which the next loss is a spike: mean + deviations * std of the last `window` losses.

    This is OLMo 2's rule (arXiv 2501.00656), with the population's standard deviation. Before there are `window`
    losses, and with a window of 0, nothing is a spike. Spikes are included in the window, so a loss that stays high
    soon becomes the expected value.
    """
    if not window or len(losses) < window:
        return None
    last = np.array(losses)
    mean = float(last.mean())
    return mean + deviations * max(float(last.std()), _ROUNDING * abs(mean))


class Incidents:
    """Checks each step of a run, the same on every process, and applies the configured reaction.

    With `--on-spike skip` or `--on-non-finite skip` such a step leaves the weights and the optimizer's state unchanged:
    the host waits for each step's loss and gradient norm before the update. `state` is the `state_dict` of the run that
    is resumed; {} for a new run.
    """

    def __init__(self, config: Config, records: RunRecords, state: Mapping[str, Any]) -> None:
        self.options, self.records = config.training, records
        self.may_skip = "skip" in (self.options.on_spike, self.options.on_non_finite)
        self.losses = deque(state.get("loss_history", ()), self.options.spike_window)  # finite ones, the latest last
        self._skips = state.get("skips", 0)

    def accepts(self, result: StepResult) -> bool:
        """Return whether a step may change the weights, after all earlier steps have been recorded."""
        return self._check(result)[1] != "skip"

    def after_step(self, done: StepRecord) -> None:
        """Check a step, mark a loss spike, and record any incident; raise DivergedError if the run ends with it."""
        result = done.result
        incident, action = self._check(result)
        if not result.without_tokens and math.isfinite(result.lm_loss):
            self.losses.append(result.lm_loss)
        self._skips = self._skips + 1 if result.refused else 0
        if incident is None:
            return
        if action == "skip" and self._skips >= self.options.skip_limit:
            action = "stop"
        self.records.note(
            f"the {incident.what} of step {done.step} is {incident.value:.4f}, needs {incident.needs}; "
            f"{_CONSEQUENCES[action]}"
        )
        done.spike = int(incident.what == SPIKE)
        if action == "stop" and result.refused:
            needs = f"{incident.needs} in one of skip_limit {self.options.skip_limit} steps, which were skipped"
            raise DivergedError(incident.what, incident.value, needs)
        if action == "stop":
            raise incident

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs for identical decisions, as JSON types."""
        return {"loss_history": list(self.losses), "skips": self._skips}

    def _check(self, result: StepResult) -> tuple[DivergedError | None, str]:
        """Return the non-finite value or the spike of a step, if any, and what to do."""
        options = self.options
        if result.without_tokens:
            return None, "continue"
        if (divergence := result.divergence()) is not None:
            return divergence, options.on_non_finite
        bound = spike_bound(self.losses, options.spike_window, options.spike_deviations)
        if bound is not None and result.lm_loss > bound:
            return DivergedError(SPIKE, result.lm_loss, f"at most {bound:.4f}"), options.on_spike
        return None, "continue"


def read_losses(run: Path | str | None, step: int) -> Losses:
    """Read the losses of a run's validations after at most `step` steps; {} without a folder.

    They are not in a checkpoint, which is saved before the validation of the same step.
    """
    records = {} if run is None else read_by_step(Path(run) / EVALUATION_FILE)
    return {after: record["valid_loss"] for after, record in records.items() if after <= step}


def stop_reason(losses: Losses, training: TrainingConfig) -> str | None:
    """Return why a run stops early: its last `early_stopping_patience` losses have not improved; None if it continues.

        delta 0.1    loss      4.0   3.5   3.45  3.6   3.3
                     lowest    4.0   3.5   3.5   3.5   3.3    3.45 is not lower by more than delta
                     without    0     0     1     2     0

    A loss improves on the lowest one if it is lower by more than `early_stopping_delta`, in nats. A patience of 0
    disables early stopping.
    """
    lowest, at, without = math.inf, 0, 0
    for step, loss in losses.items():
        if loss is not None and loss < lowest - training.early_stopping_delta:
            lowest, at, without = loss, step, 0
        elif loss is not None:
            without += 1
    if not training.early_stopping_patience or without < training.early_stopping_patience:
        return None
    return (
        f"stopped early: the validation loss was lowest after {at} steps, {lowest:.4f}, and the "
        f"{without} validations since were not lower by more than {training.early_stopping_delta:g}"
    )


@dataclass
class Validation:
    """Runs validations when due; every process calls every method.

    SkyLadder measures perplexity on validation documents in a sliding window (`--eval-stride`), with the same mask for
    all compared runs: independent of the training mask, only --eval-document-mask keeps attention inside documents.
    """

    config: Config
    stepper: Stepper
    batches: BatchMaker
    rows: RowSource | None  # None if the run never validates
    records: RunRecords
    losses: Losses  # of the validations so far, also those before the run was resumed

    @property
    def stop_reason(self) -> str | None:
        return stop_reason(self.losses, self.config.training)

    def is_due(self, step: int) -> bool:
        """Return whether a run validates after this many steps."""
        training = self.config.training
        return training.eval_interval > 0 and (step % training.eval_interval == 0 or step == training.train_iters)

    def after_step(self, step: int, request: StopRequest | None) -> int:
        """Validate if it is due after `step` completed steps, until a signal interrupts it; None: signals are deferred.

        Returns:
            The signal that interrupted the validation, which then has no record; 0 otherwise.

        Raises:
            DivergedError: a loss is not finite; raised on all processes, without a record.
        """
        if not self.is_due(step) or step in self.losses:
            return 0
        assert self.rows is not None
        training, data = self.config.training, self.config.data
        lengths = sorted(training.eval_lengths or (data.seq_length,))
        trained_window = self.config.window_schedule().window_at(max(step - 1, 0))
        sums = {length: torch.zeros(2, BINS, dtype=torch.float64) for length in lengths}
        for length, number in itertools.product(lengths, range(training.eval_iters)):
            heartbeat.beat(f"validating after {step} steps")
            if request is not None:
                # a signal may reach only one process, but all must leave this loop together
                received = torch.tensor(request.signal, device=self.stepper.platform.device)
                dist.all_reduce(received, dist.ReduceOp.MAX)
                if received:
                    return int(received)
            batches = self.batches.evaluate(self.rows.row, number * data.global_batch_size, length, trained_window)
            sums[length] += self.stepper.evaluate(batches)
        losses = {length: mean_loss(at) for length, at in sums.items()}
        for loss in losses.values():
            if loss is not None and not math.isfinite(loss):
                raise DivergedError(VALIDATION_LOSS, loss)
        self.records.evaluation(step, losses, losses_by_position(sums[lengths[-1]]))
        self.losses[step] = losses[lengths[-1]]
        return 0
