"""Save and load the scales of fp8's delayed recipe as tensors, which Transformer Engine saves as pickles.

    fp8.layers.<layer>.<module>.scale_fwd, .scale_bwd                  float32 [tensors of the matrix product]
    fp8.layers.<layer>.<module>.amax_history_fwd, .amax_history_bwd    float32 [length of the history, tensors]

All ranks that hold a layer have the same values, because Transformer Engine reduces them. The other recipes compute
their scales from the current tensors and have no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor

from megatron_ext.checkpoint.tensors import Shard
from megatron_ext.config import Config, TrainingConfig
from megatron_ext.config.arguments import from_dict
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.parallel import Ranks


def has_state(training: TrainingConfig) -> bool:
    """Return whether the next step depends on the scales of past steps."""
    return training.fp8_format is not None and training.fp8_recipe == "delayed"


def is_saved(manifest_config: Mapping[str, Any], config: Config) -> bool:
    """Return whether a checkpoint has the fp8 state that a run needs; without it the scales are reset."""
    return has_state(config.training) and has_state(from_dict(dict(manifest_config)).training)


def shards(chunks: Sequence[PackedGPT], ranks: Ranks) -> list[Shard]:
    """Return the state as shards that share Transformer Engine's memory, allocated if necessary."""
    first = ranks.tensor == 0 and dist.get_rank(ranks.data_context_group) == 0
    return [
        Shard.of(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), writes=first)
        for chunk in chunks
        for name, tensor in _tensors(chunk)
    ]


def _tensors(chunk: PackedGPT) -> Iterator[tuple[str, Tensor]]:
    for layer in chunk.decoder.layers:
        for name, module in layer.named_modules():
            if not hasattr(module, "fp8_meta"):
                continue
            if not module.fp8_meta_tensors_initialized:  # before the first forward pass
                recipe = get_fp8_recipe(chunk.config)
                module.fp8_meta |= {"num_gemms": 1, "recipe": recipe}
                module.init_fp8_meta_tensors(recipe)
            for direction in ("fwd", "bwd"):
                scaling = module.fp8_meta[f"scaling_{direction}"]
                prefix = f"fp8.layers.{layer.layer_number - 1}.{name}"
                yield f"{prefix}.scale_{direction}", scaling.scale
                yield f"{prefix}.amax_history_{direction}", scaling.amax_history
