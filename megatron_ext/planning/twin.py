"""Scale down a recipe to its twin: a run with the same features that a CPU finishes in about a minute.

Lengths and windows are scaled by one factor, steps by another, so that the schedules keep their form: the window is
full at the same fraction of the run, and the short context is the same fraction of the row. Schedule, masks, packing,
stages, rotary options, scores and local layers are unchanged.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.config import CheckpointConfig, Config, DataConfig, ParallelConfig

LONGEST = 512
STEPS = 24
ROWS = 4
LAYERS = 6
HEADS = 4
# options by section: some count tokens, some count steps, some have the same value in every twin
_LENGTHS = {
    "model": ("local_window", "rope_original_length"),
    "data": ("seq_length",),
    "window": ("window_start", "window_end", "window_round_to"),
    "weighting": ("short_context", "short_stride", "exposure_tau"),
}
_STEPS = {
    "window": ("window_switch_step",),
    "optimizer": ("lr_warmup_iters", "lr_decay_iters", "lr_first_step"),
    "training": ("train_iters",),
}
_FIXED: dict[str, dict[str, Any]] = {
    "model": {
        "model_preset": None, "num_layers": LAYERS, "hidden_size": 16 * HEADS, "ffn_hidden_size": 160,
        "num_attention_heads": HEADS, "kv_channels": None, "query_pre_attn_scalar": None, "vocab_size": None,
        "moe_router_topk": 2, "moe_ffn_hidden_size": None, "init_scheme": "megatron",
        "init_method_std": 0.1,  # larger than in recipes, because a twin is narrow and has few steps
    },
    "data": {"split": "100,0,0", "micro_batch_size": 1, "global_batch_size": ROWS, "valid_data_path": ()},
    "optimizer": {"lr": 2e-3, "adam_eps": 1e-6},
    "training": {"bf16": False, "loss_block_tokens": 1024, "eval_interval": 0, "eval_lengths": (), "eval_stride": None,
        "lm_eval_interval": 0, "lm_eval_tasks": (), "lm_eval_limit": None, "lm_eval_lengths": (),
        "lm_eval_include_path": None, "lm_eval_batch_size": 8,
    },
}  # fmt: skip
# sizes of a model's features; a twin has the features that the recipe has
_SIZES = {
    "num_experts": 4, "moe_shared_expert_intermediate_size": 160, "moe_layer_freq": (0,) + (1,) * (LAYERS - 1),
    "moe_router_num_groups": 2, "moe_router_group_topk": 1, "q_lora_rank": 48,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
_PACKING_LENGTHS = ("below", "threshold", "shortest", "first_tokens")  # options of packing policies that count tokens


@dataclass(frozen=True)
class Scale:
    """Tokens and steps of the recipe per token and step of the twin."""

    lengths: int
    steps: float

    def length(self, tokens: int) -> int:
        """Scale a length or window; at least one token is left."""
        return max(tokens // self.lengths, 1)

    def step(self, steps: int) -> int:
        """Scale a number of steps."""
        return round(steps / self.steps)


def scale_of(configs: list[Config]) -> Scale:
    """Choose the scale at which the longest row has `LONGEST` tokens and all stages have about `STEPS` steps."""
    longest = max(config.data.seq_length for config in configs)
    return Scale(max(longest // LONGEST, 1), max(sum(config.training.train_iters for config in configs) / STEPS, 1.0))


def twin(config: Config, scale: Scale, data_path: str, tokenizer: str, score_store: str) -> Config:
    """Scale down the configuration of one stage; the data set, its tokenizer and its scores replace the recipe's."""
    changed = {section: dict(_FIXED.get(section, {})) for section in vars(config)}
    for scaled, options in ((scale.length, _LENGTHS), (scale.step, _STEPS)):
        for section, names in options.items():
            values = {name: getattr(getattr(config, section), name) for name in names}
            changed[section] |= {name: scaled(value) for name, value in values.items() if value}

    model = config.model
    window = config.window
    optimizer = config.optimizer
    changed["model"] |= {name: size for name, size in _SIZES.items() if getattr(model, name)}
    if model.multi_latent_attention:
        changed["model"] |= _LATENT
    changed["model"] |= {
        "num_query_groups": max(HEADS * model.num_query_groups // model.num_attention_heads, 1),
        "rope_window_bases": tuple(f"{scale.length(upto)}:{base:g}" for upto, base in model.window_bases()),
    }
    if window.window_expansion_fraction is None and window.window_schedule not in ("constant", "continual"):
        # in tokens per step: multiplied by the factor of the steps, divided by the factor of the lengths
        changed["window"]["window_rate"] = (window.window_rate or 0.125) * scale.steps / scale.lengths
    changed["weighting"]["score_store"] = score_store if config.weighting.score_store else None
    changed["optimizer"]["min_lr"] = changed["optimizer"]["lr"] * optimizer.min_lr / optimizer.lr
    changed["training"]["train_iters"] = max(changed["training"]["train_iters"], 4)
    changed["data"] |= _data(config.data, scale, data_path) | {"tokenizer_model": tokenizer}

    sections = {name: replace(section, **changed[name]) for name, section in vars(config).items()}
    parallel = ParallelConfig(
        context_parallel_size=min(config.parallel.context_parallel_size, 2),
        recompute_granularity=config.parallel.recompute_granularity,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
    )
    return Config(**sections | {"parallel": parallel, "checkpoint": CheckpointConfig()})


def _data(data: DataConfig, scale: Scale, data_path: str) -> dict[str, Any]:
    def smaller(options: tuple[str, ...]) -> tuple[str, ...]:
        shrunk: dict[str, str] = dict(option.split("=") for option in options)
        for name in shrunk.keys() & set(_PACKING_LENGTHS):
            shrunk[name] = str(scale.length(int(shrunk[name])))
        if "rows" in shrunk:  # rows of the whole run
            shrunk["rows"] = str(ROWS * scale.step(int(shrunk["rows"]) // data.global_batch_size))
        if "batch_rows" in shrunk:
            shrunk["batch_rows"] = str(ROWS)
        return tuple(f"{name}={value}" for name, value in shrunk.items())

    parts = tuple(
        replace(
            part,
            prefix=data_path,
            packing_options=smaller(part.packing_options),
            length=scale.length(part.length) if part.length else None,
        )
        for part in data.mixture
    )
    return {
        "data_path": () if parts else (data_path,),
        "mixture": parts,
        "packing_options": smaller(data.packing_options),
        "first_sample": ROWS * scale.step(data.first_sample // data.global_batch_size),
    }
