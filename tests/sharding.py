"""One tensor-parallel rank's part of a whole tensor, cut from it at once: what is filled piece by piece is compared."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.checkpoint.hf.names import Cut, Parameter
from megatron_ext.config import ModelConfig


def shard(parameter: Parameter, full: Sequence[Tensor], model: ModelConfig, tp_rank: int, tp_size: int) -> Tensor:
    """Cut one TP rank's Megatron tensor from the full Hugging Face tensors of a row of the table."""
    if parameter.cut is Cut.WHOLE:
        return full[0]
    if parameter.cut is Cut.COLUMNS:
        return full[0].chunk(tp_size, dim=1)[tp_rank]
    if parameter.cut is Cut.VOCABULARY:
        missing = model.padded_vocab_size(len(full[0])) - len(full[0])
        padded = torch.cat([full[0], full[0].new_zeros(missing, *full[0].shape[1:])])
        return padded.chunk(tp_size)[tp_rank]
    if parameter.cut is Cut.QKV:
        by_group = [part.unflatten(0, (model.num_query_groups, -1)) for part in full]
        return torch.cat(by_group, dim=1).chunk(tp_size)[tp_rank].flatten(0, 1)
    return torch.cat([part.chunk(tp_size)[tp_rank] for part in full])
