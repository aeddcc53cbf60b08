"""Rehearse one rank: the training run's own model, optimizer and step, one measured step per window.

join fake process groups -> build the model -> an optimizer step, to allocate its state -> per window: a measured step

All micro-batches cost the same, so a step of many is not run in full: the difference between a step of few
micro-batches and one of a few more is the cost of the additional ones, and is extrapolated to the rest.

    micro-batches      1 2          3 4 5 ... 64
                       measured     each counted as the second
"""

import functools
import gc
import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_ext.attention import adapters
from megatron_ext.config import Config
from megatron_ext.context_parallel.choice import cp_options
from megatron_ext.data.text.tokenizer import vocabulary_size
from megatron_ext.engine import compat, parallel, platform
from megatron_ext.engine.model import build_chunks
from megatron_ext.engine.optimizer import build_optimizer, wrap
from megatron_ext.engine.step import Stepper
from megatron_ext.engine.weights import initialise
from megatron_ext.rehearsal import cuda_mock
from megatron_ext.rehearsal.memory import Part, shown
from megatron_ext.rehearsal.meter import Meter, segment_pairs
from megatron_ext.rehearsal.rows import rows_of
from megatron_ext.run.batches import BatchMaker
from megatron_ext.run.inputs import RowAt


@dataclass(frozen=True)
class Fault:
    """The failure of a step."""

    error: str
    line: str  # in this package or Megatron
    traceback: str


@dataclass(frozen=True)
class Step:
    """The measurements of one step of one rank; if the step failed, the measurements until then."""

    window: int
    segments: int  # of the measured micro-batches
    microbatches: int  # of this rank
    measured: int  # of these; the rest is extrapolated
    memory: dict[Part, int]  # bytes of each part at the peak
    pinned: int  # bytes of pinned host memory at its peak
    cycles: int  # bytes that only Python's garbage collector would free, because of reference cycles
    peak_at: str
    flops: dict[str, int]  # by operator
    collectives: dict[str, dict[str, int]]  # by group: `count` and `sent_bytes`
    host_syncs: dict[str, int]  # by cause and line
    fault: Fault | None


@dataclass(frozen=True)
class Rehearsed:
    """The rehearsal of one rank."""

    rank: int
    place: str  # such as "TP 0 PP 1 CP 0 DP 3"
    rows: str  # their description
    steps: list[Step] = field(default_factory=list)  # one per window, until one fails
    fault: Fault | None = None  # the failure to build the model


def rehearse(config: Config, windows: Sequence[int], documents: str | None, *, fake: bool) -> Rehearsed:
    """Rehearse this process's rank under each window, in tokens.

    Args:
        config: checked for the number of processes.
        documents: as for `rows_of`.
        fake: with the mock of CUDA installed; otherwise it computes on real tensors of the CPU.
    """
    vocab_size = vocabulary_size(config.model.vocab_size, config.data.tokenizer_model)
    row_at, rows = rows_of(config, vocab_size, documents)
    config = replace(config, checkpoint=replace(config.checkpoint, dump_trajectory=None))  # nothing would free its rows
    device_platform = platform.choose(config.parallel.device)
    ranks = parallel.start(config.parallel, config.model.num_layers, device_platform, config.training.seed)
    named: dict[str, str] = {}
    if ranks.expert_size > 1:  # data- or context-parallel groups may have the same ranks
        named[ranks.expert_group.group_name] = "EP"
        named[ranks.expert_tensor_group.group_name] = "TP x EP" if ranks.tensor_size > 1 else "EP"
    sizes = (ranks.tensor_size, ranks.context_size, ranks.data_size, ranks.pipeline_size)
    meter = Meter("cuda" if fake else "cpu", sizes, named)
    if fake:
        cuda_mock.on_sync = meter.note_sync  # type: ignore[assignment]
        count_flash_attention_4(meter)
        choices = config.model.moe_router_topk
        compat.observe_routing(lambda chosen_tE: meter.remember(chosen_tE, in_turn(chosen_tE, choices)))
    place = f"TP {ranks.tensor} PP {ranks.pipeline} CP {ranks.context} DP {ranks.data}"
    rehearsed = Rehearsed(ranks.world, place, rows)
    try:
        with meter:
            chunks = build_chunks(config, vocab_size, device_platform)
            initialise(chunks, config.model, vocab_size, config.training.seed, ranks)
            model = wrap(chunks, config)
            optimizer = build_optimizer(model, config)
            group = parallel.context_group(config.parallel, ranks, device_platform)
            stepper = Stepper(model, optimizer, device_platform, ranks, config, group)
            allocations = meter.allocations
            for chunk in model:
                meter.sites.name(chunk)
                for parameter in chunk.parameters():
                    allocations.label(parameter.untyped_storage(), Part.WEIGHTS)
                    allocations.label(parameter.main_grad.untyped_storage(), Part.GRADIENTS)
            optimizer.step()  # allocates its state
            optimizer.zero_grad()
            allocations.label_rest(Part.OPTIMIZER, (Part.WEIGHTS, Part.GRADIENTS, Part.EXCHANGE))
    except Exception as error:
        return replace(rehearsed, fault=_fault(error))
    runner = _StepRunner(config, stepper, meter, cp_options(config, group), row_at)
    for window in windows:
        step = runner.step(window)
        rehearsed.steps.append(step)
        if step.fault is not None:
            break
    return rehearsed


def in_turn(chosen_tE: Tensor, choices: int) -> Tensor:
    """Return a routing map in which tokens choose experts in turn, so that all experts get equally many."""
    with _disable_current_modes():
        in_turn_tE = torch.zeros(chosen_tE.shape, dtype=torch.bool)
        turns = torch.arange(len(chosen_tE) * choices)
        in_turn_tE[turns // choices, turns % chosen_tE.shape[1]] = True
    return in_turn_tE


def count_flash_attention_4(meter: Meter) -> None:
    """Count the FLOPs of calls to FlashAttention 4, which torch does not dispatch as operators."""
    if adapters.flash_attn_4_missing() is not None:
        return
    from flash_attn.cute import interface

    def count(name: str, products: int) -> None:
        kernel = getattr(interface, name)
        signature = inspect.signature(kernel)

        @functools.wraps(kernel)
        def counted(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            queries, keys = (meter.known_values(arguments[f"cu_seqlens_{kind}"]) for kind in "qk")
            pairs = segment_pairs(queries, keys, arguments.get("window_size_left"))
            meter.count_attention(f"flash_attn_4::{name}", products, pairs, arguments["q"])
            return kernel(*args, **kwargs)

        setattr(interface, name, counted)

    count("_flash_attn_fwd", 2)
    count("_flash_attn_bwd", 5)


@dataclass(frozen=True)
class _StepRunner:
    """Measures steps of a built model."""

    config: Config
    stepper: Stepper
    meter: Meter
    context: Any
    row_at: RowAt

    def step(self, window: int) -> Step:
        """Measure a step: run a few of its micro-batches, and extrapolate to the others."""
        stages = self.config.parallel.pipeline_model_parallel_size
        total = self.config.microbatches(self.stepper.ranks.world_size)
        if total <= 3 * stages:
            return self.run(window, total)
        few = self.run(window, stages)
        if few.fault:
            return few
        more = self.run(window, 2 * stages)
        if more.fault:
            return more
        unmeasured = total - more.microbatches
        times = unmeasured / stages

        def grown(before: Mapping[Any, int], after: Mapping[Any, int]) -> dict[Any, int]:
            return {name: count + round(times * (count - before.get(name, 0))) for name, count in after.items()}

        waiting = unmeasured * self._batch_bytes(window)
        return replace(
            more,
            microbatches=total,
            memory=more.memory | {Part.OTHER: more.memory[Part.OTHER] + waiting},
            flops=grown(few.flops, more.flops),
            collectives={name: grown(few.collectives.get(name, {}), calls) for name, calls in more.collectives.items()},
            host_syncs=grown(few.host_syncs, more.host_syncs),
        )

    def run(self, window: int, microbatches: int) -> Step:
        meter = self.meter
        batches = self._batches(window, microbatches)
        if meter.device == "cpu":  # batches are made on the device
            for batch in batches.train:
                for tensor in chain(vars(batch).values(), *(call.borders for call in batch.attention)):
                    if isinstance(tensor, Tensor):
                        meter.allocations.add(tensor.untyped_storage(), Part.OTHER, "batches")
        fault = None
        gc.collect()
        gc.disable()  # garbage in reference cycles counts until the end of the step
        with meter:
            meter.begin()
            try:
                self.stepper.launch(batches)
            except Exception as error:
                fault = _fault(error)
        before = meter.allocations.total
        gc.enable()
        gc.collect()
        return Step(
            window=window,
            segments=sum(batch.layout.segments for batch in batches.train),
            microbatches=microbatches,
            measured=microbatches,
            memory=dict(meter.allocations.peak.parts),
            pinned=meter.pinned.peak.total,
            cycles=before - meter.allocations.total,
            peak_at=meter.allocations.peak.site,
            flops=dict(meter.flops),
            collectives={name: dict(calls) for name, calls in meter.collectives.items()},
            host_syncs=dict(meter.host_syncs.most_common()),
            fault=fault,
        )

    def _batches(self, window: int, microbatches: int) -> Any:
        data = self.config.data
        ranks = self.stepper.ranks
        rows = microbatches * data.micro_batch_size * ranks.data_size
        config = replace(self.config, data=replace(data, global_batch_size=rows))
        short_losses = np.full(data.seq_length, 2.0, dtype=np.float32)  # in place of a frozen scorer's
        maker = BatchMaker(config, ranks, self.context, lambda sample: short_losses)
        return maker.train(self.row_at, 0, data.first_sample, window)

    def _batch_bytes(self, window: int) -> int:
        """Return the bytes of a micro-batch on the device; all micro-batches of a step are moved there at its start."""
        assert self.meter.device == "cuda"  # on a CPU nothing is moved
        (batch,) = self._batches(window, 1).train
        with self.meter:
            before = self.meter.allocations.total
            batch = batch.to(self.stepper.platform.device)
            return self.meter.allocations.total - before


def _fault(error: BaseException) -> Fault:
    """Describe an error by its innermost line in this package or in Megatron."""
    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = shown(frame.filename)
        if file is not None:
            line = f"{file}:{frame.lineno}"
    text = "".join(traceback.format_exception(error))
    return Fault(f"{type(error).__name__}: {error}".strip().splitlines()[0], line, text)
