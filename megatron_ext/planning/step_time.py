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

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked

from megatron_ext.config import Config, ModelConfig
from megatron_ext.config.options import RecomputeModule
from megatron_ext.errors import UserError
from megatron_ext.files.yaml_file import read_yaml, typed
from megatron_ext.masks import MaskOptions
from megatron_ext.planning.sampled_rows import SampledRows

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
    storage: Positive

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
    """Read a file of GPUs and shares of their peaks.

    Raises:
        UserError: a field is missing, unknown or not positive.
    """
    return typed(read_yaml(path), Speeds, path)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one optimizer step.

    Attributes:
        model: its shapes, with `vocab_size`.
        gpu: its name in facts/gpus.yaml; `world` GPUs are used.
        row: L, tokens of a row; `rows` rows per step (0: one micro-batch on each replica), `micro` at a time.
        context: C, the effective context in tokens: a token sees C / 2 keys on average; None for causal rows, L.
        exchanged: keys and values received by the busiest context-parallel rank, as a fraction of all other ranks'
            keys.
        imbalance: attention of the slowest rank over the mean.
        tp, pp, chunks, cp: parallel sizes; model chunks of a pipeline stage.
        ep: number of data- and context-parallel ranks that share the experts.
        fp8: whether products use FP8; attention and the output layer stay in bf16.
        attention_backend: a value of --attention-backend.
        recompute: the fraction of the layers with full recomputation.
        recompute_modules: the modules of each layer that are recomputed in addition.
        host_inputs: inputs copied to the host and back, per layer.
    """

    model: ModelConfig
    gpu: str
    world: int
    row: int
    rows: int = 0
    micro: int = 1
    context: float | None = None
    exchanged: float = 1.0
    imbalance: float = 1.0
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    ep: int = 1
    fp8: bool = False
    attention_backend: str = "auto"
    recompute: float = 0.0
    recompute_modules: tuple[RecomputeModule, ...] = ()
    host_inputs: float = 0.0

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

    @property
    def effective_context(self) -> float:
        """C, in tokens."""
        return self.row if self.context is None else self.context


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
        host: exposed time of copying inputs of layers to the host and back.
        bubble: a pipeline stage's idle time.
        data: exposed time of reducing gradients and gathering weights.
        optimizer: the update.
    """

    products: float
    attention: float
    memory: float
    head: float
    tensor: float
    context: float
    experts: float
    host: float
    bubble: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())

    @property
    def bound(self) -> str:
        """The largest part."""
        return max(vars(self).items(), key=lambda part: part[1])[0]


@dataclass(frozen=True)
class Layer:
    """FLOPs, elements read or written, and bytes sent, of one rank in one layer's forward pass over one micro-batch.

    With the same fields: how much of that is computed again in backward.

    Attributes:
        products, attention: FLOPs, without those of experts.
        elements: read and written between matrices, without experts.
        tensor, context: bytes sent over tensor- and context-parallel ranks, without experts.
        expert_products, expert_elements: of the experts.
        expert_tensor: bytes sent to gather the tokens of experts over tensor-parallel ranks.
        experts: bytes sent to the experts and back.
    """

    products: float
    attention: float
    elements: float
    tensor: float
    context: float
    expert_products: float
    expert_elements: float
    expert_tensor: float
    experts: float


def step_time(work: Work, speeds: Speeds) -> StepTime:
    """Estimate an optimizer step."""
    gpu, model, layer, again = speeds.gpu(work.gpu), work.model, _layer(work), _recomputed(work)
    reached = speeds.reached[gpu.family]
    bandwidth = gpu.bandwidth * 1e9 * speeds.bandwidth
    matmul = gpu.bf16 * 1e12 * reached.matmul
    products_speed = matmul * (speeds.fp8_speedup if work.fp8 and gpu.fp8 else 1)
    share = getattr(reached, reached.kernel(work.attention_backend))
    attention_speed = gpu.bf16 * 1e12 * share * (1.0 if model.head_size >= TILE else speeds.narrow_heads)

    def link(ranks: int) -> float:
        return (gpu.nvlink if ranks <= gpu.node else gpu.network) * 1e9 * speeds.links

    shared, expert = _shared_parameters(model), _expert_parameters(model)
    layers, micros = model.num_layers / work.pp, work.microbatches
    # of a layer, on this rank
    expert_parameters = expert * (model.num_experts or 0) * _expert_share(model) / work.tp / work.ep
    uneven = speeds.uneven_experts if work.ep > 1 else 1.0

    def expert_products(flops: float, moved: int) -> float:
        # with few tokens per expert, bound by reading the weights: all of a rank's
        return max(flops * uneven / products_speed, expert_parameters * moved / bandwidth)

    products = layer.products / products_speed * (3 + again.products)
    products += expert_products(layer.expert_products, 2) * (1 + again.experts)
    products += expert_products(2 * layer.expert_products, 2 + 8)  # reads and writes fp32 gradients too
    # a causal segment of n tokens costs n + a tile of keys for each query, not n, halved
    tiles = (work.effective_context + TILE) / work.effective_context * work.imbalance
    attention_forward = layer.attention * tiles / attention_speed
    attention = attention_forward * (3.5 + again.attention)  # backward: five products instead of two
    memory = layer.elements * (3 + again.elements) + layer.expert_elements * uneven * (3 + again.experts)
    memory *= 2 / bandwidth
    tensor = 0.5 * layer.tensor / link(work.tp) * (2.25 + again.tensor)  # half hidden; backward gathers inputs again
    experts = layer.experts / link(work.tp * work.ep) + layer.expert_tensor / link(work.tp)
    experts *= uneven * (2 + again.experts)  # not overlapped with any matrix product
    received = layer.context / link(work.tp * work.cp)
    # the part hidden by attention; some is always exposed at its beginning
    forward = max(received - attention_forward, 0.1 * received)
    backward = max(2 * received - 2.5 * attention_forward, 0.2 * received)
    context = forward * (1 + again.context) + backward
    # on the last stage, and all stages wait for it; six passes over fp32 logits
    t, vocabulary = work.micro * work.row / work.cp / work.tp, model.vocab_size or 0
    head = 6 * model.hidden_size * vocabulary * t / matmul + 4 * 6 * vocabulary * t / bandwidth
    layer_seconds = products + attention + memory + tensor + context + experts
    # one input each way, while a layer runs forward, a quarter of its time with recomputation, or backward
    copied = work.host_inputs * 2 * model.hidden_size * t / (gpu.pcie * 1e9 * speeds.bandwidth)
    host = max(copied - layer_seconds / 4, 0) + max(copied - layer_seconds * 3 / 4, 0)
    micro = layers * (layer_seconds + host) + head

    ends = 2 if work.pp == 1 else 1  # embedding and output matrix
    parameters = (shared * layers + ends * vocabulary * model.hidden_size) / work.tp
    shards = work.replicas * work.cp
    copies = shards / work.ep  # copies of each expert
    # fp32 gradients reduced and bf16 weights gathered
    reduced = parameters * (shards - 1) / shards + expert_parameters * layers * (copies - 1) / copies
    moved = 6 * reduced / link(work.world)
    return StepTime(
        products=micros * layers * products,
        attention=micros * layers * attention,
        memory=micros * layers * memory,
        head=micros * head,
        tensor=micros * layers * tensor,
        context=micros * layers * context,
        experts=micros * layers * experts,
        host=micros * layers * host,
        bubble=(work.pp - 1) / work.chunks * micro,
        data=max(moved - 0.8 * micro, 0.05 * moved),
        optimizer=24 * (parameters / shards + expert_parameters * layers / copies) / bandwidth,
    )


def _layer(work: Work) -> Layer:
    model, t = work.model, work.micro * work.row / work.cp
    hidden = model.hidden_size
    copies = model.moe_router_topk * _expert_share(model)  # of each token, one for each of its experts
    crossed = 2 * 2 * hidden * t * (work.tp - 1) / work.tp  # a gather and a scatter of the hidden states
    rotated = (model.num_attention_heads + model.num_query_groups) * model.head_size
    received = t * (work.cp - 1) * work.exchanged  # rows
    width = model.exchanged_width(work.tp)
    # each rank computes the keys and values of the latents that it gets
    repeated = _up_projection(model) if width < model.num_query_groups // work.tp * model.key_value_size else 0
    return Layer(
        products=2 * (_shared_parameters(model) * t + repeated * received) / work.tp,
        attention=work.effective_context * model.num_attention_heads * model.key_value_size * t / work.tp,
        elements=(12 * hidden + 4 * rotated + 3 * _mlp_width(model)) * t / work.tp,
        tensor=(1 + _mlp_share(model)) * crossed,  # of attention and the MLP
        context=2 * width * received,
        expert_products=2 * copies * _expert_parameters(model) * t / work.tp,
        # a copy is permuted for sending and sorted by expert on arrival, and the same on the way back
        expert_elements=copies * (8 * hidden + 3 * model.expert_width) * t / work.tp,
        expert_tensor=copies * crossed,
        experts=2 * 2 * copies * hidden * t / work.tp * (work.ep - 1) / work.ep,
    )


def _recomputed(work: Work) -> Layer:
    model, modules, layer = work.model, work.recompute_modules, _layer(work)
    mlp, core = "mlp" in modules, "core_attn" in modules
    t = work.micro * work.row / work.cp / work.tp
    # two norms read and write the hidden states; the activation function reads two factors and writes their product
    elements: float = ("layernorm" in modules) * 4 * model.hidden_size
    elements += mlp * 3 * _mlp_width(model)
    router_or_mlp = _shared_parameters(model) - _attention_parameters(model)
    parts = Layer(
        products=mlp * router_or_mlp / _shared_parameters(model),
        attention=core,
        elements=elements * t / layer.elements,
        tensor=mlp * _mlp_share(model) / (1 + _mlp_share(model)),  # attention has as many gathers and scatters
        context=core,  # the exchange is part of attention
        expert_products=mlp,
        expert_elements=mlp,
        expert_tensor=mlp,
        experts=mlp,
    )
    return Layer(**{name: work.recompute + share for name, share in vars(parts).items()})


def _attention_parameters(model: ModelConfig) -> int:
    """Count the parameters of one layer's attention."""
    if model.multi_latent_attention:
        hidden, query = model.hidden_size, model.query_width
        queries = hidden * query if model.q_lora_rank is None else model.q_lora_rank * (hidden + query)
        down = hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
        return queries + down + _up_projection(model) + model.num_attention_heads * model.v_head_dim * hidden
    return 2 * model.hidden_size * model.head_size * (model.num_attention_heads + model.num_query_groups)


def _up_projection(model: ModelConfig) -> int:
    """Count the parameters that make a latent the keys and values of all heads."""
    return model.kv_lora_rank * model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)


def _expert_parameters(model: ModelConfig) -> int:
    """Count the parameters of one expert; 0 without experts."""
    return 3 * model.hidden_size * model.expert_width if model.num_experts else 0


def _expert_share(model: ModelConfig) -> float:
    """Return the fraction of the layers that have experts."""
    return model.expert_layers / model.num_layers


def _mlp_share(model: ModelConfig) -> float:
    """Return the fraction of the layers that have an MLP for every token: a single one, or shared experts."""
    return 1.0 if model.moe_shared_expert_intermediate_size else 1.0 - _expert_share(model)


def _mlp_width(model: ModelConfig) -> float:
    """Return the mean width over layers of the MLP for every token."""
    share = _expert_share(model)
    return share * (model.moe_shared_expert_intermediate_size or 0) + (1 - share) * model.ffn_hidden_size


def _shared_parameters(model: ModelConfig) -> float:
    """Count the parameters of one layer's matrices that every token uses, as a mean over layers; includes routers."""
    matrices = 2 if model.block == "phi" else 3
    mlp = matrices * _mlp_width(model) + (model.num_experts or 0) * _expert_share(model)
    return _attention_parameters(model) + model.hidden_size * mlp


def work_of(
    config: Config, world: int, gpu: str, vocab_size: int, window: int, rows: SampledRows | None = None
) -> Work:
    """Describe a step of a configuration on `world` GPUs under a window in tokens.

    `rows` are sampled, for the cost of attention and its exchange; None counts each row as one document, the upper
    bound.
    """
    parallel, data, model = config.parallel, config.data, config.model
    chunk, pp = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    chunks = model.num_layers // pp // chunk if chunk else 1
    if rows is None:
        context = _whole_row_context(config.mask_options(), data.seq_length, window)
        # a window as long as the row needs all remote keys; a small one only those of segments that ranks share
        exchanged, imbalance = min(context / data.seq_length, 1.0), 1.0
    else:
        context, shared = rows.context(window), rows.shared(window, cp)
        exchanged, imbalance = shared.exchanged, shared.imbalance * rows.imbalance(window, world // (tp * pp * cp))
    recompute = 0.0
    if parallel.recompute_granularity == "full":
        block = parallel.recompute_num_layers * chunks * pp / model.num_layers
        recompute = 1.0 if parallel.recompute_method == "uniform" else min(block, 1.0)
    return Work(
        model=_with_vocabulary(model, vocab_size),
        fp8=config.training.fp8_format is not None,
        gpu=gpu,
        world=world,
        row=data.seq_length,
        rows=data.global_batch_size,
        micro=data.micro_batch_size,
        context=context,
        exchanged=exchanged,
        imbalance=imbalance,
        tp=tp,
        pp=pp,
        chunks=chunks,
        cp=cp,
        ep=parallel.expert_model_parallel_size,
        attention_backend=parallel.attention_backend,
        recompute=recompute,
        recompute_modules=parallel.recomputed_modules,
        host_inputs=1 / parallel.recompute_num_layers if parallel.offload_layer_inputs else 0.0,
    )


@cache
def _with_vocabulary(model: ModelConfig, vocab_size: int) -> ModelConfig:
    return replace(model, vocab_size=vocab_size)
