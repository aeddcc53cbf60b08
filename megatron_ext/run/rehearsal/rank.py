"""One rank's rehearsal: the trainer's own objects, one step per window, measured.

join fake groups -> build the model -> Trainer -> an optimizer step, for its state -> per window: a measured step
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ext.batch import StepBatches
from megatron_ext.config import Config
from megatron_ext.config.vocabulary import vocabulary_size
from megatron_ext.engine import compat, parallel, platform
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.weights import initialise
from megatron_ext.run import train
from megatron_ext.run.inputs import Inputs
from megatron_ext.run.rehearsal.collectives import Collectives
from megatron_ext.run.rehearsal.memory import Part
from megatron_ext.run.rehearsal.meter import Meter
from megatron_ext.run.rehearsal.pretence import tell_routing
from megatron_ext.run.rehearsal.routing import routing_of
from megatron_ext.run.rehearsal.rows import InventedScores, rows_of
from megatron_ext.run.rehearsal.sites import Sites
from megatron_ext.run.rows import RowAt, Rows
from megatron_ext.run.signals import StopRequest


@dataclass(frozen=True)
class Wait:
    """Says what the host waited for, on which line, how often in a step."""

    what: str
    line: str
    count: int


@dataclass(frozen=True)
class Fault:
    """Says how a step failed: the error, its line in this package or Megatron, and the whole traceback."""

    error: str
    line: str
    traceback: str


@dataclass(frozen=True)
class Step:
    """Holds what one step of one rank was measured to do.

    Attributes:
        window: in tokens.
        segments: of this rank's micro-batches.
        microbatches: of this rank.
        memory: bytes of each part at the peak.
        held: bytes of each part between steps.
        circles: bytes that were left for Python's search for circles of references to free.
        peak_at: where the peak was.
        living: the bytes that lived then, by where they were allocated.
        flops: by operator.
        collectives: by group: calls, bytes sent, and calls by name.
        launches: operators, by where.
        layers: layers of this rank, times micro-batches.
        waits: of the host for the device.
        unpriced: custom operators without a formula for their FLOPs.
        fault: what ended the step, if anything did; the rest then holds what was measured so far.
        seconds: that it took.
    """

    window: int
    segments: int
    microbatches: int
    memory: dict[str, int]
    held: dict[str, int]
    circles: int
    peak_at: str
    living: dict[str, int]
    flops: dict[str, int]
    collectives: dict[str, dict[str, Any]]
    launches: dict[str, int]
    layers: int
    waits: list[Wait]
    unpriced: dict[str, int]
    fault: Fault | None
    seconds: float

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Rehearsed:
    """Holds what one rank's rehearsal found.

    Attributes:
        rank: its number.
        place: "TP 0 PP 1 CP 0 DP 3".
        rows: what the rows were.
        layers: whose.
        routing: what was stated of it; "" without experts.
        build_seconds: until the first step.
        steps: one per window.
        fault: what kept the model from being built, if anything did.
    """

    rank: int
    place: str
    rows: str
    layers: str
    routing: str
    build_seconds: float
    steps: list[Step] = field(default_factory=list)
    fault: Fault | None = None


def rehearse(
    config: Config,
    windows: Sequence[int],
    documents: str | None,
    meter_device: str,
    noting: list[Meter],
    *,
    expert_load: float = 1.0,
) -> Rehearsed:
    """Rehearse this process's rank.

    Args:
        config: a configuration that is checked for the number of processes.
        windows: in tokens.
        documents: as `rows_of` takes it.
        meter_device: "cuda", under `pretence`; "cpu" computes for real.
        noting: where to put the meter, for those who note waits.
        expert_load: times the mean of tokens that come to this rank's experts.
    """
    began = time.perf_counter()
    vocab_size = vocabulary_size(config.model.vocab_size, config.data.tokenizer_model)
    row_at, rows = rows_of(config, vocab_size, documents)
    config = without_files(config)
    train.Checkpointer = _NoCheckpoints  # type: ignore[assignment, misc]  # the real one reads the run's data at once
    fake = meter_device == "cuda"
    compat.check_version()
    where = platform.choose(config.parallel.device)
    compat.install_optimizer()
    ranks = parallel.start(config.parallel, config.model.num_layers, where, config.training.seed)
    sizes = (ranks.tensor_size, ranks.context_size, ranks.data_size, ranks.pipeline_size)
    meter = Meter(meter_device, Sites([]), Collectives(sizes, _expert_groups(ranks)))
    noting.append(meter)
    routing = routing_of(config, ranks.expert, expert_load)
    if routing is not None and fake:
        tell_routing(lambda chosen_tE: meter.state_routing(chosen_tE, routing.counts(len(chosen_tE))))
    place = f"TP {ranks.tensor} PP {ranks.pipeline} CP {ranks.context} DP {ranks.data}"
    stated = "" if routing is None else str(routing)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    layers = (
        "Transformer Engine's layers stand in: their kernels' own workspaces are not counted"
        if where.transformer_engine
        else "Megatron's local layers"
    )
    try:
        with mode, meter:
            chunks = build_chunks(config, vocab_size, where)
            initialise(chunks, config.model, vocab_size, config.training.seed, ranks)
            inputs = Inputs(
                checkpoint=None,
                vocab_size=vocab_size,
                rows=Rows(row_at, None),
                scores=InventedScores(config.data.seq_length),  # type: ignore[arg-type]
                pretrained=None,
            )
            unknown = train.Machine(parameters=0, peak_flops=None, facts={})  # nothing is recorded
            trainer = train.Trainer(config, train.Built(where, ranks, inputs, chunks, unknown))
            _label(trainer, meter)
    except Exception as error:
        return Rehearsed(ranks.world, place, rows, layers, stated, time.perf_counter() - began, fault=_fault(error))
    done = Rehearsed(ranks.world, place, rows, layers, stated, time.perf_counter() - began)
    for window in windows:
        done.steps.append(_step(trainer, meter, mode, row_at, window, chunks))
        if done.steps[-1].fault is not None:
            break
    return done


def _expert_groups(ranks: parallel.Ranks) -> dict[str, str]:
    """Name the groups that experts are spread over: their ranks may be those of the data- or context-parallel ones."""
    if ranks.expert_size == 1:
        return {}
    both = "TP x EP" if ranks.tensor_size > 1 else "EP"
    return {ranks.expert_group.group_name: "EP", ranks.expert_tensor_group.group_name: both}


def without_files(config: Config) -> Config:
    """Return the configuration of a run that reads no data and no checkpoint, writes none, and does not validate."""
    checkpoint = replace(
        config.checkpoint, save=None, load=None, init_from=None, init_optimizer=False, dump_trajectory=None
    )
    logging = replace(config.logging, tensorboard=False, wandb_project=None)
    return replace(config, checkpoint=checkpoint, logging=logging, training=replace(config.training, eval_interval=0))


def _label(trainer: train.Trainer, meter: Meter) -> None:
    """Say which storages are weights, gradients and optimizer state; the latter exists after a first step."""
    for chunk in trainer.model:
        meter.sites.name(chunk)
        for parameter in chunk.parameters():
            meter.ledger.label(parameter.untyped_storage(), Part.WEIGHTS)
            meter.ledger.label(parameter.main_grad.untyped_storage(), Part.GRADIENTS)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    meter.ledger.label_rest(Part.OPTIMIZER, (Part.WEIGHTS, Part.GRADIENTS, Part.EXCHANGE))


class _NoCheckpoints:
    """Stands for the trainer's Checkpointer in a step."""

    threads = 0

    def __init__(self, *unused: Any) -> None:
        return None

    def take_stall(self) -> float:
        """Return the seconds that saving held up training."""
        return 0.0

    def standing(self) -> tuple[bool, bool]:
        """Say that nothing is being written and nothing is due."""
        return False, False


class _Ready:
    """Has the batches of a step, as the trainer's Prefetch has."""

    def __init__(self, batches: StepBatches) -> None:
        self._batches = batches

    def take(self, step: int) -> StepBatches:
        """Return them."""
        return self._batches


def _step(
    trainer: train.Trainer, meter: Meter, mode: Any, row_at: RowAt, window: int, chunks: Sequence[PackedGPT]
) -> Step:
    """Do one step of the trainer with this window, and read the meter."""
    began = time.perf_counter()
    batches = trainer.batches.train(row_at, 0, trainer.config.data.first_sample, window)
    ready: Any = _Ready(batches)
    if meter.device == "cpu":  # where what the host has made is on the device already
        for tensor in _tensors(batches):
            meter.ledger.add(tensor.untyped_storage(), Part.OTHER, "batches")
    held = {part.value: size for part, size in meter.ledger.bytes.items()}
    fault = None
    gc.collect()
    gc.disable()  # so that what only a search for circles would free counts until the step's end, whenever one came
    with mode, meter, meter.sites:
        meter.begin()
        try:
            trainer._launch(ready, StopRequest())
        except Exception as error:
            fault = _fault(error)
    before = meter.ledger.total
    gc.enable()
    gc.collect()
    layers = sum(len(chunk.decoder.layers) for chunk in chunks)
    return Step(
        window=window,
        segments=sum(batch.layout.segments for batch in batches.train),
        microbatches=len(batches.train),
        memory={part.value: size for part, size in meter.ledger.peak.parts.items()},
        held=held,
        circles=before - meter.ledger.total,
        peak_at=meter.ledger.peak.site,
        living=meter.ledger.peak.living,
        flops=dict(meter.flops),
        collectives={name: dataclasses.asdict(calls) for name, calls in meter.collectives.groups.items()},
        launches=dict(meter.launches),
        layers=layers * len(batches.train),
        waits=[Wait(what, line, count) for (what, line), count in meter.waits.most_common()],
        unpriced=dict(meter.unpriced),
        fault=fault,
        seconds=time.perf_counter() - began,
    )


def _tensors(batches: StepBatches) -> Iterator[Tensor]:
    """Yield what `PackedBatch.to` would move, with no two of one storage."""
    for batch in batches.train:
        yield from (value for value in vars(batch).values() if isinstance(value, Tensor))


def _fault(error: BaseException) -> Fault:
    """Describe an error as the trainer would meet it, by its innermost line in this package or in Megatron."""
    from megatron_ext.run.rehearsal.sites import shown

    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{file}:{frame.lineno}" for frame in frames if (file := shown(frame.filename)) is not None]
    text = "".join(traceback.format_exception(error))
    return Fault(f"{type(error).__name__}: {error}".strip().splitlines()[0], lines[-1] if lines else "", text)
