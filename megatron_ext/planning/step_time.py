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
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Gt
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked

from megatron_ext.checkpoint.hf.names import Cut, full_shape, parameters_of
from megatron_ext.config import Config, ModelConfig
from megatron_ext.errors import UserError
from megatron_ext.files.reading import read_yaml, typed
from megatron_ext.masks import MaskOptions
from megatron_ext.planning.sampled_rows import AttentionLoad, SampledRows

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
        return "cudnn" if attention_backend == "te_thd" else "flash2"


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
        named = [one for one in self.gpus if all(part in name for part in one.split("-"))]
        return self.gpus[max(named, key=len)] if named else None


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
        length, rows = config.data.seq_length, self.rows
        if rows is None:
            context = _whole_row_context(config.mask_options(), length, window)
            # a window as long as the row needs all remote keys; a small one only those of segments that ranks share
            return AttentionLoad(context, min(context / length, 1.0))
        return rows.load(window, config.parallel.context_parallel_size, config.data_parallel_size(self.gpus))


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
        """Return the work of forward and backward, `passes` times that of forward, and of recomputation."""
        return self.forward * (passes + self.again)


class Layer(NamedTuple):
    """The work of one rank in one layer over one micro-batch; the first five are without experts."""

    products: Amount  # FLOPs
    attention: Amount  # FLOPs
    elements: Amount  # read and written between matrices
    tensor: Amount  # bytes sent over tensor-parallel ranks
    context: Amount  # bytes sent over context-parallel ranks
    expert_products: Amount
    expert_elements: Amount
    expert_tensor: Amount  # bytes sent to gather the tokens of experts over tensor-parallel ranks
    experts: Amount  # bytes sent to the experts and back


def step_time(config: Config, window: int, machine: Machine) -> StepTime:
    """Estimate an optimizer step under a window in tokens."""
    model, parallel, data, speeds, gpu = config.model, config.parallel, config.data, machine.speeds, machine.kind
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, ep = parallel.context_parallel_size, parallel.expert_model_parallel_size
    chunks = parallel.layers_of_chunks(model.num_layers)
    replicas, micros = config.data_parallel_size(machine.gpus), config.microbatches(machine.gpus)
    vocabulary = machine.vocab_size
    load, reached, matrices = machine.attention(config, window), speeds.reached[gpu.family], matrices_of(model)
    layer = layer_work(config, load)

    bandwidth = gpu.bandwidth * 1e9 * speeds.bandwidth
    matmul = gpu.bf16 * 1e12 * reached.matmul
    products_speed = matmul * (speeds.fp8_speedup if config.training.fp8_format and gpu.fp8 else 1)
    share = getattr(reached, reached.kernel(parallel.attention_backend))
    attention_speed = gpu.bf16 * 1e12 * share * (1.0 if model.head_size >= TILE else speeds.narrow_heads)

    def link(ranks: int) -> float:
        return (gpu.nvlink if ranks <= gpu.node else gpu.network) * 1e9 * speeds.links

    # a mean over layers, on this rank
    expert_parameters = matrices.expert * (model.num_experts or 0) * model.expert_layers / model.num_layers / tp / ep
    uneven = speeds.uneven_experts if ep > 1 else 1.0

    def expert_products(flops: float, moved: int) -> float:
        # with few tokens per expert, bound by reading the weights: all of a rank's
        return max(flops * uneven / products_speed, expert_parameters * moved / bandwidth)

    flops, again = layer.expert_products
    products = layer.products.times(3) / products_speed + expert_products(flops, 2) * (1 + again)
    products += expert_products(2 * flops, 2 + 8)  # reads and writes fp32 gradients too
    # a causal segment of n tokens costs n + a tile of keys for each query, not n, halved
    tiles = (load.context + TILE) / load.context * load.imbalance
    attention = layer.attention.times(3.5) * tiles / attention_speed  # backward: five products instead of two
    memory = (layer.elements.times(3) + uneven * layer.expert_elements.times(3)) * 2 / bandwidth
    tensor = 0.5 * layer.tensor.times(2.25) / link(tp)  # half hidden; backward gathers inputs again
    # not overlapped with any matrix product
    experts = uneven * (layer.experts.times(2) / link(tp * ep) + layer.expert_tensor.times(2) / link(tp))
    # the part that attention does not hide; some is always exposed at its beginning
    received, hiding = layer.context.forward / link(tp * cp), layer.attention.forward * tiles / attention_speed
    context = max(received - hiding, 0.1 * received) * (1 + layer.context.again)
    context += max(2 * received - 2.5 * hiding, 0.2 * received)
    layer_seconds = products + attention + memory + tensor + context + experts

    t = data.micro_batch_size * data.seq_length / cp / tp
    # one input each way, while a layer runs forward, a quarter of its time with recomputation, or backward
    inputs = 1 / parallel.recompute_num_layers if parallel.offload_layer_inputs else 0.0
    copied = inputs * 2 * model.hidden_size * t / (gpu.pcie * 1e9 * speeds.bandwidth)
    host = max(copied - layer_seconds / 4, 0) + max(copied - layer_seconds * 3 / 4, 0)
    # on the last stage; six passes over fp32 logits
    head = 6 * model.hidden_size * vocabulary * t / matmul + 4 * 6 * vocabulary * t / bandwidth
    # all stages wait for the slowest one, if all have as many layers for the last one
    stages = [(sum(chunks[stage::pp]), head if stage == pp - 1 else 0.0) for stage in range(pp)]
    layers, head = max(stages, key=lambda stage: stage[0] * (layer_seconds + host) + stage[1])
    micro = layers * (layer_seconds + host) + head

    ends = 2 if pp == 1 else 1  # embedding and output matrix
    parameters = (matrices.shared * layers + ends * vocabulary * model.hidden_size) / tp
    shards = replicas * cp
    copies = shards / ep  # copies of each expert
    # fp32 gradients reduced and bf16 weights gathered
    reduced = parameters * (shards - 1) / shards + expert_parameters * layers * (copies - 1) / copies
    moved = 6 * reduced / link(machine.gpus)
    update = 24 * (parameters / shards + expert_parameters * layers / copies) / bandwidth
    if config.optimizer.optimizer == "muon":  # every rank updates all that it holds; its matrices are gathered first
        held = parameters + expert_parameters * layers
        update = 24 * held / bandwidth + 4 * held * (tp - 1) / link(tp) + orthogonalization(config) / matmul
    of_layers = {"products": products, "attention": attention, "memory": memory, "tensor": tensor}
    of_layers |= {"context": context, "experts": experts, "host": host}
    return StepTime(
        **{name: micros * layers * seconds for name, seconds in of_layers.items()},
        head=micros * head,
        bubble=(pp - 1) * pp / len(chunks) * micro,
        data=max(moved - 0.8 * micro, 0.05 * moved),
        optimizer=update,
    )


def orthogonalization(config: Config) -> float:
    """Count the FLOPs of Muon's update on one rank, whose tensor-parallel ranks each compute whole matrices.

    An iteration of a matrix X [m, n], m <= n, computes A = X X^T, B = b A + c A A and a X + B X: 4 m^2 n + 2 m^3.
    """
    model, parallel, flops = config.model, config.parallel, 0.0
    for row in parameters_of(model):
        shapes = [full_shape(name, model, 0) for name in row.hugging_face]
        if not row.stacked or len(shapes[0]) < 2:
            continue
        if row.cut is not Cut.QKV or not config.optimizer.muon_split_qkv:  # fused matrices are one
            shapes = [(sum(rows for rows, _ in shapes), shapes[0][1])]
        copies = len(row.places(model)) / (parallel.expert_model_parallel_size if row.of_experts else 1)
        flops += copies * sum(4 * m**2 * n + 2 * m**3 for m, n in map(sorted, shapes))
    return flops * config.optimizer.muon_num_ns_steps / parallel.pipeline_model_parallel_size


def layer_work(config: Config, load: AttentionLoad) -> Layer:
    """Count the work of a layer, as a mean over layers with and without experts."""
    model, parallel, matrices = config.model, config.parallel, matrices_of(config.model)
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    ep = parallel.expert_model_parallel_size
    hidden, t = model.hidden_size, config.data.micro_batch_size * config.data.seq_length / cp
    with_experts, shared = model.expert_layers / model.num_layers, model.moe_shared_expert_intermediate_size or 0
    # layers with an MLP for every token, a single one or shared experts, and its mean width
    with_mlp = 1.0 if shared else 1.0 - with_experts
    mlp_width = with_experts * shared + (1 - with_experts) * model.ffn_hidden_size

    modules, whole = parallel.recomputed_modules, 0.0  # the fraction of layers with full recomputation
    if parallel.recompute_granularity == "full":
        sizes = parallel.layers_of_chunks(model.num_layers)
        recomputed = sum(min(size, parallel.recompute_num_layers) for size in sizes)
        whole = 1.0 if parallel.recompute_method == "uniform" else recomputed / model.num_layers
    mlp, core = "mlp" in modules, "core_attn" in modules
    # two norms read and write the hidden states; the activation function reads two factors and writes their product
    repeated = ("layernorm" in modules) * 4 * hidden + mlp * 3 * mlp_width

    rotated = (model.num_attention_heads + model.num_query_groups) * model.head_size
    elements = 12 * hidden + 4 * rotated + 3 * mlp_width
    received = t * (cp - 1) * load.exchanged  # rows
    width = model.exchanged_width(tp)
    # each rank computes the keys and values of the latents that it gets
    expanded = matrices.up if width < model.num_query_groups // tp * model.key_value_size else 0
    crossed = 2 * 2 * hidden * t * (tp - 1) / tp  # a gather and a scatter of the hidden states
    copies = model.moe_router_topk * with_experts  # of a token, one for each of its experts
    return Layer(
        products=Amount(
            2 * (matrices.shared * t + expanded * received) / tp, whole + mlp * matrices.mlp / matrices.shared
        ),
        attention=Amount(load.context * model.num_attention_heads * model.key_value_size * t / tp, whole + core),
        elements=Amount(elements * t / tp, whole + repeated / elements),
        # attention has as many gathers and scatters as the MLP
        tensor=Amount((1 + with_mlp) * crossed, whole + mlp * with_mlp / (1 + with_mlp)),
        context=Amount(2 * width * received, whole + core),  # the exchange is part of attention
        expert_products=Amount(2 * copies * matrices.expert * t / tp, whole + mlp),
        # a copy is permuted for sending and sorted by expert on arrival, and the same on the way back
        expert_elements=Amount(copies * (8 * hidden + 3 * model.expert_width) * t / tp, whole + mlp),
        expert_tensor=Amount(copies * crossed, whole + mlp),
        experts=Amount(2 * 2 * copies * hidden * t / tp * (ep - 1) / ep, whole + mlp),
    )


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
            counts["attention" if "self_attn" in name else "mlp"] += layers * math.prod(shape)
            counts["up"] += layers * math.prod(shape) if "kv_b_proj" in name else 0
    attention, up, mlp = (counts[part] / model.num_layers for part in ("attention", "up", "mlp"))
    return Matrices(attention, up, mlp, counts["expert"])
