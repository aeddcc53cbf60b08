"""Record the results of each step and check them for incidents.

RunRecords    metrics of each step and validation, config.yaml, history.jsonl, and the progress line
Incidents     loss spikes and non-finite values: whether a step changes the weights, and whether the run goes on
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.attention.health import AttentionHealth
from megatron_ext.checkpoint.history import Record, first_start, note_history
from megatron_ext.config import Config
from megatron_ext.config.arguments import as_flag, dump_run, of_start, to_dict
from megatron_ext.engine.step import Outcome, StepResult
from megatron_ext.errors import DivergedError, UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.files.reading import JsonObject
from megatron_ext.monitoring.metrics import MetricsWriter
from megatron_ext.monitoring.progress import Progress
from megatron_ext.planning.flops import step_flops, utilisation

RESULTS = (
    "lm_loss",
    "train_loss",
    "segments",
    "effective_context",
    "grad_norm",
    "denominator",
)  # recorded at each step
SPIKE = "loss spike"
SHOWN = 8  # most results of lm-eval in the progress output; evaluation.jsonl has all
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

    parameters: int  # of the whole model; of the experts, only those that a token selects
    peak_flops: float | None  # FLOP/s of all GPUs together, in the dtype of the matrix products; None if unknown
    facts: Record  # other facts that history.jsonl records at a start


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
    """Shows the progress of a run on process 0 (`first`) and, after `open`, writes its metrics.

    The run starts, or resumes, after `step` completed steps.
    """

    def __init__(self, config: Config, info: RunInfo, step: int, *, first: bool) -> None:
        self.config = config
        self.info = info
        self.tokens_per_step = config.data.global_batch_size * config.data.seq_length
        self.metrics: MetricsWriter | None = None
        self._noted: set[str | None] = set()
        self._s_max_warned = False
        self._began = step
        self.progress = Progress(
            config.training.train_iters, step, enabled=first, every_steps=config.logging.log_interval
        )

    def open(self, folder: Path, *, is_continued: bool) -> None:
        """Write config.yaml and the start to the run's folder; open its metrics, and remove steps to be repeated.

        If no checkpoint of this folder is continued, all recorded steps are removed: their weights are lost.

        Raises:
            UserError: a damaged line of metrics, or a run that began from others and saved nothing yet.
            OSError: a file cannot be written.
        """
        facts = of_start(self.config)
        first = first_start(folder)
        began_with = {name: first[name] for name in ("init_from", "init_optimizer") if name in first}
        lacking = began_with.keys() - facts.keys()
        if not self._began and lacking:
            flags = " ".join(as_flag(name, value) for name, value in began_with.items())
            raise UserError(
                f"{min(lacking)}: got none, but {folder}, which has no checkpoint yet, began with {flags}; add this, "
                "or choose another folder"
            )
        kept_steps = self._began if is_continued else 0
        self.metrics = MetricsWriter(
            folder, resume_step=kept_steps, logging=self.config.logging, config=to_dict(self.config)
        )
        with atomic_write(folder / "config.yaml") as aside:
            aside.write_text(dump_run(self.config))
        note_history(folder, "start", self._began, {**self.info.facts, **facts})

    def sync(self) -> None:
        """Wait until the records are on disk: a resumed run does not repeat the steps before its checkpoint."""
        if self.metrics is not None:
            self.metrics.sync()

    def after_step(self, done: StepRecord) -> None:
        """Write the metrics of a step."""
        result = done.result
        work = (self.config.model, self.info.parameters, self.tokens_per_step, result.effective_context)
        record: JsonObject = {
            **{name: value for name, value in vars(done).items() if name not in ("samples", "result")},
            "time": time.time(),
            "consumed_tokens": done.consumed_samples * self.config.data.seq_length,
            **{name: getattr(result, name) for name in RESULTS},
            "skipped": int(result.outcome is not Outcome.UPDATED),
            "tokens_per_s": self.tokens_per_step / done.step_time_s,
            "flops": step_flops(*work),
        }
        if done.source_rows is None:
            del record["source_rows"]
        if self.info.peak_flops is not None:
            record["mfu"] = utilisation(*work, seconds=done.step_time_s, peak=self.info.peak_flops)
        if self.config.weighting.token_weighting != "none":
            tokens = result.terms.token_count or 1.0
            record |= {
                "weight_std": result.weight_std,
                "weight_max": result.weight_max,
                "zero_share": result.terms.zero_count / tokens,
                "score_mean": result.terms.score_sum / tokens,
                "score_time_s": result.score_seconds,
            }
        if result.attention is not None:
            record |= {f"attention_{name}": by_layer for name, by_layer in result.attention._asdict().items()}
            self._watch_s_max(done.step, result.attention)
        if self.config.training.moe_aux_loss_coeff:
            record["moe_aux_loss"] = result.moe_aux_loss
        self.progress.update(record)
        if result.outcome is Outcome.NO_TOKENS:
            self.note(
                f"step {done.step} has no trained token: no weight changed (logged once; see `skipped`)", once="skipped"
            )
        if self.metrics is not None:
            self.metrics.write("train", record)

    def evaluation(self, step: int, losses: Losses, by_position: Mapping[int, float], setting: str) -> None:
        """Record a validation after `step` steps: its losses by context length, and by position at the longest.

        Records with the same `setting` are comparable.
        """
        training = self.config.training
        loss = losses[max(losses)]
        perplexity = None
        if loss is not None:
            perplexity = math.exp(min(loss, 700.0))  # avoid float overflow
            self.note(f"validation after {step} steps: loss {loss:.4f} at context {max(losses)}")
        else:
            self.note(
                f"validation after {step} steps: no trained token in its rows, so its loss is null (logged once); "
                "raise --eval-iters or the second share of --split",
                once="no validation loss",
            )
        record = {
            "step": step,
            "valid_loss": loss,
            "valid_perplexity": perplexity,
            "tokens": training.eval_iters * self.tokens_per_step,
            "setting": setting,
            "document_mask": training.eval_document_mask,
            "stride": training.eval_stride,
            "by_length": losses,
            "by_position": by_position,
        }
        if self.metrics is not None:
            self.metrics.write("validation", record)

    def lm_eval(self, step: int, scores: Mapping[str, float]) -> None:
        """Record the results of lm-eval after `step` steps, by task and metric."""
        shown = f"{len(scores)} results"
        if len(scores) <= SHOWN:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        self.note(f"lm-eval after {step} steps: {shown}")
        if self.metrics is not None:
            self.metrics.write("validation", {"step": step, "lm_eval": scores})

    def note(self, text: str, *, once: str | None = None) -> None:
        """Print a line above the progress bar; only the first one of each kind `once`."""
        if once is None or once not in self._noted:
            self._noted.add(once)
            self.progress.note(text)

    def close(self, step: int, how: str) -> None:
        """Close the metrics and the progress line; record that the run ended after `step` steps, and `how`."""
        self.progress.close()
        if self.metrics is not None:
            note_history(self.metrics.folder, "end", step, {"how": how})
            self.metrics.close()  # W&B may take a while

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

    With `--on-spike skip` or `--on-non-finite skip`, a step that has one does not change the weights and the
    optimizer's state: the host waits for each step's loss and gradient norm before the update. `state` is the
    `state_dict` of the run that is resumed; {} for a new run.
    """

    def __init__(self, config: Config, records: RunRecords, state: Record) -> None:
        self.options = config.training
        self.records = records
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
        if result.outcome is not Outcome.NO_TOKENS and math.isfinite(result.lm_loss):
            self.losses.append(result.lm_loss)
        self._skips += 1
        if result.outcome is not Outcome.REFUSED:
            self._skips = 0
        if incident is None:
            return
        if action == "skip" and self._skips >= self.options.skip_limit:
            action = "stop"
        self.records.note(
            f"the {incident.what} of step {done.step} is {incident.value:.4f}, needs {incident.needs}; "
            f"{_CONSEQUENCES[action]}"
        )
        done.spike = int(incident.what == SPIKE)
        if action == "stop":
            if result.outcome is Outcome.REFUSED:
                needs = f"{incident.needs} in one of skip_limit {self.options.skip_limit} steps, which were skipped"
                raise DivergedError(incident.what, incident.value, needs)
            raise incident

    def state_dict(self) -> JsonObject:
        """Return the state that a resumed run needs for identical decisions, as JSON types."""
        return {"loss_history": list(self.losses), "skips": self._skips}

    def _check(self, result: StepResult) -> tuple[DivergedError | None, str]:
        """Return the non-finite value or the spike of a step, if any, and what to do."""
        options = self.options
        if result.outcome is Outcome.NO_TOKENS:
            return None, "continue"
        divergence = result.divergence()
        if divergence is not None:
            return divergence, options.on_non_finite
        bound = spike_bound(self.losses, options.spike_window, options.spike_deviations)
        if bound is not None and result.lm_loss > bound:
            return DivergedError(SPIKE, result.lm_loss, f"at most {bound:.4f}"), options.on_spike
        return None, "continue"
