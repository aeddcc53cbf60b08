"""Scale down a recipe to its twin: a run with the same features that a CPU finishes in about a minute.

Lengths and windows are scaled by one factor, steps by another, so that the schedules keep their form: the window is
full at the same fraction of the run, and the short context is the same fraction of the row. Schedule, masks, packing,
stages, rotary options, scores and local layers are unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.config import CheckpointConfig, Config, DataConfig, ModelConfig, ParallelConfig, WindowConfig

LONGEST, STEPS, ROWS, LAYERS, HEADS = 512, 24, 4, 6, 4
_LENGTHS = ("below", "threshold", "shortest", "first_tokens")  # options of packing policies that count tokens


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
    steps = max(scale.step(config.training.train_iters), 4)
    optimizer, weighting = config.optimizer, config.weighting
    return replace(
        config,
        model=_model(config.model, scale),
        parallel=ParallelConfig(
            context_parallel_size=min(config.parallel.context_parallel_size, 2),
            recompute_granularity=config.parallel.recompute_granularity,
            use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        ),
        data=_data(config.data, scale, data_path, tokenizer),
        window=_window(config.window, scale),
        weighting=replace(
            weighting,
            short_context=scale.length(weighting.short_context) if weighting.short_context else None,
            short_stride=scale.length(weighting.short_stride) if weighting.short_stride else None,
            score_store=score_store if weighting.score_store else None,
        ),
        optimizer=replace(
            optimizer,
            lr=2e-3,
            min_lr=2e-3 * optimizer.min_lr / optimizer.lr,
            lr_warmup_iters=scale.step(optimizer.lr_warmup_iters),
            lr_decay_iters=scale.step(optimizer.lr_decay_iters) if optimizer.lr_decay_iters else None,
            lr_first_step=scale.step(optimizer.lr_first_step),
            adam_eps=1e-6,
        ),
        training=replace(
            config.training,
            train_iters=steps,
            bf16=False,
            loss_block_tokens=1024,
            eval_interval=0,
            eval_lengths=(),
            eval_stride=None,
        ),
        checkpoint=CheckpointConfig(),
    )


def _model(model: ModelConfig, scale: Scale) -> ModelConfig:
    groups = max(HEADS * model.num_query_groups // model.num_attention_heads, 1)
    return replace(
        model,
        model_preset=None,
        num_layers=LAYERS,
        hidden_size=16 * HEADS,
        ffn_hidden_size=160,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        kv_channels=None,
        num_experts=4 if model.num_experts else None,
        moe_router_topk=2,
        moe_ffn_hidden_size=None,
        moe_shared_expert_intermediate_size=160 if model.moe_shared_expert_intermediate_size else None,
        moe_layer_freq=(0,) + (1,) * (LAYERS - 1) if model.moe_layer_freq else (),
        moe_router_num_groups=2 if model.moe_router_num_groups else None,
        moe_router_group_topk=1 if model.moe_router_group_topk else None,
        query_pre_attn_scalar=None,
        **_latent(model),
        vocab_size=None,
        init_method_std=0.1,  # a narrow model with few steps learns better from larger weights
        init_scheme="megatron",
        local_window=scale.length(model.local_window) if model.local_window else None,
        rope_original_length=scale.length(model.rope_original_length) if model.rope_original_length else None,
        rope_window_bases=tuple(f"{scale.length(window)}:{base:g}" for window, base in model.window_bases()),
    )


def _latent(model: ModelConfig) -> dict[str, Any]:
    if not model.multi_latent_attention:
        return {}
    sizes = {"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    return sizes | {"q_lora_rank": 48 if model.q_lora_rank else None}


def _data(data: DataConfig, scale: Scale, data_path: str, tokenizer: str) -> DataConfig:
    def smaller(options: tuple[str, ...]) -> tuple[str, ...]:
        """Scale down the options of a packing policy that count tokens or rows."""
        shrunk: dict[str, str] = dict(option.split("=") for option in options)
        for name in shrunk.keys() & set(_LENGTHS):
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
    return replace(
        data,
        data_path=() if parts else (data_path,),
        mixture=parts,
        tokenizer_model=tokenizer,
        split="100,0,0",
        seq_length=scale.length(data.seq_length),
        micro_batch_size=1,
        global_batch_size=ROWS,
        packing_options=smaller(data.packing_options),
        first_sample=ROWS * scale.step(data.first_sample // data.global_batch_size),
        valid_data_path=(),
    )


def _window(window: WindowConfig, scale: Scale) -> WindowConfig:
    changed: dict[str, Any] = {
        "window_start": scale.length(window.window_start),
        "window_round_to": scale.length(window.window_round_to),
    }
    if window.window_end is not None:
        changed["window_end"] = scale.length(window.window_end)
    if window.window_expansion_fraction is None and window.window_schedule not in ("constant", "continual"):
        # in tokens per step: multiplied by the factor of the steps, divided by that of the lengths
        changed["window_rate"] = (window.window_rate or 0.125) * scale.steps / scale.lengths
    if window.window_switch_step is not None:
        changed["window_switch_step"] = scale.step(window.window_switch_step)
    return replace(window, **changed)
