"""A finished model opened to be asked, not trained: by one process or by several."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config, DataConfig, ParallelConfig, TrainingConfig, WindowConfig
from megatron_ext.config.expert_checks import check_same_texts
from megatron_ext.config.validation import check
from megatron_ext.engine import compat, parallel, platform
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.state import load_weights
from megatron_ext.launch import read_launch
from megatron_ext.rope import follows_text

logger = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, eq=False)
class Opened:
    """Holds a model whose weights are loaded.

    Attributes:
        pretrained: what it is.
        config: how it computes.
        vocab_size: its token ids.
        ranks: where this process stands.
        where: what it computes on.
        chunks: the layers of this process, in evaluation mode.
    """

    pretrained: Pretrained
    config: Config
    vocab_size: int
    ranks: parallel.Ranks
    where: platform.Platform
    chunks: list[PackedGPT]

    @property
    def follows_text(self) -> bool:
        """Whether its rotary angles go with the length of each text."""
        return follows_text(self.pretrained.model, self.pretrained.length or 0)


@contextmanager
def opened(pretrained: Pretrained, processes: ParallelConfig, length: int, dtype: Dtype = "auto") -> Iterator[Opened]:
    """Load a model's weights under any layout, and take the groups down in the end; all processes call it.

    Args:
        pretrained: a Hugging Face folder or a checkpoint of any layout.
        processes: how they share the model.
        length: tokens of a text, the most that it will see.
        dtype: in which it computes; auto is bfloat16 on CUDA, whose kernels take no float32, and float32 on a CPU.

    Raises:
        UserError: a model that these processes cannot share, or one that cannot be read.
    """
    compat.check_version()
    launch = read_launch(os.environ)
    vocab_size = pretrained.model.vocab_size
    assert vocab_size is not None
    where = platform.choose(processes.device)
    half = where.device.type == "cuda" if dtype == "auto" else dtype == "bfloat16"
    unit = processes.tensor_model_parallel_size * processes.context_parallel_size
    pipeline = processes.pipeline_model_parallel_size
    model = replace(pretrained.at(length), hidden_dropout=0.0)
    divisible_by = model.make_vocab_size_divisible_by
    if divisible_by % processes.tensor_model_parallel_size:
        model = replace(model, make_vocab_size_divisible_by=divisible_by * processes.tensor_model_parallel_size)
    config = Config(
        model=model,
        # there is no data set and no global batch: these stand for what every layout takes
        data=DataConfig(
            data_path=("none",),
            seq_length=-(-length // unit) * unit,
            global_batch_size=launch.world_size * pipeline,
        ),
        window=WindowConfig(window_start=1, document_mask=True),
        parallel=replace(processes, recompute_granularity=None),
        training=TrainingConfig(bf16=half),
    )
    check(config, launch.world_size)
    check_same_texts(config.parallel)
    ranks = parallel.start(config.parallel, model.num_layers, where, config.training.seed)
    chunks = build_chunks(config, vocab_size, where)
    load_weights(chunks, pretrained, ranks)
    yield Opened(pretrained, config, vocab_size, ranks, where, [chunk.eval() for chunk in chunks])
    # not after an error: where it is one process's alone, the others would not come
    parallel.finish_stage()


def leave() -> None:
    """Leave the other processes, when no model is open any more."""
    dist.destroy_process_group()


def warn_beyond_training(pretrained: Pretrained, length: int) -> bool:
    """Log a warning where texts are longer than those that a model was trained on; whether they are."""
    trained = pretrained.length
    beyond = trained is not None and length > trained
    if beyond:
        logger.warning(
            "length: %d tokens are beyond the %d that %s was trained on; what follows tells of extrapolation",
            length,
            trained,
            pretrained.folder,
        )
    return beyond
