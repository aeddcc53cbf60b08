"""Estimates the seconds of one optimizer step: a roofline of products, attention, memory traffic and collectives.

    step = micro-batches through the pipeline, its bubble included + what of the gradients' reduction nothing hides
           + the optimizer
    a micro-batch on one rank = layers x (forward + backward, + forward once more where layers are recomputed) + head

Each term is work over speed, and a speed is a card's peak times the share of it that programs reach; the shares stand
in facts/gpus.yaml, fitted to some of the published figures of facts/published.yaml and held against the others
(benchmarks/published.py).

Legend: t tokens of a micro-batch on this rank, D hidden, F inside the MLP, N query heads, G key heads, H head size,
V vocabulary; tp, pp, cp the tensor-, pipeline- and context-parallel sizes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Gt
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from megatron_ext.config import Config, ModelConfig
from megatron_ext.errors import UserError
from megatron_ext.files.yaml_file import read_yaml

FACTS = Path(__file__).parent / "facts"
TILE = 128  # attention kernels compute whole tiles of queries and keys
_STRICT = ConfigDict(extra="forbid", frozen=True)
Positive = Annotated[float, Gt(0)]


@checked(config=_STRICT)
class Gpu:
    """Holds the peaks of a card and its links: see facts/gpus.yaml for units."""

    bf16: Positive
    fp8: Positive | None
    memory: Positive
    bandwidth: Positive
    nvlink: Positive
    network: Positive
    node: Annotated[int, Gt(0)]
    family: str
    hour: Positive


@checked(config=_STRICT)
class Reached:
    """Holds the shares of a card's peak that products and each attention kernel reach."""

    matmul: Positive
    flash2: Positive
    cudnn: Positive
    ring: Positive


@checked(config=_STRICT)
class Speeds:
    """Holds facts/gpus.yaml."""

    gpus: dict[str, Gpu]
    reached: dict[str, Reached]
    fp8_speedup: Positive
    eager: Positive
    narrow_heads: Positive
    bandwidth: Positive
    links: Positive

    def gpu(self, name: str) -> Gpu:
        """Look a card up.

        Raises:
            UserError: it is not in the file.
        """
        if name not in self.gpus:
            raise UserError(f"gpu: got {name!r}, needs one of {', '.join(self.gpus)}; add it to {FACTS / 'gpus.yaml'}")
        return self.gpus[name]

    def of_device(self, name: str) -> Gpu | None:
        """Return the card that a driver calls `name`, as "NVIDIA A100-SXM4-40GB"; None where the file has none."""
        named = [one for one in self.gpus if all(part in name for part in one.split("-"))]
        return self.gpus[max(named, key=len)] if named else None


@cache
def read_speeds(path: Path = FACTS / "gpus.yaml") -> Speeds:
    """Read a file of cards and shares.

    Raises:
        UserError: a field is missing, unknown or not positive.
    """
    try:
        return TypeAdapter(Speeds).validate_python(read_yaml(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@checked(config=_STRICT)
class Shapes:
    """Holds what of a model decides its time; `gated`: the MLP has three matrices."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    gated: bool = True
    head_size: int | None = None

    @classmethod
    def of(cls, model: ModelConfig, vocab_size: int) -> Shapes:
        """Take them from a model's configuration."""
        return cls(
            layers=model.num_layers,
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size,
            heads=model.num_attention_heads,
            groups=model.num_query_groups,
            vocabulary=vocab_size,
            head_size=model.head_size,
        )

    @property
    def width(self) -> int:
        """Numbers of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices."""
        attention = 2 * self.hidden * self.width * (self.heads + self.groups)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn


@dataclass(frozen=True, kw_only=True)
class Work:
    """Describes one optimizer step.

    Attributes:
        shapes: of the model.
        gpu: by its name in facts/gpus.yaml; `world` of them.
        row: L, tokens of a row; `rows` of them in a step (0: one micro-batch on each replica), `micro` at a time.
        context: keys that a token sees, averaged over tokens and layers; None for a causal row, L / 2.
        segment: mean length of attention segments, for the tiles; None for one as long as the row.
        exchanged: keys and values that a context-parallel rank receives, as a share of all that others hold.
        imbalance: the slowest replica's attention over the mean.
        tp, pp, chunks, cp: parallel sizes; model chunks of a pipeline stage.
        fp8: of the products; attention and the output layer stay in bf16.
        kernel: of attention.
        recompute: whole layers, in backward.
        eager: nothing is fused.
        shard_all: weights and gradients are shared out over data-parallel ranks as well (FSDP, ZeRO-3).
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
    fp8: bool = False
    kernel: Literal["flash2", "cudnn", "ring"] = "flash2"
    recompute: bool = False
    eager: bool = False
    shard_all: bool = False

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def microbatches(self) -> float:
        """Micro-batches of a replica in a step."""
        return max(self.rows / self.replicas / self.micro, 1.0) if self.rows else 1.0

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.microbatches * self.micro * self.row * self.replicas


@dataclass(frozen=True)
class StepTime:
    """Holds the seconds of a step by what they go to; the parts add up to `total`.

    Attributes:
        products: matrix products of the layers.
        attention: with the wait for the slowest replica.
        memory: what moves through the card's memory: norms, rotation, activation functions.
        head: output layer and loss.
        tensor, context: what of these collectives nothing hides.
        bubble: a pipeline stage's idle time.
        data: what of reducing gradients and gathering weights nothing hides.
        optimizer: the update.
    """

    products: float
    attention: float
    memory: float
    head: float
    tensor: float
    context: float
    bubble: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(asdict(self).values())

    @property
    def bound(self) -> str:
        """The part that takes the most."""
        return max(asdict(self).items(), key=lambda part: part[1])[0]


def forward_seconds(work: Work, speeds: Speeds) -> float:
    """Estimate a forward pass alone over one micro-batch, the losses included: how a scorer works."""
    layer, head = _layer(work, speeds), _head(work, speeds)
    return work.shapes.layers / work.pp * sum(layer.values()) + head / 3


def step_time(work: Work, speeds: Speeds) -> StepTime:
    """Estimate an optimizer step."""
    gpu, shapes = speeds.gpu(work.gpu), work.shapes
    layer = _layer(work, speeds)
    again = 1.0 if work.recompute else 0.0
    layers, micros = shapes.layers / work.pp, work.microbatches
    products = layer["products"] * (3 + again)
    attention = layer["attention"] * (3.5 + again)  # backward: five products instead of two
    memory = layer["memory"] * (3 + again)
    tensor = layer["tensor"] * (2.25 + again)  # backward gathers its inputs once more
    received = layer["context"]
    # what attention hides; some always shows at its beginning
    forward = max(received - layer["attention"], 0.1 * received)
    backward = max(2 * received - 2.5 * layer["attention"], 0.2 * received)
    context = forward * (1 + again) + backward
    head = _head(work, speeds)  # all stages wait for the last one, which has it
    micro = layers * (products + attention + memory + tensor + context) + head

    ends = 2 if work.pp == 1 else 1  # embedding and output matrix
    parameters = (shapes.layer_parameters * layers + ends * shapes.vocabulary * shapes.hidden) / work.tp
    shards = work.replicas * work.cp
    link = (gpu.nvlink if work.world <= gpu.node else gpu.network) * 1e9 * speeds.links
    # weights gathered for forward and backward and gradients scattered, each bf16; or fp32 gradients and bf16 weights
    moved = 6 * parameters * (shards - 1) / shards / link * (micros if work.shard_all else 1)
    hidden = 0.8 * micro * (micros if work.shard_all else 1)
    return StepTime(
        products=micros * layers * products,
        attention=micros * layers * attention,
        memory=micros * layers * memory,
        head=micros * head,
        tensor=micros * layers * tensor,
        context=micros * layers * context,
        bubble=(work.pp - 1) / work.chunks * micro,
        data=max(moved - hidden, 0.05 * moved),
        optimizer=24 * parameters / shards / (gpu.bandwidth * 1e9 * speeds.bandwidth),
    )


def _layer(work: Work, speeds: Speeds) -> dict[str, float]:
    """Return the seconds of one layer's forward pass over one micro-batch; `context`: the exchange, nothing hidden."""
    gpu, shapes = speeds.gpu(work.gpu), work.shapes
    reached = speeds.reached[gpu.family]
    t = work.micro * work.row / work.cp
    products = (
        gpu.bf16 * 1e12 * reached.matmul * (speeds.fp8_speedup if work.fp8 else 1) * (speeds.eager if work.eager else 1)
    )
    wide = 1.0 if shapes.width >= TILE else speeds.narrow_heads
    kernel = gpu.bf16 * 1e12 * getattr(reached, work.kernel) * wide
    # a causal segment of n tokens costs n + a tile of keys for each query, not n, halved
    segment = work.segment or work.row
    keys = (work.context if work.context is not None else work.row / 2) * (segment + TILE) / segment
    # numbers read and written per token: norms and residual, rotation, activation function; unfused about three times
    numbers = 12 * shapes.hidden + 4 * (shapes.heads + shapes.groups) * shapes.width + 3 * shapes.ffn
    if work.eager:
        numbers = 36 * shapes.hidden + 12 * (shapes.heads + shapes.groups) * shapes.width + 8 * shapes.ffn
    tensor_link = (gpu.nvlink if work.tp <= gpu.node else gpu.network) * 1e9 * speeds.links
    context_link = (gpu.nvlink if work.tp * work.cp <= gpu.node else gpu.network) * 1e9 * speeds.links
    width = 2 * shapes.groups * shapes.width / work.tp  # numbers of a key and a value row
    return {
        "products": 2 * shapes.layer_parameters * t / work.tp / products,
        "attention": 4 * t * keys * shapes.heads * shapes.width / work.tp / kernel * work.imbalance,
        "memory": 2 * numbers * t / work.tp / (gpu.bandwidth * 1e9 * speeds.bandwidth),
        # two gathers and two scatters of the hidden states, half of them hidden
        "tensor": 0.5 * 4 * 2 * shapes.hidden * t * (work.tp - 1) / work.tp / tensor_link,
        "context": 2 * width * t * (work.cp - 1) * work.exchanged / context_link,
    }


def _head(work: Work, speeds: Speeds) -> float:
    """Return the seconds of output layer and loss, forward and backward, over one micro-batch."""
    gpu, shapes = speeds.gpu(work.gpu), work.shapes
    t = work.micro * work.row / work.cp / work.tp
    flops = 6 * shapes.hidden * shapes.vocabulary * t
    passes = 12 if work.eager else 6  # over fp32 logits
    moved = 4 * passes * shapes.vocabulary * t
    matmul = gpu.bf16 * 1e12 * speeds.reached[gpu.family].matmul
    return flops / matmul + moved / (gpu.bandwidth * 1e9 * speeds.bandwidth)


def work_of(config: Config, world: int, gpu: str, vocab_size: int, window: int) -> Work:
    """Describe a step of a configuration under a window; each row counts as one document, the most it can cost."""
    parallel, data = config.parallel, config.data
    effective = config.mask_options().whole_row_context(data.seq_length, window)
    chunk = parallel.num_layers_per_virtual_pipeline_stage
    pp = parallel.pipeline_model_parallel_size
    return Work(
        shapes=Shapes.of(config.model, vocab_size),
        gpu=gpu,
        world=world,
        row=data.seq_length,
        rows=data.global_batch_size,
        micro=data.micro_batch_size,
        context=effective / 2,
        segment=min(window, data.seq_length),
        # a window of the row needs all keys that others hold; a small one little but what it cuts
        exchanged=min(effective / data.seq_length, 1.0),
        tp=parallel.tensor_model_parallel_size,
        pp=pp,
        chunks=config.model.num_layers // pp // chunk if chunk else 1,
        cp=parallel.context_parallel_size,
        recompute=parallel.recompute_granularity == "full",
    )


def at_window(work: Work, window: int) -> Work:
    """Describe the same step under blocks of `window` tokens."""
    window = min(window, work.row)
    return replace(work, context=window / 2, segment=window, exchanged=window / work.row)
