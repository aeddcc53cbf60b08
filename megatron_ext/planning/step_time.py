"""Estimate the seconds of one optimizer step: a roofline of matrix products, attention, memory traffic, collectives.

    step = micro-batches through the pipeline, with its bubble + the gradient reduction that is not overlapped
           + the optimizer
    a micro-batch on one rank = layers x (forward + backward + the recomputed part of forward) + output layer

Each term is work over speed. A speed is a GPU's peak times the share of it that programs reach. The shares are in
facts/gpus.yaml; tests/planning/test_published.py compares the estimates with published figures.

Legend: t tokens of a micro-batch on this rank, D hidden, F inside the MLP, N query heads, G key heads, H head size,
V vocabulary; tp, pp, cp the tensor-, pipeline- and context-parallel sizes. With experts: E per layer, k selected per
token, F inside one expert, ep ranks that share them.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Gt
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked

from megatron_ext.checkpoint.parameters import Cut, full_shape, parameters_of
from megatron_ext.config import Config, ModelConfig
from megatron_ext.context_parallel.choice import CPOptions, planned_cp
from megatron_ext.context_parallel.exchange import copies_of_keys
from megatron_ext.errors import UserError
from megatron_ext.files.reading import read_yaml, typed
from megatron_ext.masks import MaskOptions
from megatron_ext.planning.sampled_rows import AttentionLoad, SampledRows, shared_attention

_whole_row_context = cache(MaskOptions.whole_row_context)  # a search asks for thousands of layouts
FACTS = Path(__file__).parent / "facts"
TILE = 128  # attention kernels compute whole tiles of queries and keys
_STRICT = ConfigDict(extra="forbid", frozen=True)
Positive = Annotated[float, Gt(0)]
Kernel = Literal["flash2", "flash4", "cudnn"]


@checked(config=_STRICT)
class Gpu:
    """The peaks of a GPU and its links; facts/gpus.yaml has the units."""

    bf16: Positive
    fp8: Positive | None
    memory: Positive
    bandwidth: Positive
    nvlink: Positive
    network: Positive
    pcie: Positive
    node: Annotated[int, Gt(0)]
    family: str
    hour: Positive

    def peak_flops(self, *, fp8: bool) -> float:
        """Return the FLOP/s of matrix products; of fp8 where the GPU has it."""
        if fp8 and self.fp8 is not None:
            return self.fp8 * 1e12
        return self.bf16 * 1e12


@checked(config=_STRICT)
class Reached:
    """The share of a GPU's peak that matrix products and attention kernels reach; None if the kernel needs another."""

    matmul: Positive
    flash2: Positive
    cudnn: Positive
    flash4: Positive | None = None

    def kernel(self, attention_backend: str) -> Kernel:
        """Return the kernel of a value of --attention-backend; `auto` chooses FlashAttention 4 where it runs."""
        if attention_backend in ("auto", "flash_attn_4") and self.flash4 is not None:
            return "flash4"
        if attention_backend == "te_thd":
            return "cudnn"
        return "flash2"


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

    def gpu(self, name: str) -> Gpu:
        """Return the GPU of this name. Raises `UserError` if it is not in the file."""
        if name not in self.gpus:
            raise UserError(f"gpu: got {name!r}, needs one of {', '.join(self.gpus)}; add it to {FACTS / 'gpus.yaml'}")
        return self.gpus[name]

    def of_device(self, name: str) -> Gpu | None:
        """Return the GPU for a driver's device name, such as "NVIDIA A100-SXM4-40GB"; None if it is not in the file."""
        words = set(re.split("[- ]", name))
        names = [gpu for gpu in self.gpus if words.issuperset(gpu.split("-"))]
        if not names:
            return None
        gpu = self.gpus[max(names, key=len)]
        if words & {"PCIe", "NVL"} and gpu.family != "ampere":  # have lower peaks than the file's SXM form
            return None
        return gpu


@cache
def read_speeds(path: Path = FACTS / "gpus.yaml") -> Speeds:
    """Read a file of GPUs and shares of their peaks; raise UserError for a missing, unknown or not positive field."""
    return typed(read_yaml(path), Speeds, path)


@dataclass(frozen=True)
class Machine:
    """What a run's time depends on besides its configuration: `gpus` of the kind `gpu`, a name of `speeds`.

    `rows` are sampled, for the cost of attention; None counts each row as one document, the upper bound.
    """

    gpus: int
    gpu: str
    vocab_size: int
    speeds: Speeds
    rows: SampledRows | None = None

    @property
    def kind(self) -> Gpu:
        """The peaks of one GPU."""
        return self.speeds.gpu(self.gpu)

    def attention(self, config: Config, window: int) -> AttentionLoad:
        """Return the cost of attention under a window in tokens."""
        length = config.data.seq_length
        cp = planned_cp(config)
        if self.rows is not None:
            return self.rows.load(window, cp, config.data_parallel_size(self.gpus))
        masks = config.mask_options()
        context = _whole_row_context(masks, length, window)
        ulysses = _whole_row_ulysses(masks, length, window, cp)
        # a window as long as the row needs all remote keys; a small one only the keys of segments that ranks share
        return AttentionLoad(context, (1 - ulysses) * min(context / length, 1.0), ulysses)


@cache
def _whole_row_ulysses(masks: MaskOptions, length: int, window: int, cp: CPOptions | None) -> float:
    """Return the fraction of attention over rows of one document in which ranks exchange tokens for heads."""
    return shared_attention(cp, masks.at(length, [np.array([length])], window)).ulysses


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by part; the parts add up to `total`."""

    products: float  # matrix products of the layers
    attention: float  # including the wait for the slowest replica
    memory: float  # memory traffic of norms, rotation and activation functions
    head: float  # output layer and loss
    tensor: float  # exposed time of tensor-parallel collectives
    context: float  # exposed time of context-parallel collectives
    experts: float  # all-to-all of tokens to experts and back, and the gather over tensor-parallel ranks
    host: float  # exposed time of copying inputs of layers to the host and back
    bubble: float  # a pipeline stage's idle time
    data: float  # exposed time of reducing gradients and gathering weights
    optimizer: float  # the update

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())


class Amount(NamedTuple):
    """Work of a forward pass, and the fraction of it that recomputation repeats."""

    forward: float
    again: float

    def times(self, passes: float) -> float:
        """Return the work of forward and backward, `passes` times the work of forward, and of recomputation."""
        return self.forward * (passes + self.again)


class Layer(NamedTuple):
    """The work of one rank in one layer over one micro-batch; the first six are without experts."""

    products: Amount  # FLOPs
    attention: Amount  # FLOPs
    elements: Amount  # read and written between matrices
    tensor: Amount  # bytes sent over tensor-parallel ranks
    context: Amount  # bytes of keys and values sent over context-parallel ranks
    ulysses: Amount  # bytes sent over these ranks to exchange tokens for heads, and back
    expert_products: Amount
    expert_elements: Amount
    expert_tensor: Amount  # bytes sent to gather the tokens of experts over tensor-parallel ranks
    experts: Amount  # bytes sent to the experts and back


def step_time(config: Config, window: int, machine: Machine) -> StepTime:
    """Estimate an optimizer step under a window in tokens."""
    return _Estimate(config, window, machine).step()


class _Estimate:
    """The seconds of the parts of a step under a window, on one rank."""

    def __init__(self, config: Config, window: int, machine: Machine) -> None:
        self.config = config
        self.model = config.model
        self.parallel = config.parallel
        self.machine = machine
        self.speeds = machine.speeds
        self.gpu = machine.kind
        self.tp = self.parallel.tensor_model_parallel_size
        self.pp = self.parallel.pipeline_model_parallel_size
        self.cp = self.parallel.context_parallel_size
        self.ep = self.parallel.expert_model_parallel_size
        self.tokens = config.data.micro_batch_size * config.data.seq_length / self.cp / self.tp
        self.load = machine.attention(config, window)
        self.layer = layer_work(config, self.load)
        self.matrices = matrices_of(self.model)
        # as a mean over layers
        self.expert_parameters = (
            self.matrices.expert * (self.model.num_experts or 0) * self.model.expert_layers / self.model.num_layers
        ) / self.tp / self.ep  # fmt: skip

    # --- speeds

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the GPU's memory."""
        return self.gpu.bandwidth * 1e9 * self.speeds.bandwidth

    @property
    def matmul(self) -> float:
        """FLOPs per second of matrix products in bf16."""
        return self.gpu.bf16 * 1e12 * self.speeds.reached[self.gpu.family].matmul

    def products_speed(self) -> float:
        """FLOPs per second of the layers' matrix products."""
        if self.config.training.fp8_format and self.gpu.fp8:
            return self.matmul * self.speeds.fp8_speedup
        return self.matmul

    def attention_speed(self) -> float:
        """FLOPs per second of the attention kernel."""
        reached = self.speeds.reached[self.gpu.family]
        speed: float = self.gpu.bf16 * 1e12 * getattr(reached, reached.kernel(self.parallel.attention_backend))
        if self.model.head_size < TILE:
            speed *= self.speeds.narrow_heads
        return speed

    def link(self, ranks: int) -> float:
        """Bytes per second that each of so many ranks sends to the others."""
        peak = self.gpu.nvlink if ranks <= self.gpu.node else self.gpu.network
        return peak * 1e9 * self.speeds.links

    # --- one layer over one micro-batch

    @property
    def uneven(self) -> float:
        """The load of the fullest expert-parallel rank, relative to the mean."""
        return self.speeds.uneven_experts if self.ep > 1 else 1.0

    def layer_seconds(self) -> dict[str, float]:
        """The parts of a layer's time that `StepTime` names."""
        attention_speed = self.attention_speed()
        # a causal segment of n tokens costs n + a tile of keys for each query, not n, halved
        tiles = (self.load.context + TILE) / self.load.context * self.load.imbalance
        elements = self.layer.elements.times(3) + self.uneven * self.layer.expert_elements.times(3)
        seconds = {
            "products": self.products(),
            "attention": self.layer.attention.times(3.5) * tiles / attention_speed,  # backward: five products, not two
            "memory": elements * 2 / self.bandwidth,
            "tensor": 0.5 * self.layer.tensor.times(2.25) / self.link(self.tp),  # half hidden; inputs gathered again
            "context": self.context(hiding=self.layer.attention.forward * tiles / attention_speed),
            "experts": self.experts(),
        }
        seconds["host"] = self.host(sum(seconds.values()))
        return seconds

    def products(self) -> float:
        flops, again = self.layer.expert_products
        seconds = self.layer.products.times(3) / self.products_speed() + self.expert_products(flops, 2) * (1 + again)
        return seconds + self.expert_products(2 * flops, 2 + 8)  # reads and writes fp32 gradients too

    def expert_products(self, flops: float, moved: int) -> float:
        """Return the seconds of the experts' products, which move so many bytes per weight.

        With few tokens per expert they are bound by reading all weights of the rank.
        """
        return max(flops * self.uneven / self.products_speed(), self.expert_parameters * moved / self.bandwidth)

    def context(self, hiding: float) -> float:
        """The part of the exchange that `hiding` seconds of attention do not hide; its beginning is never hidden.

        An exchange of tokens for heads is not hidden at all, because attention needs all tokens of its heads.
        """
        link = self.link(self.tp * self.cp)
        received = self.layer.context.forward / link
        seconds = max(received - hiding, 0.1 * received) * (1 + self.layer.context.again)
        seconds += max(2 * received - 2.5 * hiding, 0.2 * received)
        return seconds + self.layer.ulysses.times(2) / link

    def experts(self) -> float:
        """The all-to-alls of tokens, which no matrix product overlaps."""
        sent = self.layer.experts.times(2) / self.link(self.tp * self.ep)
        return self.uneven * (sent + self.layer.expert_tensor.times(2) / self.link(self.tp))

    def host(self, layer_seconds: float) -> float:
        """Copying one input each way.

        A layer runs forward a quarter of its time with recomputation, and backward the rest.
        """
        if not self.parallel.offload_layer_inputs:
            return 0.0
        inputs = 1 / self.parallel.recompute_num_layers
        moved = inputs * 2 * self.model.hidden_size * self.tokens
        copied = moved / (self.gpu.pcie * 1e9 * self.speeds.bandwidth)
        return max(copied - layer_seconds / 4, 0) + max(copied - layer_seconds * 3 / 4, 0)

    # --- the other parts of a step

    def head(self) -> float:
        """The output layer and loss of a micro-batch, with six passes over fp32 logits."""
        numbers = self.machine.vocab_size * self.tokens
        return 6 * self.model.hidden_size * numbers / self.matmul + 4 * 6 * numbers / self.bandwidth

    def step(self) -> StepTime:
        layer_seconds = self.layer_seconds()
        layer_total = sum(layer_seconds.values())
        # all stages wait for the slowest one, if all have as many layers for the last one
        chunks = self.parallel.layers_of_chunks(self.model.num_layers)
        stages = [(sum(chunks[stage :: self.pp]), 0.0) for stage in range(self.pp - 1)]
        stages.append((sum(chunks[self.pp - 1 :: self.pp]), self.head()))
        layers, head = max(stages, key=lambda stage: stage[0] * layer_total + stage[1])
        microbatch = layers * layer_total + head
        microbatches = self.config.microbatches(self.machine.gpus)
        moved, update = self.synchronized(layers)
        return StepTime(
            **{name: microbatches * layers * seconds for name, seconds in layer_seconds.items()},
            head=microbatches * head,
            bubble=(self.pp - 1) * self.pp / len(chunks) * microbatch,
            data=max(moved - 0.8 * microbatch, 0.05 * moved),
            optimizer=update,
        )

    def synchronized(self, layers: int) -> tuple[float, float]:
        """Return the seconds of all collectives over replicas, and of the update, for a rank with so many layers."""
        ends = 2 if self.pp == 1 else 1  # embedding and output matrix
        vocabulary = ends * self.machine.vocab_size * self.model.hidden_size
        parameters = (self.matrices.shared * layers + vocabulary) / self.tp
        expert_parameters = self.expert_parameters * layers
        shards = self.config.data_parallel_size(self.machine.gpus) * self.cp
        copies = shards / self.ep  # copies of each expert
        # fp32 gradients reduced and bf16 weights gathered
        reduced = parameters * (shards - 1) / shards + expert_parameters * (copies - 1) / copies
        moved = 6 * reduced / self.link(self.machine.gpus)
        if self.config.optimizer.optimizer != "muon":
            return moved, 24 * (parameters / shards + expert_parameters / copies) / self.bandwidth
        # every rank updates all that it holds; its matrices are gathered first
        held = parameters + expert_parameters
        update = 24 * held / self.bandwidth + 4 * held * (self.tp - 1) / self.link(self.tp)
        return moved, update + orthogonalization(self.config) / self.matmul


def orthogonalization(config: Config) -> float:
    """Count the FLOPs of Muon's update on one rank, whose tensor-parallel ranks each compute whole matrices.

    An iteration of a matrix X [m, n], m <= n, computes A = X X^T, B = b A + c A A and a X + B X: 4 m^2 n + 2 m^3.
    """
    model = config.model
    parallel = config.parallel
    flops = 0.0
    for row in parameters_of(model):
        shapes = [full_shape(name, model, 0) for name in row.hugging_face]
        if not row.stacked or len(shapes[0]) < 2:
            continue
        if row.cut is not Cut.QKV or not config.optimizer.muon_split_qkv:  # fused matrices are one
            shapes = [(sum(rows for rows, _ in shapes), shapes[0][1])]
        copies = float(len(row.places(model)))
        if row.of_experts:
            copies /= parallel.expert_model_parallel_size
        flops += copies * sum(4 * m**2 * n + 2 * m**3 for m, n in map(sorted, shapes))
    return flops * config.optimizer.muon_num_ns_steps / parallel.pipeline_model_parallel_size


def layer_work(config: Config, load: AttentionLoad) -> Layer:
    """Count the work of a layer, as a mean over layers with and without experts."""
    model = config.model
    parallel = config.parallel
    matrices = matrices_of(config.model)
    tp = parallel.tensor_model_parallel_size
    cp = parallel.context_parallel_size
    ep = parallel.expert_model_parallel_size
    hidden = model.hidden_size
    t = config.data.micro_batch_size * config.data.seq_length / cp
    with_experts = model.expert_layers / model.num_layers
    shared = model.moe_shared_expert_intermediate_size or 0
    # the fraction of layers with an MLP for every token, a single one or shared experts, and its mean width
    with_mlp = 1.0 if shared else 1.0 - with_experts
    mlp_width = with_experts * shared + (1 - with_experts) * model.ffn_hidden_size

    whole = fully_recomputed(config)
    modules = parallel.recomputed_modules
    mlp = "mlp" in modules
    core = "core_attn" in modules
    # two norms read and write the hidden states; the activation function reads two factors and writes their product
    repeated = ("layernorm" in modules) * 4 * hidden + mlp * 3 * mlp_width

    rotated = (model.num_attention_heads + model.num_query_groups) * model.head_size
    elements = 12 * hidden + 4 * rotated + 3 * mlp_width
    received = t * (cp - 1) * load.exchanged  # rows
    width = model.exchanged_width(tp)
    flops = 2 * matrices.shared * t
    if width < model.num_query_groups // tp * model.key_value_size:
        # each rank computes the keys and values of the latents that it gets
        flops += 2 * matrices.up * received
    crossed = 2 * 2 * hidden * t * (tp - 1) / tp  # a gather and a scatter of the hidden states
    copies = model.moe_router_topk * with_experts  # of a token, one for each of its experts
    return Layer(
        products=Amount(flops / tp, whole + mlp * matrices.mlp / matrices.shared),
        attention=Amount(load.context * model.num_attention_heads * model.key_value_size * t / tp, whole + core),
        elements=Amount(elements * t / tp, whole + repeated / elements),
        # attention has as many gathers and scatters as the MLP
        tensor=Amount((1 + with_mlp) * crossed, whole + mlp * with_mlp / (1 + with_mlp)),
        context=Amount(2 * width * received, whole + core),  # the exchange is part of attention
        ulysses=Amount(2 * t * load.ulysses * _swapped(config), whole + core),
        expert_products=Amount(2 * copies * matrices.expert * t / tp, whole + mlp),
        # a copy is permuted for sending and sorted by expert on arrival, and the same on the way back
        expert_elements=Amount(copies * (8 * hidden + 3 * model.expert_width) * t / tp, whole + mlp),
        expert_tensor=Amount(copies * crossed, whole + mlp),
        experts=Amount(2 * 2 * copies * hidden * t / tp * (ep - 1) / ep, whole + mlp),
    )


def _swapped(config: Config) -> float:
    """Count the numbers of a token that its rank sends, or receives, if ranks exchange tokens for heads.

    These are a query and an output of each head, and a key and a value of each key head and its copies; a rank keeps
    those of the heads that it computes.
    """
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    cp = config.parallel.context_parallel_size
    key_heads = model.num_query_groups // tp
    heads = model.num_attention_heads // tp + key_heads * copies_of_keys(key_heads, cp)
    return heads * model.key_value_size * (cp - 1) / cp


def fully_recomputed(config: Config) -> float:
    """Return the fraction of layers with full recomputation."""
    parallel = config.parallel
    if parallel.recompute_granularity != "full":
        return 0.0
    if parallel.recompute_method == "uniform":
        return 1.0
    sizes = parallel.layers_of_chunks(config.model.num_layers)
    return sum(min(size, parallel.recompute_num_layers) for size in sizes) / config.model.num_layers


class Matrices(NamedTuple):
    """Numbers of weights in a layer's matrices, as means over all layers, except for `expert`."""

    attention: float
    up: float  # the part of `attention` that makes a latent the keys and values of all heads
    mlp: float  # for every token: a single one or shared experts, and routers
    expert: float  # one expert of a layer that has them

    @property
    def shared(self) -> float:
        """The weights that every token uses."""
        return self.attention + self.mlp


@cache
def matrices_of(model: ModelConfig) -> Matrices:
    """Count the weights of a layer's matrices."""
    counts: Counter[str] = Counter()
    for parameter in parameters_of(model):
        layers = sum(parameter.in_layer(model, layer) for layer in range(model.num_layers))
        for name in parameter.hugging_face:
            shape = full_shape(name, model, 0)
            if not parameter.stacked or len(shape) < 2:
                continue
            if parameter.of_experts:
                counts["expert"] += math.prod(shape)
                continue
            weights = layers * math.prod(shape)
            counts["attention" if "self_attn" in name else "mlp"] += weights
            if "kv_b_proj" in name:
                counts["up"] += weights
    attention, up, mlp = (counts[part] / model.num_layers for part in ("attention", "up", "mlp"))
    return Matrices(attention, up, mlp, counts["expert"])
