"""Search the layouts that fit on a number of GPUs, rank them by the time of the whole run, and describe the result.

A layout is legal if `config.checks` accepts it. It fits if its memory (`planning.memory`) leaves `HEADROOM` of the
GPU free. Its time is the estimate of `planning.step_time`, averaged over the windows of the run's schedule.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, product
from math import gcd
from typing import Any, NamedTuple

from megatron_ext.checkpoint.parameters import count_active_parameters
from megatron_ext.config import Config
from megatron_ext.config.checks import mistakes
from megatron_ext.config.pipeline import balance, write_layout
from megatron_ext.planning.flops import utilisation
from megatron_ext.planning.memory import HEADROOM, estimate, static_memory
from megatron_ext.planning.run_plan import gibibytes
from megatron_ext.planning.step_time import Machine, StepTime, step_time

MLP_BLOCK_TOKENS = 16384  # enough for products to run at full speed
MOMENTS = 12  # number of schedule points whose windows are timed
MOST_REASONS = 8
LEAST_SHARE = 1024  # tokens of a row on each context-parallel rank
# all activations kept
_KEPT: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_modules": (),
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "mlp_block_tokens": None,
    "offload_layer_inputs": False,
}


@dataclass(frozen=True)
class Layout:
    """One layout of a run: bytes of the fullest GPU, mean seconds of a step over the schedule, and the last step."""

    config: Config
    gpus: int
    memory: int
    seconds: float
    last: StepTime

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
        if chunk:
            words.append(f"chunks of {chunk}")
        if parallel.pipeline_model_parallel_layout:
            words.append(parallel.pipeline_model_parallel_layout)
        words.append(f"micro-batch {self.config.data.micro_batch_size}")
        if parallel.recompute_granularity == "full":
            words.append("recompute")
        elif parallel.recompute_granularity:
            words.append(f"recompute {' '.join(parallel.recomputed_modules)}")
        if parallel.mlp_block_tokens:
            words.append("MLP in blocks")
        if parallel.offload_layer_inputs:
            words.append("inputs on the host")
        return ", ".join(words)


def layout_of(config: Config, machine: Machine) -> Layout:
    """Estimate the memory and time of a configuration's layout."""
    memory = estimate(config, machine.gpus, machine.vocab_size).total
    last_step = step_time(config, last_window(config), machine)
    return Layout(config, machine.gpus, memory, mean_seconds(config, machine), last_step)


def mean_seconds(config: Config, machine: Machine) -> float:
    """Return the seconds of a step, averaged over the windows of the run."""
    moments = Counter(windows(config)).items()
    return sum(step_time(config, window, machine).total * times for window, times in moments) / MOMENTS


def longest_step(config: Config, machine: Machine) -> float:
    """Return the seconds of a step whose rows are one document each, at the largest window."""
    return step_time(config, max(windows(config)), replace(machine, rows=None)).total


class SearchResult(NamedTuple):
    """The result of a search."""

    best: list[Layout]  # legal layouts that fit, the fastest first; each keeps as many of its activations as fit
    tried: int  # number of layouts considered
    refused: Counter[str]  # the reasons other than memory, each with the number of layouts that it excludes
    too_large: list[Layout]  # the legal layouts that would be faster, but whose memory is too large
    overfull: int  # number of layouts whose weights, gradients and optimizer alone are too large
    smallest: int | None  # bytes of the smallest layout, if memory excludes any; exact where none fits


def search(config: Config, machine: Machine, top: int = 10) -> SearchResult:
    """Find the fastest layouts of a run, at most `top` of them; the run's own layout is tried too, if it is legal."""
    refused = Counter[str]()
    number = count()
    queue: list[tuple[float, int, Config]] = []
    overfull: list[tuple[int, int, Config]] = []

    def add(candidate: Config) -> None:
        heappush(queue, (mean_seconds(candidate, machine), next(number), candidate))

    for candidate in candidates(config, machine, refused):
        static = static_memory(candidate, machine.gpus, machine.vocab_size)
        if static > usable(machine):
            overfull.append((static, next(number), candidate))
        else:
            add(candidate)
    if next(mistakes(config, machine.gpus), None) is None:
        add(config)
    tried = refused.total() + len(overfull)

    best: list[Layout] = []
    too_large: list[Layout] = []
    while queue and len(best) < top:
        _, _, candidate = heappop(queue)
        tried += 1
        reasons = dict.fromkeys(mistakes(candidate, machine.gpus), 1)
        if reasons:
            refused.update(reasons)
            continue
        layout = layout_of(candidate, machine)
        if fits(layout, machine):
            if layout.name not in [faster.name for faster in best]:
                best.append(layout)
            continue
        if not best:
            too_large.append(layout)
        for lighter in with_less_kept(candidate):  # tried only if keeping more does not fit
            add(lighter)
    smallest = min((layout.memory for layout in too_large), default=None)
    if not best:
        for static, _, candidate in sorted(overfull):
            if smallest is not None and smallest <= static:
                break
            if next(mistakes(candidate, machine.gpus), None) is not None:
                continue
            needs = [estimate(variant, machine.gpus, machine.vocab_size).total for variant in variants(candidate)]
            if smallest is not None:
                needs.append(smallest)
            smallest = min(needs)
    return SearchResult(best, tried + len(queue), refused, too_large, len(overfull), smallest)


def fits(layout: Layout, machine: Machine) -> bool:
    """Return whether a layout's memory leaves `HEADROOM` of the GPU free."""
    return layout.memory <= usable(machine)


def usable(machine: Machine) -> float:
    """Return the bytes of a GPU without `HEADROOM`."""
    return (1 - HEADROOM) * machine.kind.memory * 2**30


def last_window(config: Config) -> int:
    """Return the window of the run's last step."""
    return min(config.window_schedule().window_at(config.training.train_iters - 1), config.data.seq_length)


def windows(config: Config) -> list[int]:
    """Return the windows at evenly spaced moments of the run."""
    schedule = config.window_schedule()
    steps = config.training.train_iters
    return [min(schedule.window_at(int((k + 0.5) / MOMENTS * steps)), config.data.seq_length) for k in range(MOMENTS)]


def candidates(config: Config, machine: Machine, refused: Counter[str]) -> Iterator[Config]:
    """Yield the layouts that divide heads, experts, rows and GPUs evenly, with all activations kept.

    Layers are divided as `divisions` says. Tensor parallelism stays inside a node. `refused` counts the excluded splits
    by reason.
    """
    model = config.model
    data = config.data
    gpus = machine.gpus
    sharded = config.optimizer.optimizer == "adam"
    sizes = [model.num_query_groups, model.num_attention_heads, model.moe_shared_expert_intermediate_size or 0]
    if model.num_experts:
        sizes.append(model.expert_width)
    if model.expert_layers < model.num_layers:
        sizes.append(model.ffn_hidden_size)
    tensor = [tp for tp in _divisors(machine.kind.node) if all(size % tp == 0 for size in sizes)]
    pipeline = [pp for pp in _divisors(gpus) if pp <= model.num_layers]
    shared = _divisors(gcd(gpus, data.seq_length))
    context = [cp for cp in shared if cp == 1 or data.seq_length // cp >= LEAST_SHARE]
    for tp, pp, cp in product(tensor, pipeline, context):
        if gpus % (tp * pp * cp):
            continue
        replicas = gpus // (tp * pp * cp)
        if data.global_batch_size % replicas:
            rows_text = f"global_batch_size: got {data.global_batch_size:,}"
            refused[f"{rows_text}, needs a multiple of the {replicas:,} data-parallel replicas"] += 1
            continue
        rows = data.global_batch_size // replicas
        stages = list(divisions(model.num_layers, pp, interleaved=rows % pp == 0))
        expert = [ep for ep in _divisors(model.num_experts or 1) if replicas * cp % ep == 0]
        for micro, division, ep in product([m for m in (1, 2, 4, 8) if rows % m == 0], stages, expert):
            if rows // micro < pp:
                refused["pipeline_model_parallel_size: more stages than micro-batches leave most stages idle"] += 1
                continue
            layout: dict[str, Any] = {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                **division,
                "context_parallel_size": cp,
                "expert_model_parallel_size": ep,
                "sequence_parallel": tp > 1,
                "use_distributed_optimizer": sharded,
                "overlap_grad_reduce": True,
                "overlap_param_gather": sharded,
                **_KEPT,
            }
            yield replace(
                config, parallel=replace(config.parallel, **layout), data=replace(data, micro_batch_size=micro)
            )


def divisions(num_layers: int, pp: int, *, interleaved: bool) -> Iterator[dict[str, Any]]:
    """Yield the divisions of layers over `pp` pipeline stages: equal ones, or if there are none, balanced layouts."""
    equal: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": None, "pipeline_model_parallel_layout": None}
    if num_layers % pp == 0:
        yield equal
        if interleaved and pp > 1:
            for size in _divisors(num_layers // pp)[:-1]:
                yield equal | {"num_layers_per_virtual_pipeline_stage": size}
        return
    # with chunks of at most `size` layers, the fewest chunks of a stage; embedding and output layer are two layers
    largest = -(-(num_layers + 2) // pp)
    numbers = {-(-(num_layers + 2) // (pp * size)) for size in range(1, largest + 1)}
    for number in sorted(numbers if interleaved else {1}):
        if pp * number <= num_layers + 2:
            yield equal | {"pipeline_model_parallel_layout": write_layout(balance(num_layers, pp * number))}


def variants(config: Config) -> Iterator[Config]:
    """Yield a layout and all those that keep less."""
    yield config
    for lighter in with_less_kept(config):
        yield from variants(lighter)


def with_less_kept(config: Config) -> Iterator[Config]:
    """Yield variants of a layout that keep less.

    A layout that keeps all activations has variants with partial or full recomputation, or with the MLP in blocks. One
    that recomputes all layers has a variant with their inputs on the host.
    """
    parallel = config.parallel
    fp8 = config.training.fp8_format is not None
    choices: list[dict[str, Any]] = []
    if parallel.recompute_granularity == "full":
        if not (parallel.offload_layer_inputs or fp8):
            choices = [{"offload_layer_inputs": True}]
    elif parallel.recompute_granularity is None and parallel.mlp_block_tokens is None:
        choices = [
            {"recompute_granularity": "selective", "recompute_modules": modules}
            for modules in (("core_attn",), ("layernorm",), ("mlp",), ("mlp", "layernorm"))
        ]
        choices += [{"recompute_granularity": "full"}]
        if not (config.model.num_experts or fp8 or parallel.tp_comm_overlap):
            blocks = {"mlp_block_tokens": MLP_BLOCK_TOKENS}
            choices += [blocks, choices[1] | blocks, choices[4] | blocks]
    for choice in choices:
        yield replace(config, parallel=replace(parallel, **choice))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def describe(result: SearchResult, config: Config, machine: Machine) -> Iterator[str]:
    """Yield the lines for `result`, the result of a search of `config`."""
    if not result.best:
        yield from _refusals(result, machine)
        yield f"  {_own(config, machine)}"
        return
    gpus = machine.gpus
    gpu = machine.kind
    best = result.best[0]
    kernel = machine.speeds.reached[gpu.family].kernel(config.parallel.attention_backend)
    yield f"{result.tried:,} layouts on {gpus:,} {machine.gpu} of {gpu.memory:.0f} GiB; the fastest that fit:"
    heads = f"{'s/step':>8} {'tokens/s/GPU':>12} {'MFU':>6} {'memory':>10} {'hours':>8} {'cost':>11}  bound by"
    yield f"{'':>3} {'layout':58} {heads}"
    for number, layout in enumerate(result.best, 1):
        yield _row(f"{number}", layout, machine)
    yield _own(config, machine)
    yield (
        f"s/step, tokens/s and MFU at the last window ({last_window(config):,} tokens), with the share of {kernel}; "
        "hours and cost of the whole run; own: the configuration's layout"
    )
    parts = sorted(vars(best.last).items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {seconds / best.last.total:.0%}" for name, seconds in parts if seconds > 0)
    yield f"\nthe first layout, at the last window: {shares}"
    saved = 1 - best.seconds / step_time(best.config, max(windows(config)), machine).total
    if saved > 0:
        yield f"the window schedule saves {saved:.1%} of the time of a constant window"


def _own(config: Config, machine: Machine) -> str:
    """Describe the configuration's layout: its row, or the reason why it is not possible."""
    wrong = next(mistakes(config, machine.gpus), None)
    if wrong is not None:
        return f"own {wrong}"
    layout = layout_of(config, machine)
    if not fits(layout, machine):
        return f"own {layout.name}: memory; it needs {gibibytes(layout.memory)}, {_available(machine)}"
    return _row("own", layout, machine)


def _available(machine: Machine) -> str:
    memory = machine.kind.memory
    return f"available are {memory * (1 - HEADROOM):.1f} GiB ({memory:.0f} GiB less {HEADROOM:.0%} of headroom)"


def _row(name: str, layout: Layout, machine: Machine) -> str:
    seconds = layout.last.total
    gpus = machine.gpus
    config = layout.config
    hours = layout.seconds * config.training.train_iters / 3600
    tokens = config.data.global_batch_size * config.data.seq_length
    mfu = utilisation(  # as in metrics.jsonl
        config.model,
        count_active_parameters(config.model, machine.vocab_size),
        tokens,
        machine.attention(config, last_window(config)).context,
        seconds=seconds,
        peak=gpus * machine.kind.peak_flops(fp8=config.training.fp8_format is not None),
    )
    bound, _ = max(vars(layout.last).items(), key=lambda part: part[1])
    return (
        f"{name:>3} {layout.name:58} {seconds:8.2f} {tokens / seconds / gpus:12,.0f} {mfu:6.1%} "
        f"{gibibytes(layout.memory):>10} {hours:8,.1f} "
        f"{f'${hours * gpus * machine.kind.hour:,.0f}':>11}  {bound}"
    )


def _refusals(result: SearchResult, machine: Machine) -> Iterator[str]:
    """Yield why no layout is possible: each reason with the number of layouts that it excludes."""
    yield f"None of {result.tried:,} layouts on {machine.gpus:,} {machine.gpu} is possible:"
    reasons = result.refused.most_common(MOST_REASONS)
    for reason, number in reasons:
        yield f"  {number:,} layouts: {reason}"
    if len(result.refused) > len(reasons):
        yield f"  and {len(result.refused) - len(reasons):,} more reasons"
    if result.smallest is not None:
        number = len(result.too_large) + result.overfull
        yield f"  {number:,} layouts: memory; the smallest needs {gibibytes(result.smallest)}, {_available(machine)}"
