"""What the parity tests of context parallelism share: cases, their rows, layouts of processes, and comparisons."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_ext.config import Config, ParallelConfig, WeightingConfig
from megatron_ext.config.arguments import parse
from megatron_ext.context_parallel import CPPlan, plan
from megatron_ext.context_parallel.choice import CPOptions
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.data.row import TokenRow
from megatron_ext.masks import LayerMasks
from tests.launcher import call
from tests.runs import relative, weight_error

VOCABULARY = 61
LAYERS = 2
HEADS = 8
KEY_HEADS = 4
HEAD_SIZE = 6
STEPS = 2
SERIES = ("lm_loss", "train_loss", "grad_norm", "denominator")  # what each step gives
VALIDATION = 1000  # the first sample index of the validation rows
TIMEOUT_S = 1000

FLAGS = f"""--num-layers {LAYERS} --hidden-size {HEADS * HEAD_SIZE} --ffn-hidden-size 64 --vocab-size {VOCABULARY}
    --num-attention-heads {HEADS} --num-query-groups {KEY_HEADS} --make-vocab-size-divisible-by 8 --init-method-std 0.08
    --data-path the-rows-of-this-module --lr 1e-4 --adam-eps 1e-6 --train-iters {STEPS} --loss-block-tokens 50"""
UNIFORM = WeightingConfig()

Parallel = dict[str, Any]  # fields of ParallelConfig


@dataclass(frozen=True)
class Case:
    """One short training run on rows that these fields alone decide."""

    # window, document_mask: what is attended to
    window: int
    document_mask: bool = True
    # policy, scheme: how the rows are shared out; of no meaning to one process
    policy: str = "auto"
    scheme: str = "exchange"
    documents: str = "mixed"  # "mixed" (ends anywhere, others in each row), "one" per row, or one per "token"
    # "all" tokens, "uneven" along the row, all but a "rank"'s, all but the first "micro-batch"'s, or "none"
    trained: str = "all"
    # for trained="rank", the (cp_size, policy, rank) whose tokens are not trained
    masked: tuple[int, str, int] | None = None
    # micro_batch, rows, length: rows of a micro-batch, rows of a step, tokens of a row
    micro_batch: int = 1
    rows: int = 2
    length: int = 132
    recompute: str | None = None  # activations in backward, "full" or "selective"
    overlaps: bool = False  # a distributed optimizer that overlaps its communication
    bf16: bool = False  # precision
    parts: int | None = None  # of the key heads, whose exchange overlaps with attention
    # weighting, z_loss: weights of the loss
    weighting: WeightingConfig = UNIFORM
    z_loss: float = 0.0
    # window_mask, local_window: the window's mask; a window for the first of the two layers of its own
    window_mask: str = "grid"
    local_window: int | None = None
    local_window_fixed: bool = False  # the schedule does not narrow it

    @property
    def alone(self) -> "Case":
        return replace(self, policy="auto", scheme="exchange", recompute=None, overlaps=False, parts=None)

    def config(self, parallel: Parallel) -> Config:
        overlaps = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        local = f"--local-window {self.local_window} --window-attn-skip-freq {LAYERS}" if self.local_window else ""
        config = parse(f"{FLAGS} {local} --seq-length {self.length} --z-loss {self.z_loss}".split())
        shared = {"cp_policy": self.policy, "cp_scheme": self.scheme, "cp_overlap_parts": self.parts}
        shared |= {"recompute_granularity": self.recompute, "distributed_timeout_minutes": 3}
        window = {"window_start": min(self.window, self.length), "window_mask": self.window_mask}
        window |= {"local_window_fixed": self.local_window_fixed, "document_mask": self.document_mask}
        return replace(
            config,
            parallel=ParallelConfig(**parallel | dict.fromkeys(overlaps, self.overlaps) | shared),
            data=replace(config.data, micro_batch_size=self.micro_batch, global_batch_size=self.rows),
            window=replace(config.window, **window),
            training=replace(config.training, bf16=self.bf16),
            weighting=self.weighting,
        )

    def row_at(self, sample: int) -> TokenRow:
        row = self._drawn(sample)
        if self.weighting.token_weighting == "dataset":
            weights = np.random.default_rng([10, sample]).random(self.length).astype(np.float32)
            row = replace(row, weights=weights)
        return replace(row, trained=self._trained(sample)) if sample < VALIDATION else row

    def short_losses(self, sample: int) -> np.ndarray:
        """float32 [L], what a frozen scorer left of a sample: some near the model's own losses, many far off."""
        return np.random.default_rng([9, sample]).gamma(4.0, 1.0, self.length).astype(np.float32)

    def masks(self, first: int) -> LayerMasks:
        """The masks of the micro-batch that begins at a sample index."""
        ends = [self._drawn(first + row).document_ends for row in range(self.micro_batch)]
        return self.config({}).mask_options().at(self.length, ends, self.window)

    def plans(self, cp_size: int, step: int) -> list[list[tuple[int, CPPlan]]]:
        """Return all micro-batches of a step, for every data-parallel rank: layers and the plan that they follow."""
        options = CPOptions(CPGroup(0, cp_size, None), self.policy, None, HEADS, KEY_HEADS)
        all_masks = [self.masks(first) for first in range(step * self.rows, (step + 1) * self.rows, self.micro_batch)]
        return [
            [(layers, cp_plan) for (layers, _), cp_plan in zip(masks.by_layers(), options.plans(masks), strict=True)]
            for masks in all_masks
        ]

    def _drawn(self, sample: int) -> TokenRow:
        """The row with every token trained."""
        chance = np.random.default_rng([7, sample])
        length = self.length
        tokens = chance.integers(0, VOCABULARY, length + 1)
        ends = {
            "one": np.array([length]),
            "token": np.arange(1, length + 1),
            # short ones as often as long ones; the first row ends a document after 1, L - 1 and L tokens
            "mixed": np.unique(np.cumsum(1 + length ** chance.random(40)).astype(int)),
        }[self.documents]
        if self.documents == "mixed" and sample % 2 == 0:
            ends = np.union1d(ends, [1, length - 1, length])
        return TokenRow(tokens, ends[ends <= length], np.ones(length, dtype=np.bool_))

    def _trained(self, sample: int) -> np.ndarray:
        first = sample - sample % self.micro_batch
        if self.trained == "rank":
            cp_size, policy, rank = self.masked
            trained = np.ones(self.micro_batch * self.length, dtype=np.bool_)
            trained[plan(self.masks(first).scheduled.layout, cp_size, policy).rows[rank]] = False
            return trained.reshape(self.micro_batch, -1)[sample - first]
        share = {
            "all": 1.0,
            "uneven": np.linspace(0, 1, self.length) ** 3,
            "micro-batch": float(first % self.rows != 0),
            "none": 0.0,
        }[self.trained]
        trained_row: np.ndarray = np.random.default_rng([8, sample]).random(self.length) < share
        return trained_row


@dataclass(frozen=True)
class Probe:
    """Losses of one micro-batch, and of the same with one token replaced, for each of `places`."""

    case: Case  # the micro-batch that begins at sample 0
    places: tuple[tuple[int, int], ...]  # (row, index into its L+1 tokens)


@dataclass(frozen=True)
class Outcome:
    """What one process saw of a case."""

    coordinates: tuple[int, int]  # (tensor, pipeline) place; processes that share it hold the same weights
    # lm_loss, train_loss, grad_norm, denominator: of each step
    lm_loss: list[float]
    train_loss: list[float]
    grad_norm: list[float]
    denominator: list[float]
    valid_loss: float  # mean loss of other rows after the last step
    digest: str  # of this process's weights after the last step
    weights: dict[str, np.ndarray] | None  # the whole model, by Hugging Face names; on process 0 alone
    # (operation, bytes sent to others) of every collective on the context-parallel group in the first step
    calls: list[tuple[str, int]]
    evaluation_calls: list[tuple[str, int]]  # in the evaluation
    counted: list[int]  # of each step, what this process's CPGroup counted
    # of each step (weight_std, weight_max, zero_count, score_sum)
    weight_metrics: list[tuple[float, float, float, float]]


@dataclass(frozen=True)
class ProbeOutcome:
    """What one process saw of a probe."""

    held: np.ndarray  # int64 [t], its tokens
    losses: np.ndarray  # float32 [1 + places, t], as the rows are and with each place replaced


def _work(rank: int, parallel: Parallel, jobs: list[Case | Probe]) -> list[Any]:
    from tests.context_parallel.worker import work  # imports Megatron

    return work(parallel, jobs)


@dataclass(frozen=True)
class Layout:
    name: str
    processes: int
    cp: int
    others: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def parallel(self) -> Parallel:
        """Fields of ParallelConfig."""
        return {"context_parallel_size": self.cp, **dict(self.others)}


_TP2, _PP2 = ("tensor_model_parallel_size", 2), ("pipeline_model_parallel_size", 2)
_SEQUENCE = ("sequence_parallel", True)
CP2, CP4 = Layout("cp2", 2, 2), Layout("cp4", 4, 4)
CP2_TP2 = Layout("cp2 tp2 sp", 4, 2, (_TP2, _SEQUENCE))
CP2_PP2 = Layout("cp2 pp2", 4, 2, (_PP2,))
CP2_DP2 = Layout("cp2 dp2", 4, 2)
LAYOUTS = (CP2, CP4, CP2_TP2, CP2_PP2, CP2_DP2)


class Runs:
    """The results of each layout's jobs; all jobs of a list run in the same processes, when the first is asked for."""

    def __init__(self, jobs_of: Callable[[Layout], Sequence[Sequence[Case | Probe]]]) -> None:
        self._jobs_of = jobs_of
        self._seen: dict[Layout, dict[Case | Probe, list[Any]]] = {}
        self._alone: dict[Case | Probe, list[Any]] = {}

    def of(self, layout: Layout, job: Case | Probe) -> list[Any]:
        """Return what each process saw of a job: an `Outcome` or a `ProbeOutcome`."""
        seen = self._seen.setdefault(layout, {})
        if job not in seen:
            together = next(jobs for jobs in self._jobs_of(layout) if job in jobs)
            seen |= _run(layout.parallel, layout.processes, together)
        assert not isinstance(seen[job][0], str), f"{job} was refused: {seen[job][0]}"
        return seen[job]

    def alone(self, case: Case) -> Outcome:
        """Return what one process saw of a case of a layout that has run."""
        if case.alone not in self._alone:
            cases = [job.alone for seen in self._seen.values() for job in seen if isinstance(job, Case)]
            self._alone |= _run({}, 1, [case for case in cases if case not in self._alone])
        outcome: Outcome = self._alone[case.alone][0]
        return outcome


def _run(parallel: Parallel, processes: int, requested: Sequence[Case | Probe]) -> dict[Case | Probe, list[Any]]:
    jobs = list(dict.fromkeys(requested))
    answers = call(_work, processes, parallel, jobs, timeout_s=TIMEOUT_S, group=False)
    return dict(zip(jobs, map(list, zip(*answers, strict=True)), strict=True))


def errors(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    differences = {name: relative(getattr(ours, name), getattr(theirs, name)) for name in SERIES}
    differences["valid_loss"] = relative([ours.valid_loss], [theirs.valid_loss])
    differences["weights"] = weight_error(ours.weights, theirs.weights)[0]
    return differences
