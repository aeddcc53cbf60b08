"""Fill in defaults that depend on other options, so that configurations with the same result compare equal.

    window_end    None -> 512            omitted
    data_path     x    -> 1.0 x          several notations
    data_path 2 a 2 b  -> 0.5 a 0.5 b

The vocabulary size stays as written, because computing it would need the tokenizer.
"""

from dataclasses import replace

from megatron_ext.config import Config, DataConfig, ModelConfig
from megatron_ext.config.mixture import MixturePart, parse_shares
from megatron_ext.data.packing.policies import check_options
from megatron_ext.data.rows.blend import scaled


def effective(config: Config) -> Config:
    """Return the configuration with effective values; it must satisfy `checks.check`."""
    weighting = config.weighting
    return replace(
        config,
        model=_model(config.model),
        window=replace(config.window, window_end=config.window_end),
        weighting=replace(
            weighting,
            weight_strength=weighting.strength,
            short_stride=None if weighting.short_context is None else weighting.short().stride,
        ),
        optimizer=replace(config.optimizer, lr_decay_iters=config.lr_decay_steps),
        data=_data(config.data),
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
