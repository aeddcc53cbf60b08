"""Fill in defaults that depend on other options, so that configurations with the same result compare equal.

    window_end    None -> 512            omitted
    data_path     x    -> 1.0 x          several notations
    data_path 2 a 2 b  -> 0.5 a 0.5 b

The vocabulary size stays as written, because computing it would need the tokenizer.
"""

from dataclasses import replace

from megatron_ext.config import Config, DataConfig, ModelConfig, WeightingConfig, WindowConfig
from megatron_ext.config.mixture import MixturePart, parse_shares
from megatron_ext.data.packing.policies import check_options
from megatron_ext.data.rows.blend import scaled
from megatron_ext.schedule import ScheduleKind


def effective(config: Config) -> Config:
    """Return the configuration with effective values; it must satisfy `checks.check`."""
    return replace(
        config,
        model=_model(config.model),
        window=_window(config),
        weighting=_weighting(config),
        optimizer=replace(config.optimizer, lr_decay_iters=config.lr_decay_steps),
        data=_data(config.data),
    )


def _window(config: Config) -> WindowConfig:
    """Fill in the defaults of `build_schedule`."""
    window = config.window
    rate = window.window_rate
    if rate is None and window.window_expansion_fraction is None:
        rate = 1 / 8
    cycles = window.window_cycles
    if cycles is None:
        cycles = 0.5 if window.window_schedule is ScheduleKind.CYCLIC_GRADUAL else 1
    return replace(window, window_end=config.window_end, window_rate=rate, window_cycles=cycles)


def _weighting(config: Config) -> WeightingConfig:
    """Fill in the defaults of `weigh_rows` and `exposure_rows`."""
    weighting = config.weighting
    clip = weighting.weight_clip
    if weighting.weight_score == "longce":
        clip = clip or 5.0
    stride = None
    if weighting.short_context is not None:
        stride = weighting.short().stride
    return replace(
        weighting,
        weight_strength=weighting.strength,
        weight_clip=clip,
        weight_shift=weighting.weight_shift or 1.0,
        exposure_tau=weighting.exposure_tau or config.data.seq_length // 4,
        short_stride=stride,
    )


def _model(model: ModelConfig) -> ModelConfig:
    if not model.multi_latent_attention:
        model = replace(model, kv_channels=model.head_size)
    if model.vocab_size is not None:  # checkpoints store the padded size
        model = replace(model, make_vocab_size_divisible_by=model.padded_vocab_size(model.vocab_size))
    if model.num_experts is None:
        return model
    dense = model.ffn_hidden_size if model.expert_layers < model.num_layers else model.expert_width
    return replace(model, moe_ffn_hidden_size=model.expert_width, ffn_hidden_size=dense)


def _data(data: DataConfig) -> DataConfig:
    if not (data.data_path or data.mixture):  # an imported model, which was not trained here
        return data
    weights = scaled([part.weight for part in data.parts])  # only ratios matter
    parts: tuple[MixturePart, ...] = ()
    for part, weight in zip(data.parts, weights, strict=True):
        length = part.length or data.seq_length
        chosen = sorted(check_options(part.packing, part.options, length).options.items())
        spelled = tuple(f"{name}={value!r}" for name, value in chosen)
        parts += (replace(part, name=part.label, length=length, weight=weight, packing_options=spelled),)
    packing = parts[0].packing
    options = parts[0].packing_options
    if any((part.packing, part.packing_options) != (packing, options) for part in parts):
        packing = "random"
        options = ()
    shares = parse_shares(data.split)
    return replace(
        data,
        data_path=tuple(word for part in parts for word in (repr(part.weight), part.prefix)),
        mixture=parts,
        packing=packing,
        packing_options=options,
        long_share=None,  # included in these options
        split=",".join(str(share / sum(shares)) for share in shares),
    )
