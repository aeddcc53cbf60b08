"""The configuration: one frozen dataclass per section. A flag is a field's name with dashes.

An option that Megatron-LM has, too, has the same name there. A type restricts a value by itself (`PositiveInt`);
checks.py has the rules across fields.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Le, Lt, MinLen
from pydantic import AfterValidator, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_ext.config.blocks import BLOCKS, Block
from megatron_ext.config.mixture import MixturePart, Packing, parts_of_data_path
from megatron_ext.config.pipeline import checked_layout, read_layout
from megatron_ext.errors import UserError
from megatron_ext.learning_rate import DecayStyle, LearningRateSchedule
from megatron_ext.masks import MaskOptions, WindowMask
from megatron_ext.schedule import ScheduleKind, WindowSchedule, build_schedule
from megatron_ext.short_context import ShortContext


def _option(default: Any, help: str, shown: str | None = None) -> Any:
    """Return a field; `shown` is the placeholder of its value in --help."""
    return field(default=default, metadata={"description": help, "shown": shown})


class _Section:
    """Makes pydantic reject unknown names and infinite numbers, and accept `0.3` as a string in YAML."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)


Layers = Annotated[PositiveInt, Le(10_000)]  # a safe upper limit, because each layer is listed by name
Width = Annotated[PositiveInt, Le(2**24)]  # larger tensors fit no machine
Tokens = Annotated[PositiveInt, Le(2**31)]
Steps = Annotated[PositiveInt, Le(10**9)]  # a hundred times the steps of the longest runs
Step = Annotated[NonNegativeInt, Le(10**9)]
Minutes = Annotated[PositiveInt, Le(30_000)]  # as milliseconds within a C int
Seed = Annotated[NonNegativeInt, Lt(2**64)]
Share = Annotated[PositiveFloat, Le(1)]
Decay = Annotated[NonNegativeFloat, Lt(1)]
Folder = Annotated[str, MinLen(1)]
PipelineLayout = Annotated[str, AfterValidator(checked_layout)]
Seconds = Annotated[NonNegativeFloat, Le(10_000_000)]  # nearly four months

PRESETS: dict[str, dict[str, Any]] = {  # model sizes by name; lists become tuples, as in ModelConfig
    name: {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    for name, options in yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8")).items()
    if not name.startswith(".")
}
Preset: Any = Literal[tuple(PRESETS)]  # --help and the JSON schema list the names
BlockName: Any = Literal[tuple(BLOCKS)]
RecomputeModule = Literal["core_attn", "layernorm", "mlp"]


@dataclass(frozen=True)
class GradientSharing:
    """How ranks that hold the same weights share gradients and optimizer state; names as in Megatron."""

    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool

    def __str__(self) -> str:
        kind = "distributed" if self.use_distributed_optimizer else "replicated"
        overlaps = {"gradient reduction": self.overlap_grad_reduce, "parameter gathering": self.overlap_param_gather}
        overlapped = " and ".join(name for name, is_on in overlaps.items() if is_on)
        return f"{kind} optimizer, {overlapped or 'no communication'} overlapped"


@dataclass(frozen=True)
class ModelConfig(_Section):
    """A transformer with RoPE and grouped-query or latent attention, with the layers of Llama or another family."""

    model_preset: Preset | None = _option(None, "a named model size; other values override it")
    block: BlockName = _option(
        "llama",
        "llama: RMSNorm and SwiGLU, no biases; others as in Phi-2, Gemma 3, Olmo 3 and gpt-oss (docs/conversion.md)",
    )
    num_layers: Layers = _option(4, "transformer layers")
    hidden_size: Width = _option(128, "width of the residual stream")
    ffn_hidden_size: Width = _option(
        384, "width inside the MLP (with a given hidden_size 8/3 of it in multiples of 64; phi: 4 times)"
    )
    num_attention_heads: Width = _option(4, "query heads")
    num_query_groups: Width = _option(2, "key and value heads (with given num_attention_heads as many)")
    kv_channels: Width | None = _option(None, "size of a head (default hidden_size / num_attention_heads)")
    multi_latent_attention: bool = _option(False, "MLA (DeepSeek): keys and values of heads from a latent per token")
    q_lora_rank: Width | None = _option(None, "MLA: width of the queries' latent (default: queries have none)")
    kv_lora_rank: Width = _option(512, "MLA: width of the latent of keys and values")
    qk_head_dim: Width = _option(128, "MLA: dimensions of a query or key head that are not rotated")
    qk_pos_emb_head_dim: Width = _option(64, "MLA: rotated dimensions, one key for all heads")
    v_head_dim: Width = _option(128, "MLA: size of a value head")
    vocab_size: Tokens | None = _option(None, "number of token ids (default: that of --tokenizer-model)")
    make_vocab_size_divisible_by: Width = _option(128, "the embedding is padded to a multiple of this")
    norm_epsilon: PositiveFloat = _option(1e-5, "epsilon of the norms")
    rotary_base: PositiveFloat = _option(10_000.0, "base of the rotary frequencies")
    rotary_percent: Share = _option(1.0, "share of each head's dimensions that are rotated (phi)")
    rotary_base_local: PositiveFloat | None = _option(None, "base of local layers, unscaled (default: as other layers)")
    rope_scaling: Literal["none", "linear", "dynamic", "yarn", "llama3"] = _option(
        "none", "how rotary frequencies are scaled beyond --rope-original-length"
    )
    rope_scaling_factor: PositiveFloat = _option(1.0, "new length / original length")
    rope_original_length: PositiveInt | None = _option(None, "dynamic, yarn, llama3: length the model was trained at")
    rope_low_freq_factor: PositiveFloat = _option(1.0, "llama3: wavelengths > original length / this are fully scaled")
    rope_high_freq_factor: PositiveFloat = _option(4.0, "llama3: wavelengths < original length / this are not scaled")
    rope_beta_fast: PositiveFloat = _option(32.0, "yarn: frequencies with more rotations than this are not scaled")
    rope_beta_slow: PositiveFloat = _option(1.0, "yarn: frequencies with fewer rotations than this are scaled fully")
    rope_truncate: bool = _option(True, "yarn: round the ends of the ramp between both to whole pairs (gpt_oss: no)")
    rope_attention_factor: PositiveFloat | None = _option(
        None,
        "yarn: factor of rotated queries and keys (default 0.1 ln rope_scaling_factor + 1; with rope_mscale_all_dim m, "
        "divided by 0.1 m ln rope_scaling_factor + 1)",
    )
    rope_mscale_all_dim: NonNegativeFloat = _option(
        0.0, "MLA with yarn: m; all scores are multiplied by (0.1 m ln rope_scaling_factor + 1)^2"
    )
    rope_window_bases: tuple[str, ...] = _option((), "rotary base of each window up to WINDOW tokens", "WINDOW:BASE")
    no_rope_freq: PositiveInt | None = _option(None, "every n-th layer has no rotary embedding (NoPE); 1: none has")
    untie_embeddings_and_output_weights: bool = _option(True, "use a separate output matrix")
    num_experts: Width | None = _option(None, "experts in each layer: SwiGLU MLPs with a router (Mixtral, Qwen3-MoE)")
    moe_router_topk: Width = _option(2, "experts per token, weighted by their router scores, normalized to sum 1")
    moe_ffn_hidden_size: Width | None = _option(None, "width inside an expert (default: ffn_hidden_size)")
    moe_shared_expert_intermediate_size: Width | None = _option(None, "width of a layer's shared experts together")
    moe_layer_freq: tuple[Annotated[int, Ge(0), Le(1)], ...] = _option(
        (), "for each layer 1 if it has experts, 0 if it has a single MLP of width ffn_hidden_size (default: all 1)"
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = _option(
        "softmax", "how router logits become scores; sigmoid: of each expert by itself (DeepSeek-V3)"
    )
    moe_router_enable_expert_bias: bool = _option(
        False, "sigmoid: biases on the choice of experts, which balance their tokens (DeepSeek-V3)"
    )
    moe_router_num_groups: Width | None = _option(None, "sigmoid: groups of experts, of which each token uses a few")
    moe_router_group_topk: Width | None = _option(None, "groups per token, by the sum of their two best scores")
    moe_router_topk_scaling_factor: PositiveFloat = _option(1.0, "sigmoid: factor of the normalized scores")
    add_qkv_bias: bool = _option(False, "biases on queries, keys and values (Qwen2)")
    qk_layernorm: bool = _option(False, "normalize each head's queries and keys before RoPE (Qwen3)")
    softmax_type: Literal["vanilla", "learnable"] = _option("vanilla", "learnable: attention sinks, as in gpt-oss")
    query_pre_attn_scalar: Width | None = _option(None, "gemma3: scores / sqrt(this) (default: the head size)")
    local_window: PositiveInt | None = _option(None, "tokens that a token of a local layer attends to, with itself")
    window_attn_skip_freq: int | None = _option(None, "every n-th layer follows the window schedule")
    init_method_std: NonNegativeFloat = _option(0.02, "megatron: standard deviation of the initial weights")
    init_scheme: Literal["megatron", "tinyllama"] = _option(
        "megatron",
        "megatron: init_method_std, / sqrt(2 num_layers) for matrices that write to the residual stream; tinyllama: "
        "sqrt(2 / (5 hidden_size)), and for those matrices 1 / (sqrt(hidden_size) num_layers)",
    )
    hidden_dropout: Decay = _option(0.0, "dropout on the residual branches")

    @property
    def traits(self) -> Block:
        """What distinguishes the layers of its block from the layers of others."""
        return BLOCKS[self.block]

    @property
    def head_size(self) -> int:
        """H, the size of a query or key head."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """The size of a value head; only with MLA it differs from the size of a key head."""
        if self.multi_latent_attention:
            return self.v_head_dim
        return self.head_size

    @property
    def key_value_size(self) -> int:
        """H + W, the size of a key and a value head together."""
        return self.head_size + self.value_size

    def exchanged_width(self, tensor_size: int) -> int:
        """Return the numbers in a row that context-parallel ranks exchange, of one tensor-parallel rank.

        These are the keys and values of its heads, or with MLA the latent if it is narrower.
        """
        keys_and_values = self.num_query_groups // tensor_size * self.key_value_size
        if self.multi_latent_attention:
            return min(self.kv_lora_rank + self.qk_pos_emb_head_dim, keys_and_values)
        return keys_and_values

    @property
    def expert_width(self) -> int:
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts instead of a single MLP."""
        return self.num_experts is not None and (not self.moe_layer_freq or self.moe_layer_freq[layer] == 1)

    @property
    def expert_layers(self) -> int:
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def rotary_size(self) -> int:
        """The number of rotated dimensions of a head."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_size * self.rotary_percent)

    @property
    def has_qk_norms(self) -> bool:
        return self.qk_layernorm or self.traits.qk_norm is not None

    @property
    def has_sinks(self) -> bool:
        return self.softmax_type == "learnable" or self.traits.sinks

    @property
    def has_qkv_bias(self) -> bool:
        return self.add_qkv_bias or self.traits.biases

    def has_rope(self, layer_number: int) -> bool:
        """Return whether a layer, counted from 1, applies RoPE."""
        return self.no_rope_freq is None or layer_number % self.no_rope_freq != 0

    def window_bases(self) -> list[tuple[int, float]]:
        """Return the table of `rope_window_bases`, sorted by window; raise UserError unless it has WINDOW:BASE."""
        table = []
        for word in self.rope_window_bases:
            window, _, base = word.partition(":")
            try:
                table.append((int(window), float(base)))
            except ValueError:
                raise UserError(f"rope_window_bases: got {word!r}, needs WINDOW:BASE, such as 1024:10000") from None
        return sorted(table)

    def rotary_base_at(self, window: int) -> float:
        """Return the base of the table's smallest window that is sufficient for a window, or `rotary_base`."""
        return next((base for upto, base in self.window_bases() if window <= upto), self.rotary_base)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the number of rows of the embedding, the same for every tensor-parallel size."""
        unit = self.make_vocab_size_divisible_by
        return -(-vocab_size // unit) * unit


@dataclass(frozen=True)
class ParallelConfig(_Section):
    """How the model and the batch are distributed over processes."""

    tensor_model_parallel_size: PositiveInt = _option(1, "TP: ranks that share each matrix")
    pipeline_model_parallel_size: PositiveInt = _option(1, "PP: ranks that share the layers")
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = _option(None, "interleaved pipeline: layers per chunk")
    pipeline_model_parallel_layout: PipelineLayout | None = _option(
        None, "unequal stages: Et*15|(t*16|)*6t*15L for 126 layers on PP 8 (E embedding, t layer, L loss)", "LAYOUT"
    )
    context_parallel_size: PositiveInt = _option(1, "CP: ranks that share each row")
    cp_policy: Literal["auto", "contiguous", "zigzag", "balanced"] = _option("auto", "which tokens each CP rank gets")
    cp_scheme: Literal["auto", "exchange", "ulysses"] = _option(
        "auto", "exchange: fetch the keys that are needed; ulysses: all-to-all from tokens to heads"
    )
    cp_row_cost: NonNegativeFloat = _option(
        64.0, "cost of moving a key for --cp-policy auto, in attention pairs (64: NVLink; 570: between nodes)"
    )
    cp_overlap_parts: PositiveInt | None = _option(
        None, "parts of the key heads whose exchange overlaps attention (default: 2 on cuda, 1 on cpu)"
    )
    expert_model_parallel_size: PositiveInt = _option(1, "EP: data- and context-parallel ranks that share the experts")
    moe_grouped_gemm: bool = _option(False, "compute a rank's experts in one grouped product (Transformer Engine)")
    sequence_parallel: bool = _option(False, "split activations outside the matrix products over TP ranks as well")
    tp_comm_overlap: bool = _option(False, "overlap tensor-parallel communication (Transformer Engine)")
    use_distributed_optimizer: bool | None = _option(
        None, "shard AdamW's state over data-parallel ranks (default: with several ranks on cuda)"
    )
    overlap_grad_reduce: bool | None = _option(
        None, "reduce gradients during the backward pass (default: with several ranks on cuda)"
    )
    overlap_param_gather: bool | None = _option(
        None, "gather parameters during the forward pass (default: if both of the above are on)"
    )
    recompute_granularity: Literal["full", "selective"] | None = _option(
        None, "recompute activations in the backward pass: whole layers or --recompute-modules"
    )
    recompute_modules: tuple[RecomputeModule, ...] = _option((), "what `selective` recomputes (default core_attn)")
    recompute_method: Literal["uniform", "block"] = _option("uniform", "which layers `full` recomputes")
    recompute_num_layers: PositiveInt = _option(1, "layers per recomputed group (uniform), or recomputed ones (block)")
    mlp_block_tokens: PositiveInt | None = _option(
        None, "compute the MLP in blocks of this many tokens, each recomputed in the backward pass"
    )
    offload_layer_inputs: bool = _option(False, "keep inputs of recomputed layers in host memory until backward")
    compile: bool = _option(False, "torch.compile the layers except attention, for small models")
    device: Literal["auto", "cpu", "cuda"] = _option(
        "auto", "auto: cuda if available, else cpu, but not in a Slurm job with GPUs"
    )
    attention_backend: Literal["auto", "flash_attn_4", "torch_varlen", "flash_attn", "te_thd", "reference"] = _option(
        "auto", "kernel of packed attention (auto: the best for each call)"
    )
    distributed_timeout_minutes: Minutes = _option(10, "time limit of a collective")
    watchdog_timeout: Seconds | None = _option(
        None,
        "seconds of a layer, a tensor of a checkpoint or a validation batch after which the run ends; 0: never "
        "(default: below the above)",
    )

    def overlap_parts(self, on_cuda: bool) -> int:
        """Return the parts of the key heads: as given, or 2 if a second stream can overlap them with attention."""
        return self.cp_overlap_parts or (2 if on_cuda else 1)

    def layers_of_chunks(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of each model chunk in the model's order; chunk i is on pipeline stage i modulo PP."""
        if self.pipeline_model_parallel_layout is not None:
            return read_layout(self.pipeline_model_parallel_layout)
        size = self.num_layers_per_virtual_pipeline_stage or num_layers // self.pipeline_model_parallel_size
        return (size,) * (num_layers // size)

    @property
    def is_interleaved(self) -> bool:
        """Whether a pipeline stage has several model chunks."""
        if self.pipeline_model_parallel_layout is None:
            return self.num_layers_per_virtual_pipeline_stage is not None
        return len(read_layout(self.pipeline_model_parallel_layout)) > self.pipeline_model_parallel_size

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The modules of each layer that are recomputed, in addition to the layers that `full` recomputes."""
        modules: tuple[str, ...] = ()
        if self.recompute_granularity == "selective":
            modules = self.recompute_modules or ("core_attn",)
        if self.mlp_block_tokens is not None:
            modules += ("mlp",)
        return modules

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks that hold one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass(frozen=True)
class DataConfig(_Section):
    """The training data, and how it is divided into rows."""

    data_path: tuple[str, ...] = _option((), "PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ..., of .bin/.idx data", "PREFIX")
    tokenizer_model: str | None = _option(None, "folder with tokenizer.json, or bytes", "TOKENIZER")
    split: str = _option("98,2,0", "shares of the documents for train,valid,test", "A,B,C")
    seq_length: PositiveInt = _option(512, "L, tokens per row")
    micro_batch_size: PositiveInt = _option(1, "rows per forward pass of one rank")
    global_batch_size: PositiveInt = _option(8, "rows per optimizer step")
    mixture: tuple[MixturePart, ...] = _option((), "YAML list of datasets, weights and packings; no data_path", "FILE")
    packing: Packing = _option("random", "how documents become rows; all but random need a plan of tools/pack_data.py")
    packing_options: tuple[str, ...] = _option((), "options of the packing (tools/pack_data.py --help)", "NAME=VALUE")
    long_share: PositiveFloat | None = _option(None, "upsample_long: share of each source's tokens in long documents")
    first_sample: NonNegativeInt = _option(0, "index of the first row, such as the number of rows another run used")
    balance_batches: bool = _option(False, "assign rows to ranks and micro-batches by the cost of their attention")
    valid_data_path: tuple[str, ...] = _option((), "validation data, instead of the second share of --split", "PREFIX")
    eod_mask_loss: bool = _option(False, "do not train on the token after a document's end")
    data_cache_path: str | None = _option(
        None, "folder of the orders of large data sets (default: beside the data, or else in the run)", "FOLDER"
    )

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        """The data sets that rows are drawn from: the mixture, or `data_path`, whose data sets are packed alike."""
        return self.mixture or self._parts("data_path")

    def _parts(self, option: Literal["data_path", "valid_data_path"]) -> tuple[MixturePart, ...]:
        options = self.packing_options
        if self.long_share is not None:
            options += (f"long_share={self.long_share}",)
        return parts_of_data_path(getattr(self, option), self.packing, options, name=option)

    @property
    def valid_parts(self) -> tuple[MixturePart, ...]:
        """The data sets of `valid_data_path`, packed as `data_path`; without it, the data sets of training."""
        if self.valid_data_path:
            return self._parts("valid_data_path")
        return self.parts


@dataclass(frozen=True)
class WindowConfig(_Section):
    """SkyLadder's attention window (arXiv 2503.15450)."""

    window_schedule: ScheduleKind = _option(ScheduleKind.CONSTANT, "how the window grows")
    window_start: PositiveInt = _option(32, "w_s, the first window in tokens")
    window_end: PositiveInt | None = _option(None, "w_e, the last window (default: seq_length)")
    window_rate: float | None = _option(None, "a, tokens of window per step (default 0.125)")
    window_expansion_fraction: float | None = _option(None, "share of train_iters that the expansion takes")
    window_round_to: int = _option(1024, "stepwise: windows are multiples of this")
    window_aligned: bool = _option(False, "stepwise: windows are window_end / 2^k instead")
    window_switch_step: int | None = _option(None, "continual: the first step with window_end")
    window_cycles: float | None = _option(
        None, "cycles: 1, 2, ... of cyclic_jump (1), 0.5, 1.5, ... of cyclic_gradual (0.5)"
    )
    window_mask: WindowMask = _option(
        "grid",
        "grid: blocks of w tokens, the window; sliding: each token and the w before it, the paper's formula; "
        "sliding_w: w tokens including itself, the authors' code",
    )
    document_mask: bool = _option(False, "attention stays inside a document (IntraDoc)")
    local_window_fixed: bool = _option(False, "--local-window from the first step, even above the schedule's window")


@dataclass(frozen=True)
class WeightingConfig(_Section):
    """Token weighting (arXiv 2503.09202): losses are weighted by how much long context helps to predict the token."""

    token_weighting: Literal["none", "unfrozen", "frozen", "dataset"] = _option(
        "none", "weights from the model itself (unfrozen), --score-store (frozen), or the dataset"
    )
    weight_score: Literal["abs", "ppmi", "npmi", "longce", "rho1", "focal", "mile", "exposure"] = _option(
        "abs", "score of a token: |PMI| of long and short context (abs), or another (docs/token-weighting.md)"
    )
    weight_post: Literal["dense", "sparse", "none"] = _option(
        "dense", "weights from scores: dense mixes with 1, sparse keeps the highest, none keeps the score"
    )
    weight_strength: float | None = _option(
        None, "lambda of dense (0.75), kappa of sparse (0.2; frozen 0.4), gamma of none (1)"
    )
    weight_clip: PositiveFloat | None = _option(None, "upper bound of the weights; longce's gamma (5)")
    weight_shift: Annotated[float, Ge(1)] | None = _option(None, "ppmi and npmi: k; ln k is subtracted from scores")
    exposure_tau: PositiveInt | None = _option(None, "exposure: least context of the tail (default L/4)")
    exposure_alpha: NonNegativeFloat = _option(0.15, "exposure: mean extra weight of the tail")
    exposure_gamma: NonNegativeFloat = _option(0.5, "exposure: power of a bucket's rarity in its extra weight")
    short_context: PositiveInt | None = _option(None, "unfrozen: n, tokens of the short context")
    short_stride: PositiveInt | None = _option(None, "unfrozen: s, tokens that each chunk of n scores (default 3n/4)")
    score_store: str | None = _option(None, "frozen: zarr store written by tools/score_tokens.py", "STORE")
    loss_denominator: Literal["tokens", "weights"] = _option("tokens", "divisor of the weighted sum of losses")

    @property
    def needs_short_losses(self) -> bool:
        """Whether the score compares two contexts or two models."""
        return self.weight_score not in ("focal", "mile", "exposure")

    @property
    def by_exposure(self) -> bool:
        """Whether weights follow from the positions of targets."""
        return self.token_weighting == "unfrozen" and self.weight_score == "exposure"

    @property
    def by_losses(self) -> bool:
        """Whether weights are computed from losses, within the step."""
        return self.token_weighting in ("unfrozen", "frozen") and not self.by_exposure

    @property
    def strength(self) -> float:
        """Lambda, kappa or gamma of `weight_post`: as given, or the paper's."""
        if self.weight_strength is not None:
            return self.weight_strength
        sparse = 0.4 if self.token_weighting == "frozen" else 0.2
        return {"dense": 0.75, "sparse": sparse, "none": 1.0}[self.weight_post]

    def short(self) -> ShortContext:
        """Return how rows are divided for the short context; `short_context` must be set."""
        assert self.short_context is not None
        return ShortContext(self.short_context, self.short_stride or max(self.short_context * 3 // 4, 1))


MomentType = Literal["fp32", "fp16", "bf16", "fp8"]


@dataclass(frozen=True)
class OptimizerConfig(_Section):
    """AdamW, or Muon for the matrices, and the learning rate of both."""

    optimizer: Literal["adam", "muon"] = _option(
        "adam", "adam: AdamW; muon: Muon for matrices, AdamW for embedding, output matrix, norms and biases"
    )
    lr: PositiveFloat = _option(4e-4, "peak learning rate")
    min_lr: NonNegativeFloat = _option(0.0, "learning rate at the end of the decay")
    lr_decay_style: DecayStyle = _option("cosine", "constant, linear, cosine or WSD")
    lr_warmup_iters: Step = _option(0, "W, steps of linear warm-up: step t has lr * (t + 1) / W")
    lr_warmup_from_zero: bool = _option(False, "warm-up: step t has lr * t / W, as in the papers' code")
    lr_decay_iters: Steps | None = _option(None, "step at which min_lr is reached (default: the last step)")
    lr_wsd_decay_iters: Step = _option(0, "WSD: steps of the final decay")
    lr_first_step: Step = _option(0, "first step of the schedule, such as the steps another run took")
    weight_decay: NonNegativeFloat = _option(0.1, "decoupled weight decay of the matrices")
    weight_decay_all: bool = _option(False, "apply weight decay to norms and biases too, as in TinyLlama's code")
    adam_beta1: Decay = _option(0.9, "Adam's first-moment decay")
    adam_beta2: Decay = _option(0.95, "Adam's second-moment decay")
    adam_eps: PositiveFloat = _option(1e-8, "Adam's epsilon")
    muon_momentum: Decay = _option(0.95, "muon: decay of the momentum")
    muon_nesterov: bool = _option(False, "muon: Nesterov momentum")
    muon_split_qkv: bool = _option(True, "muon: orthogonalize queries, keys and values apart")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = _option(
        "spectral", "muon: factor of a matrix of O x I: sqrt(max(O, I)), sqrt(O / I), or sqrt(max(O / I, 1))"
    )
    muon_extra_scale_factor: PositiveFloat = _option(1.0, "muon: another factor; 0.2 makes updates as large as AdamW's")
    muon_num_ns_steps: PositiveInt = _option(5, "muon: Newton-Schulz iterations of a step")
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol"] = _option(
        "quintic", "muon: coefficients of the iterations"
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = _option(
        "medium", "muon: precision of the iterations: medium is bf16, high TF32, highest fp32"
    )
    clip_grad: NonNegativeFloat = _option(1.0, "limit of the global gradient norm; 0: none")
    use_precision_aware_optimizer: bool = _option(False, "optimizer with the types below (Transformer Engine)")
    main_grads_dtype: Literal["fp32", "bf16"] = _option("fp32", "type of the gradients")
    main_params_dtype: Literal["fp32", "fp16"] = _option("fp32", "type of the master weights")
    exp_avg_dtype: MomentType = _option("fp32", "type of Adam's first moment")
    exp_avg_sq_dtype: MomentType = _option("fp32", "type of Adam's second moment")
    optimizer_cpu_offload: bool = _option(False, "keep optimizer state on the host")
    optimizer_offload_fraction: Share = _option(1.0, "share of the optimizer state that is offloaded")


@dataclass(frozen=True)
class TrainingConfig(_Section):
    """The length, precision, evaluation and stopping rules of training."""

    train_iters: Steps = _option(100, "optimizer steps")
    seed: Seed = _option(1234, "seed of weights, data order and dropout, below 2^64")
    bf16: bool = _option(False, "compute in bfloat16 with fp32 master weights and gradients")
    fp8_format: Literal["hybrid", "e4m3"] | None = _option(
        None, "matrix products of the layers in fp8 (Transformer Engine); hybrid: gradients in e5m2"
    )
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = _option(
        "tensorwise", "scaling of fp8: each tensor, or blocks; mxfp8 needs Blackwell"
    )
    spike_window: NonNegativeInt = _option(128, "preceding losses that a loss is compared with; 0: no spike detection")
    spike_deviations: PositiveFloat = _option(7.0, "a loss this many standard deviations above their mean is a spike")
    on_spike: Literal["continue", "skip", "stop"] = _option(
        "continue", "after a loss spike: train on it, skip the update, or end the run (status 86)"
    )
    on_non_finite: Literal["stop", "skip"] = _option(
        "stop", "after a loss or gradient norm that is not finite: end the run (status 86) or skip the update"
    )
    skip_limit: PositiveInt = _option(10, "consecutive skipped steps after which the run ends (status 86)")
    loss_block_tokens: PositiveInt = _option(4096, "number of tokens whose logits exist at a time")
    z_loss: NonNegativeFloat = _option(0.0, "coefficient of the squared log partition in the loss")
    moe_aux_loss_coeff: NonNegativeFloat = _option(0.0, "coefficient of the load-balancing loss of the experts")
    moe_router_load_balancing_type: Literal["seq_aux_loss", "aux_loss"] = _option(
        "seq_aux_loss", "balance the tokens of each row, or of each micro-batch"
    )
    moe_router_bias_update_rate: NonNegativeFloat = _option(1e-3, "by how much a step changes each expert's bias")
    eval_interval: NonNegativeInt = _option(0, "steps between evaluations; 0: none")
    eval_iters: PositiveInt = _option(4, "global batches of validation rows per evaluation")
    eval_lengths: tuple[PositiveInt, ...] = _option((), "context lengths to evaluate at (default: seq_length)")
    eval_packing: Literal["random", "same"] = _option("random", "packing of validation rows; same: as the run's")
    eval_document_mask: bool = _option(False, "evaluate inside documents instead of across them")
    eval_stride: PositiveInt | None = _option(None, "evaluate in windows that slide by this (default: blocks)")
    lm_eval_interval: NonNegativeInt = _option(0, "steps between runs of lm-eval on the model in training; 0: none")
    lm_eval_tasks: tuple[str, ...] = _option((), "its tasks and groups (`lm-eval ls tasks`)", "TASK")
    lm_eval_limit: PositiveInt | None = _option(None, "questions of each task and length (default: all)")
    lm_eval_lengths: tuple[PositiveInt, ...] = _option((), "lengths of RULER's texts (default: lm-eval's)")
    lm_eval_include_path: Folder | None = _option(None, "folder with your own task files, whose code is run", "DIR")
    lm_eval_batch_size: PositiveInt = _option(8, "texts at a time on each copy of the model")
    early_stopping_patience: NonNegativeInt = _option(
        0, "evaluations without a lower validation loss after which the run ends; 0: never"
    )
    early_stopping_delta: NonNegativeFloat = _option(0.0, "nats by which a loss must be below the lowest to count")

    @property
    def fp8_multiple(self) -> int:
        """The number that both dimensions of every matrix product must be a multiple of; 1 without fp8."""
        if self.fp8_format is None:
            return 1
        return {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}[self.fp8_recipe]

    @property
    def fp8_gathered_multiple(self) -> int:
        """The rows and the width of a rank's tensor must be multiples of this where sequence-parallel ranks gather it.

        It is 1 without fp8. Transformer Engine 2.9 to 2.11 gathers only whole blocks.
        """
        if self.fp8_format is None:
            return 1
        return {"tensorwise": 16, "blockwise": 128, "mxfp8": 32}[self.fp8_recipe]


@dataclass(frozen=True)
class CheckpointConfig(_Section):
    """The checkpoints and folders that a run writes and reads."""

    save: Folder | None = _option(None, "run folder: checkpoints, metrics, report", "RUN")
    load: Folder | None = _option(None, "run folder to continue from, or one of its checkpoint folders", "RUN")
    init_from: Folder | None = _option(None, "initial weights: a Hugging Face model, a run or a checkpoint", "FOLDER")
    init_optimizer: bool = _option(False, "start with the optimizer state of --init-from, a run or checkpoint, as well")
    load_if_present: bool = _option(False, "start from scratch if --load has none; given again, continue --save")
    load_latest_complete: bool = _option(False, "if the newest checkpoint is damaged, load the one before it")
    verify_load: bool = _option(True, "compare each file of a checkpoint with its checksum before loading")
    override: tuple[str, ...] = _option((), "options that may differ from the checkpoint's", "OPTION")
    save_interval: NonNegativeInt = _option(0, "steps between checkpoints; 0: only at the end and on a signal")
    save_seconds: NonNegativeFloat = _option(0.0, "seconds between checkpoints, in addition to save_interval; 0: none")
    async_save: bool = _option(False, "continue training while a checkpoint is written")
    keep_last: NonNegativeInt = _option(0, "number of newest checkpoints to keep; 0: all")
    keep_every: NonNegativeInt = _option(0, "with keep_last: also keep checkpoints of every n-th step; 0: none")
    dump_trajectory: Folder | None = _option(None, "folder for everything that reproduces the run elsewhere", "FOLDER")


# addresses and permissions of one start, which a configuration to resume with must not repeat
OF_ONE_START = (
    "load",
    "load_if_present",
    "load_latest_complete",
    "verify_load",
    "override",
    "init_from",
    "init_optimizer",
    "dump_trajectory",
)


@dataclass(frozen=True)
class LoggingConfig(_Section):
    """Where progress is logged, in addition to metrics.jsonl."""

    tensorboard: bool = _option(True, "write TensorBoard events")
    wandb_project: str | None = _option(None, "log to this Weights & Biases project", "NAME")
    wandb_exp_name: str | None = _option(None, "name of the Weights & Biases run", "NAME")
    log_interval: PositiveInt = _option(10, "at most this many steps between two progress lines in a log file")
    attention_health_interval: NonNegativeInt = _option(0, "steps between measurements of attention; 0: none")
    attention_health_queries: PositiveInt = _option(64, "queries of a step's first micro-batch that are measured")
    attention_s_max_warning: PositiveFloat = _option(100.0, "warn if a layer's largest score is above this (MuonClip)")


@dataclass(frozen=True)
class Config(_Section):
    """A complete configuration. A field belongs to only one section, so a flag needs no prefix."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    weighting: WeightingConfig = field(default_factory=WeightingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def window_end(self) -> int:
        """w_e, the last window in tokens: as given, or the whole row."""
        return self.window.window_end or self.data.seq_length

    @property
    def balances_rows(self) -> bool:
        """Whether experts are balanced over each row; otherwise over each micro-batch."""
        return self.training.moe_router_load_balancing_type == "seq_aux_loss"

    @property
    def lr_decay_steps(self) -> int:
        """The step at which the learning rate reaches `min_lr`: as given, or the run's last."""
        optimizer = self.optimizer
        return optimizer.lr_decay_iters or optimizer.lr_first_step + self.training.train_iters

    def window_schedule(self) -> WindowSchedule:
        window = self.window
        return build_schedule(
            window.window_schedule,
            start=self.window_end if window.window_schedule is ScheduleKind.CONSTANT else window.window_start,
            end=self.window_end,
            rate=window.window_rate,
            expansion_fraction=window.window_expansion_fraction,
            total_steps=self.training.train_iters,
            round_to=window.window_round_to,
            aligned=window.window_aligned,
            switch_step=window.window_switch_step,
            cycles=window.window_cycles,
        )

    def mask_options(self) -> MaskOptions:
        return MaskOptions(
            document_mask=self.window.document_mask,
            window_mask=self.window.window_mask,
            local_window=self.model.local_window,
            global_every=self.model.window_attn_skip_freq,
            num_layers=self.model.num_layers,
            local_fixed=self.window.local_window_fixed,
        )

    def learning_rate_schedule(self) -> LearningRateSchedule:
        optimizer = self.optimizer
        return LearningRateSchedule(
            peak=optimizer.lr,
            minimum=optimizer.min_lr,
            warmup_steps=optimizer.lr_warmup_iters,
            from_zero=optimizer.lr_warmup_from_zero,
            decay_steps=self.lr_decay_steps,
            style=optimizer.lr_decay_style,
            wsd_steps=optimizer.lr_wsd_decay_iters,
            first_step=optimizer.lr_first_step,
        )

    @property
    def samples(self) -> int:
        """The end of the run's samples, which begin at `first_sample`."""
        return self.data.first_sample + self.training.train_iters * self.data.global_batch_size

    def gradient_sharing(self, on_cuda: bool, world_size: int) -> GradientSharing:
        """Return how ranks that hold the same weights share gradients and optimizer state."""
        parallel = self.parallel
        replicas = world_size // parallel.tensor_model_parallel_size // parallel.pipeline_model_parallel_size
        several = on_cuda and replicas > 1
        distributed = parallel.use_distributed_optimizer
        if distributed is None:  # the precision-aware optimizer needs sharded state
            shards = several and self.optimizer.optimizer == "adam"
            distributed = self.optimizer.use_precision_aware_optimizer or shards
        reduce = parallel.overlap_grad_reduce
        if reduce is None:
            reduce = several
        gather = parallel.overlap_param_gather
        if gather is None:
            gather = several and distributed and reduce
        return GradientSharing(distributed, reduce, gather)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of replicas of the model among `world_size` processes."""
        return world_size // self.parallel.model_parallel_size

    def microbatches(self, world_size: int) -> int:
        """Return the number of micro-batches of one rank per optimizer step."""
        return self.data.global_batch_size // (self.data.micro_batch_size * self.data_parallel_size(world_size))
