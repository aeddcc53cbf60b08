"""Search the layouts that fit on a number of GPUs, and rank them by the time of the whole run.

A layout is legal if `config.checks` accepts it. It fits if its memory (`planning.memory`) leaves `HEADROOM` of the
GPU free. Its time is that of `planning.step_time`, averaged over the windows of the run's schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, product
from typing import Any

from megatron_ext.config import Config
from megatron_ext.config.checks import mistakes
from megatron_ext.planning.memory import HEADROOM, estimate
from megatron_ext.planning.sampled_rows import SampledRows
from megatron_ext.planning.step_time import Gpu, Speeds, StepTime, Work, step_time, work_of

MOMENTS = 12  # number of schedule points whose windows are timed
# all activations kept
_KEPT: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_modules": (),
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "cpu_offloading": False,
    "cpu_offloading_num_layers": None,
}


@dataclass(frozen=True)
class Layout:
    """One layout, its memory and its time.

    Attributes:
        config: the run with this layout.
        gpus: number of GPUs.
        memory: estimated bytes of the fullest GPU.
        seconds: mean time of a step over the schedule.
        last: time breakdown of the run's last step.
    """

    config: Config
    gpus: int
    memory: int
    seconds: float
    last: StepTime | None = None

    @property
    def hours(self) -> float:
        """Hours of the whole run."""
        return self.seconds * self.config.training.train_iters / 3600

    @property
    def name(self) -> str:
        """A one-line description."""
        parallel = self.config.parallel
        sizes = {
            "TP": parallel.tensor_model_parallel_size,
            "PP": parallel.pipeline_model_parallel_size,
            "CP": parallel.context_parallel_size,
            "DP": self.config.data_parallel_size(self.gpus),
        }
        if self.config.model.num_experts is not None:
            sizes["EP"] = parallel.expert_model_parallel_size
        chunk = parallel.num_layers_per_virtual_pipeline_stage
        words = [f"{kind} {size}" for kind, size in sizes.items()]
        words += [f"chunks of {chunk}"] if chunk else []
        words += [f"micro-batch {self.config.data.micro_batch_size}"]
        if parallel.recompute_granularity:
            whole = parallel.recompute_granularity == "full"
            words += ["recompute" if whole else f"recompute {' '.join(parallel.recomputed_modules)}"]
        words += [f"offload {parallel.cpu_offloading_num_layers}"] if parallel.cpu_offloading else []
        return ", ".join(words)


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        best: legal layouts that fit, the fastest first; each keeps as many of its activations as fit.
        larger: of the legal layouts that are faster than the best but do not fit, the one that needs the least memory.
        tried: number of layouts considered.
        refused: if nothing fits, the reasons other than memory, each with the number of layouts that it excludes.
        too_large: if nothing fits, the number of legal layouts whose memory is too large.
    """

    best: list[Layout]
    larger: Layout | None
    tried: int
    refused: Counter[str] = field(default_factory=Counter)
    too_large: int = 0


def search(
    config: Config,
    gpus: int,
    gpu: str,
    vocab_size: int,
    speeds: Speeds,
    *,
    rows: SampledRows | None = None,
    top: int = 10,
    offload: bool = True,
) -> Found:
    """Find the fastest layouts of a run on `gpus` GPUs of one kind, at most `top` of them.

    Args:
        config: the run; its own layout is ignored.
        gpus: number of GPUs.
        gpu: their kind, a name of `speeds`.
        vocab_size: token ids.
        speeds: GPUs and their efficiencies.
        rows: sampled rows, for the cost of attention; None counts each row as one document.
        top: number of layouts to find.
        offload: whether layouts may move activations to the host's memory.

    Raises:
        UserError: an unknown GPU.
    """
    card, moments, refused = speeds.gpu(gpu), Counter(windows(config)), Counter[str]()
    room, tried, number = (1 - HEADROOM) * card.memory * 2**30, 0, count()
    # priority queue: seconds, number, whether all activations are kept, layout, whether the seconds cover all moments
    queue: list[tuple[float, int, bool, Layout, bool]] = []

    def add(candidate: Config, *, plain: bool, at: Mapping[int, int]) -> None:
        works: Counter[Work] = Counter()  # windows longer than all documents are the same work
        for window, times in at.items():
            works[work_of(candidate, gpus, gpu, vocab_size, window, rows)] += times
        layout = _layout(candidate, gpus, works, speeds)
        heappush(queue, (layout.seconds, next(number), plain, layout, len(at) == len(moments)))

    # a step at the smallest window is a lower bound on the run's time, which is sufficient for most layouts
    first = {min(moments): 1}
    for candidate in candidates(config, gpus, card, refused):
        add(candidate, plain=True, at=first)
    uneven = refused.total()
    best: list[Layout] = []
    larger: list[Layout] = []
    illegal: list[Layout] = []
    while queue and len(best) < top:
        _, _, plain, layout, timed = heappop(queue)
        if not timed:
            add(layout.config, plain=plain, at=moments)
            continue
        tried += 1
        measured = replace(layout, memory=estimate(layout.config, gpus, vocab_size).total)
        if measured.memory <= room:
            (best if _is_legal(measured) else illegal).append(measured)
            continue
        if not best:
            larger.append(measured)
        if plain:  # keeping fewer activations only adds time: tried only if keeping all does not fit
            for lighter in with_less_kept(layout.config, offload=offload):
                add(lighter, plain=False, at=first)
    larger.sort(key=lambda layout: layout.memory)
    tried += len(queue)
    if best:
        ended = [
            replace(one, last=step_time(work_of(one.config, gpus, gpu, vocab_size, last_window(config), rows), speeds))
            for one in best
        ]
        return Found(ended, next(filter(_is_legal, larger), None), tried)
    legal = []
    for layout in (*larger, *illegal):
        reasons = set(mistakes(layout.config, gpus))
        refused.update(reasons)
        legal += [] if reasons else [layout]
    return Found([], legal[0] if legal else None, tried + uneven, refused, len(legal))


def _is_legal(layout: Layout) -> bool:
    return next(mistakes(layout.config, layout.gpus), None) is None


def last_window(config: Config) -> int:
    """Return the window of the run's last step."""
    return min(config.window_schedule().window_at(config.training.train_iters - 1), config.data.seq_length)


def windows(config: Config) -> list[int]:
    """Return the windows at evenly spaced moments of the run."""
    schedule, steps = config.window_schedule(), config.training.train_iters
    return [min(schedule.window_at(int((k + 0.5) / MOMENTS * steps)), config.data.seq_length) for k in range(MOMENTS)]


def _layout(config: Config, gpus: int, works: Mapping[Work, int], speeds: Speeds) -> Layout:
    """Return a layout with the mean time of its steps, given the number of steps of each kind."""
    seconds = sum(step_time(work, speeds).total * count for work, count in works.items()) / sum(works.values())
    return Layout(config, gpus, memory=0, seconds=seconds)


def candidates(config: Config, gpus: int, card: Gpu, refused: Counter[str] | None = None) -> Iterator[Config]:
    """Yield the layouts that divide heads, experts, layers, rows and GPUs evenly, with all activations kept.

    Tensor parallelism stays inside a node. `refused` counts the excluded splits by reason.
    """
    refused = Counter() if refused is None else refused
    model, data = config.model, config.data
    cut = [model.num_query_groups, model.num_attention_heads, *([model.expert_width] if model.num_experts else [])]
    tensor = [tp for tp in _divisors(card.node) if all(number % tp == 0 for number in cut)]
    pipeline = _divisors(model.num_layers)
    context = [2**k for k in range(12) if k == 0 or (data.seq_length % 2**k == 0 and data.seq_length // 2**k >= 1024)]
    for tp, pp, cp in product(tensor, pipeline, context):
        if gpus % (tp * pp * cp):
            continue
        replicas = gpus // (tp * pp * cp)
        if data.global_batch_size % replicas:
            rows_text = f"global_batch_size: got {data.global_batch_size:,}"
            refused[f"{rows_text}, needs a multiple of the {replicas:,} data-parallel replicas"] += 1
            continue
        rows = data.global_batch_size // replicas
        chunks = [None, *(c for c in _divisors(model.num_layers // pp)[:-1] if rows % pp == 0)] if pp > 1 else [None]
        expert = [ep for ep in _divisors(model.num_experts or 1) if replicas * cp % ep == 0]
        for micro, chunk, ep in product([m for m in (1, 2, 4, 8) if rows % m == 0], chunks, expert):
            if rows // micro < pp:
                refused["pipeline_model_parallel_size: more stages than micro-batches leave most stages idle"] += 1
                continue
            layout: dict[str, Any] = {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "num_layers_per_virtual_pipeline_stage": chunk,
                "context_parallel_size": cp,
                "expert_model_parallel_size": ep,
                "sequence_parallel": tp > 1,
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                **_KEPT,
            }
            yield replace(
                config, parallel=replace(config.parallel, **layout), data=replace(data, micro_batch_size=micro)
            )


def with_less_kept(config: Config, *, offload: bool = True) -> Iterator[Config]:
    """Yield variants of a layout with partial or full recomputation, or with activations moved to the host's memory.

    Offloading, if `offload` allows it, requires no pipeline and no experts; only a few layer counts are tried.
    """
    layers, parallel = config.model.num_layers, config.parallel
    choices: list[dict[str, Any]] = [
        {"recompute_granularity": "selective", "recompute_modules": modules}
        for modules in (("core_attn",), ("layernorm",), ("mlp",), ("layernorm", "mlp"))
    ]
    choices.append({"recompute_granularity": "full"})
    if offload and parallel.pipeline_model_parallel_size == 1 and config.model.num_experts is None:
        numbers = sorted({layers // 4, layers // 2, layers - 1} - {0})
        choices += [{"cpu_offloading": True, "cpu_offloading_num_layers": number} for number in numbers]
    for choice in choices:
        yield replace(config, parallel=replace(parallel, **_KEPT | choice))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
