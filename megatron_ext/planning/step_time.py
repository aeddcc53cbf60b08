"""Estimate the seconds of one optimizer step: a roofline of matrix products, attention, memory traffic, collectives.

    step = micro-batches through the pipeline, with its bubble + the gradient reduction that is not overlapped
           + the optimizer + waits for batches and checkpoints
    a micro-batch on one rank = layers x (forward + backward + the recomputed part of forward) + output layer

Each term is work over speed. A speed is a GPU's peak times the efficiency that programs reach. The efficiencies are in
facts/gpus.yaml; tests/planning/test_published.py compares the estimates with published figures.

Legend: t tokens of a micro-batch on this rank, D hidden, F inside the MLP, N query heads, G key heads, H head size,
V vocabulary; tp, pp, cp the tensor-, pipeline- and context-parallel sizes. With experts: E per layer, k selected per
token, F inside one expert, ep ranks that share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked

from megatron_ext.checkpoint.hf.names import count_parameters
from megatron_ext.config import Config, ModelConfig
from megatron_ext.config.options import RecomputeModule
from megatron_ext.errors import UserError
from megatron_ext.files.yaml_file import read_typed
from megatron_ext.masks import MaskOptions
from megatron_ext.planning.attention_shapes import attention_shapes
from megatron_ext.planning.memory import layer_bytes
from megatron_ext.planning.sampled_rows import SampledRows

FACTS = Path(__file__).parent / "facts"
TILE = 128  # attention kernels compute whole tiles of queries and keys
_STRICT = ConfigDict(extra="forbid", frozen=True)
Positive = Annotated[float, Gt(0)]


@checked(config=_STRICT)
class Gpu:
    """The peaks of a GPU and its links; facts/gpus.yaml has the units."""

    bf16: Positive
    fp8: Positive | None
    memory: Positive
    bandwidth: Positive
    nvlink: Positive
    network: Positive
    host: Positive
    node: Annotated[int, Gt(0)]
    family: str
    hour: Positive


@checked(config=_STRICT)
class Reached:
    """The efficiency (share of a GPU's peak) of matrix products and attention kernels."""

    matmul: Positive
    flash2: Positive
    cudnn: Positive


@checked(config=_STRICT)
class Host:
    """Throughput of one process on the host: tokens prepared per second, GB/s of checkpoint writes."""

    tokens: Positive
    storage: Positive


@checked(config=_STRICT)
class Speeds:
    """The content of facts/gpus.yaml."""

    gpus: dict[str, Gpu]
    reached: dict[str, Reached]
    fp8_speedup: Positive
    narrow_heads: Positive
    bandwidth: Positive
    links: Positive
    uneven_experts: Annotated[float, Ge(1)]
    host: Host

    def gpu(self, name: str) -> Gpu:
        """Return the GPU of this name.

        Raises:
            UserError: it is not in the file.
        """
        if name not in self.gpus:
            raise UserError(f"gpu: got {name!r}, needs one of {', '.join(self.gpus)}; add it to {FACTS / 'gpus.yaml'}")
        return self.gpus[name]

    def of_device(self, name: str) -> Gpu | None:
        """Return the GPU for a driver's device name, such as "NVIDIA A100-SXM4-40GB"; None if it is not in the file."""
        named = [one for one in self.gpus if all(part in name for part in one.split("-"))]
        return self.gpus[max(named, key=len)] if named else None


@cache
def read_speeds(path: Path = FACTS / "gpus.yaml") -> Speeds:
    """Read a file of GPUs and efficiencies.

    Raises:
        UserError: a field is missing, unknown or not positive.
    """
    return read_typed(path, Speeds)


@checked(config=_STRICT)
class Shapes:
    """The shapes of a model that determine its time.

    Attributes:
        layers, hidden, heads, groups, vocabulary, head_size: as in the model's configuration.
        ffn: F, inside the MLP or inside one expert.
        gated: the MLP, or an expert, has three matrices.
        experts: E per layer, `chosen` of them per token; 0: one MLP for all tokens.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    gated: bool = True
    head_size: int | None = None
    experts: int = 0
    chosen: int = 1

    @classmethod
    def of(cls, model: ModelConfig, vocab_size: int) -> Shapes:
        """Derive the shapes from a model's configuration."""
        return cls(
            layers=model.num_layers,
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size if model.num_experts is None else model.expert_width,
            heads=model.num_attention_heads,
            groups=model.num_query_groups,
            vocabulary=vocab_size,
            gated=model.block != "phi",
            head_size=model.head_size,
            experts=model.num_experts or 0,
            chosen=1 if model.num_experts is None else model.moe_router_topk,
        )

    @property
    def width(self) -> int:
        """The head size."""
        return self.head_size or self.hidden // self.heads

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's MLP that a token uses: with experts, the router and k experts."""
        return self.everyones_mlp_parameters + self.chosen_parameters

    @property
    def everyones_mlp_parameters(self) -> int:
        """Parameters of one layer's MLP that every token uses: all of it, or only the router."""
        return self.hidden * self.experts if self.experts else self._block_parameters

    @property
    def chosen_parameters(self) -> int:
        """Parameters of the experts of one layer that a token uses."""
        return self.chosen * self._block_parameters if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * self._block_parameters

    @property
    def _block_parameters(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def everyones_parameters(self) -> int:
        """Parameters of one layer's matrices that every token uses."""
        return 2 * self.hidden * self.width * (self.heads + self.groups) + self.everyones_mlp_parameters

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices that a token uses."""
        return self.everyones_parameters + self.chosen_parameters


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one optimizer step.

    Attributes:
        shapes: of the model.
        gpu: its name in facts/gpus.yaml; `world` GPUs are used.
        row: L, tokens of a row; `rows` rows per step (0: one micro-batch on each replica), `micro` at a time.
        context: keys that a token sees, averaged over tokens and layers; None for a causal row, L / 2.
        segment: mean length of attention segments, for the tiles; None for one segment per row.
        exchanged: keys and values received by the busiest context-parallel rank, as a fraction of all other ranks'
            keys.
        imbalance: attention of the slowest rank over the mean.
        tp, pp, chunks, cp: parallel sizes; model chunks of a pipeline stage.
        ep: number of data- and context-parallel ranks that share the experts.
        fp8: whether products use FP8; attention and the output layer stay in bf16.
        kernel: attention kernel.
        recompute: the fraction of the layers with full recomputation.
        recompute_modules: the recomputed modules of each layer.
        offloaded: bytes of a micro-batch's activations that are offloaded to the host until backward.
        prepared: tokens that a process reads and lays out for a step, while the previous step runs.
        saved: bytes of a checkpoint that a process writes, `save_every` steps apart (0: never); `async_save`: while
            training continues.
    """

    shapes: Shapes
    gpu: str
    world: int
    row: int
    rows: int = 0
    micro: int = 1
    context: float | None = None
    segment: float | None = None
    exchanged: float = 1.0
    imbalance: float = 1.0
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    ep: int = 1
    fp8: bool = False
    kernel: Literal["flash2", "cudnn"] = "flash2"
    recompute: float = 0.0
    recompute_modules: tuple[RecomputeModule, ...] = ()
    offloaded: float = 0.0
    prepared: int = 0
    saved: float = 0.0
    save_every: int = 0
    async_save: bool = False

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def microbatches(self) -> float:
        """Number of micro-batches of a replica in a step."""
        return max(self.rows / self.replicas / self.micro, 1.0) if self.rows else 1.0

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.microbatches * self.micro * self.row * self.replicas


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by part; the parts add up to `total`.

    Attributes:
        products: matrix products of the layers.
        attention: including the wait for the slowest replica.
        memory: memory traffic of norms, rotation and activation functions.
        head: output layer and loss.
        tensor, context: exposed time of these collectives.
        experts: all-to-all of tokens to experts and back, and the gather over tensor-parallel ranks.
        bubble: a pipeline stage's idle time.
        data: exposed time of reducing gradients and gathering weights.
        optimizer: the update.
        offload: exposed time of moving activations to the host's memory and back.
        batches: the wait for the next step's batches.
        saving: the stall of checkpoints, averaged over the steps between them.
    """

    products: float
    attention: float
    memory: float
    head: float
    tensor: float
    context: float
    experts: float
    bubble: float
    data: float
    optimizer: float
    offload: float
    batches: float
    saving: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())

    @property
    def bound(self) -> str:
        """The largest part."""
        return max(vars(self).items(), key=lambda part: part[1])[0]


def step_time(work: Work, speeds: Speeds) -> StepTime:
    """Estimate an optimizer step."""
    gpu, shapes = speeds.gpu(work.gpu), work.shapes
    layer, again = _layer(work, speeds), _again(work)
    layers, micros = shapes.layers / work.pp, work.microbatches
    products = layer["products"] * (3 + again["products"]) + layer["expert_products"] * (1 + again["experts"])
    products += _expert_products(work, speeds, backward=True)
    attention = layer["attention"] * (3.5 + again["attention"])  # backward: five products instead of two
    memory = layer["memory"] * (3 + again["memory"]) + layer["expert_memory"] * (3 + again["experts"])
    tensor = layer["tensor"] * (2.25 + again["tensor"])  # backward gathers its inputs again
    experts = layer["experts"] * (2 + again["experts"])  # not overlapped with any matrix product
    received = layer["context"]
    # the part hidden by attention; some is always exposed at its beginning
    forward = max(received - layer["attention"], 0.1 * received)
    backward = max(2 * received - 2.5 * layer["attention"], 0.2 * received)
    context = forward * (1 + again["context"]) + backward
    head = _head(work, speeds)  # on the last stage, and all stages wait for it
    computed = layers * (products + attention + memory + tensor + context + experts) + head
    passed = work.offloaded / (gpu.host * 1e9 * speeds.links)  # one direction, overlapped with each pass
    offload = max(passed - computed / 3, 0.05 * passed) + max(passed - computed * 2 / 3, 0.05 * passed)
    micro = computed + offload

    ends = 2 if work.pp == 1 else 1  # embedding and output matrix
    parameters = (shapes.everyones_parameters * layers + ends * shapes.vocabulary * shapes.hidden) / work.tp
    held = shapes.expert_parameters * layers / work.tp / work.ep
    shards = work.replicas * work.cp
    copies = shards / work.ep  # copies of each expert
    link = (gpu.nvlink if work.world <= gpu.node else gpu.network) * 1e9 * speeds.links
    # fp32 gradients reduced and bf16 weights gathered
    reduced = parameters * (shards - 1) / shards + held * (copies - 1) / copies
    moved = 6 * reduced / link
    busy = StepTime(
        products=micros * layers * products,
        attention=micros * layers * attention,
        memory=micros * layers * memory,
        head=micros * head,
        tensor=micros * layers * tensor,
        context=micros * layers * context,
        experts=micros * layers * experts,
        bubble=(work.pp - 1) / work.chunks * micro,
        data=max(moved - 0.8 * micro, 0.05 * moved),
        optimizer=24 * (parameters / shards + held / copies) / (gpu.bandwidth * 1e9 * speeds.bandwidth),
        offload=micros * offload,
        batches=0.0,
        saving=save_stall(work, speeds) / work.save_every if work.save_every else 0.0,
    )
    return replace(busy, batches=max(work.prepared / speeds.host.tokens - busy.total, 0.0))


def save_stall(work: Work, speeds: Speeds) -> float:
    """Return the seconds for which a save stalls training: the write, or the copy to the host if it is asynchronous."""
    host = speeds.gpu(work.gpu).host * speeds.links
    return work.saved / 1e9 / (host if work.async_save else speeds.host.storage)


@dataclass(frozen=True)
class RankWork:
    """The FLOPs and bytes sent by one rank in a step, including recomputation.

    Attributes:
        flops: attention is counted by (query, key) pairs.
        tensor_bytes, context_bytes, expert_bytes: bytes sent over these groups.
    """

    flops: float
    tensor_bytes: float
    context_bytes: float
    expert_bytes: float


def rank_work(work: Work, *, head: bool) -> RankWork:
    """Count a rank's work in a step; `head`: its pipeline stage is the last one. Experts are balanced."""
    shapes, again = work.shapes, _again(work)
    t = work.micro * work.row / work.cp / work.tp
    keys = work.context if work.context is not None else work.row / 2
    products = 2 * shapes.everyones_parameters * t * (3 + again["products"])
    products += 2 * shapes.chosen_parameters * t * (3 + again["experts"])
    attention = 4 * keys * shapes.heads * shapes.width * t * (3.5 + again["attention"])
    outputs = 6 * shapes.hidden * shapes.vocabulary * t if head else 0.0
    layers, sent = work.microbatches * shapes.layers / work.pp, _forward_bytes(work)
    return RankWork(
        flops=layers * (products + attention) + work.microbatches * outputs,
        # backward gathers its inputs again; tensors gathered for experts are kept
        tensor_bytes=layers
        * (sent["tensor"] * (2.5 + again["tensor"]) + sent["expert_tensor"] * (2 + again["experts"])),
        context_bytes=layers * sent["context"] * (2 + again["context"]),  # backward returns gradients
        expert_bytes=layers * sent["experts"] * (2 + again["experts"]),
    )


def _forward_bytes(work: Work) -> dict[str, float]:
    """Return the bytes that a rank sends in one layer's forward pass over one micro-batch."""
    shapes = work.shapes
    t = work.micro * work.row / work.cp
    crossed = 2 * 2 * shapes.hidden * t * (work.tp - 1) / work.tp  # a gather and a scatter of the hidden states
    copies = shapes.chosen if shapes.experts else 0  # copies of each token
    return {
        # attention's and the MLP's tensor parallelism; experts gather all copies of a token
        "tensor": crossed if shapes.experts else 2 * crossed,
        "expert_tensor": copies * crossed,
        # to the experts and back
        "experts": 2 * 2 * copies * shapes.hidden * t / work.tp * (work.ep - 1) / work.ep,
        # keys and values
        "context": 2 * 2 * shapes.groups * shapes.width / work.tp * t * (work.cp - 1) * work.exchanged,
    }


def _again(work: Work) -> dict[str, float]:
    """Return the number of recomputed forward passes of each part of a layer."""
    shapes, modules, whole = work.shapes, work.recompute_modules, work.recompute
    # numbers read and written: two norms read and write the hidden states; the activation function reads two factors
    memory = ("layernorm" in modules) * 4 * shapes.hidden
    if not shapes.experts:
        memory += ("mlp" in modules) * 3 * shapes.ffn
    mlp = shapes.everyones_mlp_parameters / shapes.everyones_parameters
    parts = {
        "products": ("mlp" in modules) * mlp,
        "experts": float("mlp" in modules),
        "attention": float("core_attn" in modules),
        "memory": memory / _numbers(shapes),
        "tensor": 0.0 if shapes.experts else ("mlp" in modules) / 2,  # a gather and a scatter of two of each
        "context": float("core_attn" in modules),  # the exchange is part of attention
    }
    return {part: max(whole, share) for part, share in parts.items()}


def _numbers(shapes: Shapes) -> float:
    """Count the elements read and written per token between a layer's matrices in forward, without experts."""
    rotation = (shapes.heads + shapes.groups) * shapes.width
    return 12 * shapes.hidden + 4 * rotation + (0 if shapes.experts else 3 * shapes.ffn)


def _expert_numbers(shapes: Shapes) -> float:
    """Count the elements that experts read and write per token between their matrices, in a forward pass.

    A copy of the token for each of its experts is permuted for sending and sorted by expert on arrival, and the same on
    the way back.
    """
    if not shapes.experts:
        return 0.0
    return shapes.chosen * (8 * shapes.hidden + 3 * shapes.ffn)


def _uneven(work: Work, speeds: Speeds) -> float:
    """Return the busiest rank's tokens over the mean of the ranks that share the experts."""
    return speeds.uneven_experts if work.shapes.experts and work.ep > 1 else 1.0


def _product_speed(work: Work, speeds: Speeds) -> float:
    """Return the FLOP/s of the layers' matrix products."""
    gpu = speeds.gpu(work.gpu)
    products = gpu.bf16 * 1e12 * speeds.reached[gpu.family].matmul
    return products * (speeds.fp8_speedup if work.fp8 and gpu.fp8 else 1)


def _expert_products(work: Work, speeds: Speeds, *, backward: bool) -> float:
    """Return the seconds of one layer's expert products over one micro-batch, on the busiest rank.

    With few tokens per expert, they are bound by reading the weights, all of which a rank reads: in bf16, and once more
    in
    backward, when fp32 gradients are also read and written.
    """
    shapes, gpu = work.shapes, speeds.gpu(work.gpu)
    t = work.micro * work.row / work.cp
    flops = 2 * shapes.chosen_parameters * t / work.tp * _uneven(work, speeds) * (2 if backward else 1)
    moved = shapes.expert_parameters / work.tp / work.ep * (2 + 8 if backward else 2)
    return max(flops / _product_speed(work, speeds), moved / (gpu.bandwidth * 1e9 * speeds.bandwidth))


def _layer(work: Work, speeds: Speeds) -> dict[str, float]:
    """Return the seconds of one layer's forward pass over one micro-batch.

    `context`: the whole exchange, without overlap; `experts`: the transfer of tokens to the experts and back.
    """
    gpu, shapes = speeds.gpu(work.gpu), work.shapes
    reached = speeds.reached[gpu.family]
    t = work.micro * work.row / work.cp
    wide = 1.0 if shapes.width >= TILE else speeds.narrow_heads
    kernel = gpu.bf16 * 1e12 * getattr(reached, work.kernel) * wide
    # a causal segment of n tokens costs n + a tile of keys for each query, not n, halved
    segment = work.segment or work.row
    keys = (work.context if work.context is not None else work.row / 2) * (segment + TILE) / segment
    tensor_link = (gpu.nvlink if work.tp <= gpu.node else gpu.network) * 1e9 * speeds.links
    context_link = (gpu.nvlink if work.tp * work.cp <= gpu.node else gpu.network) * 1e9 * speeds.links
    expert_link = (gpu.nvlink if work.tp * work.ep <= gpu.node else gpu.network) * 1e9 * speeds.links
    sent, uneven = _forward_bytes(work), _uneven(work, speeds)
    moved = t / work.tp / (gpu.bandwidth * 1e9 * speeds.bandwidth)
    return {
        "products": 2 * shapes.everyones_parameters * t / work.tp / _product_speed(work, speeds),
        "expert_products": _expert_products(work, speeds, backward=False),
        "attention": 4 * t * keys * shapes.heads * shapes.width / work.tp / kernel * work.imbalance,
        "memory": 2 * _numbers(shapes) * moved,
        "expert_memory": 2 * _expert_numbers(shapes) * moved * uneven,
        "tensor": 0.5 * sent["tensor"] / tensor_link,  # half of them are hidden
        "context": sent["context"] / context_link,
        "experts": (sent["experts"] / expert_link + sent["expert_tensor"] / tensor_link) * uneven,
    }


def _head(work: Work, speeds: Speeds) -> float:
    """Return the seconds of output layer and loss, forward and backward, over one micro-batch."""
    gpu, shapes = speeds.gpu(work.gpu), work.shapes
    t = work.micro * work.row / work.cp / work.tp
    flops = 6 * shapes.hidden * shapes.vocabulary * t
    moved = 4 * 6 * shapes.vocabulary * t  # six passes over fp32 logits
    matmul = gpu.bf16 * 1e12 * speeds.reached[gpu.family].matmul
    return flops / matmul + moved / (gpu.bandwidth * 1e9 * speeds.bandwidth)


def work_of(
    config: Config, world: int, gpu: str, vocab_size: int, window: int, rows: SampledRows | None = None
) -> Work:
    """Describe a step of a configuration under a window.

    Args:
        config: the run's.
        world: number of GPUs.
        gpu: its name in facts/gpus.yaml.
        vocab_size: token ids.
        window: in tokens.
        rows: sampled rows, for the cost of attention and its exchange; None counts each row as one document, the
            upper bound.
    """
    parallel, data, model = config.parallel, config.data, config.model
    shapes = Shapes.of(model, vocab_size)
    chunk, pp = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    chunks = model.num_layers // pp // chunk if chunk else 1
    replicas = world // (tp * pp * cp)
    if rows is None:
        context = _whole_row_context(config.mask_options(), data.seq_length, window)
        segment: float = min(window, data.seq_length)
        # a window as long as the row needs all remote keys; a small one only those of segments that ranks share
        exchanged, imbalance = min(context / data.seq_length, 1.0), 1.0
    else:
        context = segment = rows.context(window)
        shared = rows.shared(window, cp)
        exchanged, imbalance = shared.exchanged, shared.imbalance * rows.imbalance(window, replicas)
    recompute = 0.0
    if parallel.recompute_granularity == "full":
        block = parallel.recompute_num_layers * chunks * pp / model.num_layers
        recompute = 1.0 if parallel.recompute_method == "uniform" else min(block, 1.0)
    everyone = data.global_batch_size if data.balance_batches else data.global_batch_size // replicas
    return Work(
        shapes=shapes,
        fp8=config.training.fp8_format is not None,
        gpu=gpu,
        world=world,
        row=data.seq_length,
        rows=data.global_batch_size,
        micro=data.micro_batch_size,
        context=context / 2,
        segment=segment,
        exchanged=exchanged,
        imbalance=imbalance,
        tp=tp,
        pp=pp,
        chunks=chunks,
        cp=cp,
        ep=parallel.expert_model_parallel_size,
        recompute=recompute,
        recompute_modules=parallel.recomputed_modules if parallel.recompute_granularity == "selective" else (),
        offloaded=_offloaded_bytes(config),
        prepared=everyone * data.seq_length,
        # the weights, and the fp32 optimizer state of each
        saved=(14 if config.training.bf16 else 12) * _parameters(model, vocab_size) / world,
        save_every=config.checkpoint.save_interval if config.checkpoint.save else 0,
        async_save=config.checkpoint.async_save,
    )


@cache
def _parameters(model: ModelConfig, vocab_size: int) -> int:
    """Count the parameters, cached for the thousands of layouts of a search; a tied embedding counts once."""
    return count_parameters(model, vocab_size)


@cache
def _whole_row_context(masks: MaskOptions, row_length: int, window: int) -> float:
    """Return the effective context of a row that is one document, cached for the thousands of layouts of a search."""
    return masks.whole_row_context(row_length, window)


def _offloaded_bytes(config: Config) -> int:
    """Return the bytes of the layers whose activations are offloaded to the host."""
    layers = config.parallel.offloaded_layers(config.model.num_layers)
    if not layers:
        return 0
    return layers * max(layer_bytes(config, one[0]) for one in attention_shapes(config, config.window_schedule().end))
