"""Load a trained model, and compute the losses of texts in chunks."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.batch import PackedBatch
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config, DataConfig, ParallelConfig, TrainingConfig, WindowConfig
from megatron_ext.config.checks import check
from megatron_ext.context_parallel.choice import cp_options
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.optimizer import in_precision
from megatron_ext.engine.state import load_weights
from megatron_ext.engine.step import Pipeline
from megatron_ext.errors import UserError
from megatron_ext.inference.options import Dtype
from megatron_ext.launch import read_launch
from megatron_ext.rope import follows_text
from megatron_ext.token_weighting.short_pass import Division
from megatron_ext.token_weighting.weigher import gather_losses

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class InferenceModel:
    """A model with its weights loaded; `chunks` are its parts on this pipeline stage, in evaluation mode."""

    pretrained: Pretrained
    config: Config
    ranks: parallel.Ranks
    platform: platform.Platform
    chunks: list[PackedGPT]

    @property
    def follows_text(self) -> bool:
        """Whether the rotary angles depend on the length of each text (dynamic RoPE)."""
        return follows_text(self.pretrained.model, self.pretrained.length or 0)


@contextmanager
def open_model(
    pretrained: Pretrained, processes: ParallelConfig, length: int, dtype: Dtype = "auto"
) -> Iterator[InferenceModel]:
    """Load a model's weights under any parallel layout; destroy Megatron's process groups on exit. Collective.

    Args:
        pretrained: a Hugging Face folder or a checkpoint of any layout.
        processes: the parallel layout.
        length: maximum number of tokens of a text; a warning is logged if it is beyond the training length.
        dtype: "auto" is bfloat16 on CUDA (its attention kernels take no float32) and float32 on a CPU.

    Raises:
        UserError: the model cannot be read, or does not fit the layout.
    """
    if pretrained.length is not None and length > pretrained.length:
        logger.warning(
            "length: %d tokens are beyond the %d that %s was trained on; results measure extrapolation",
            length,
            pretrained.length,
            pretrained.folder,
        )
    world_size = read_launch().world_size
    device = platform.choose(processes.device)
    gc.collect()  # a model that was open before is in reference cycles
    if device.device.type == "cuda":
        torch.cuda.empty_cache()
    half = dtype == "bfloat16" or (dtype == "auto" and device.device.type == "cuda")
    config = inference_config(pretrained, processes, length, world_size, bf16=half)
    check(config, world_size, training=False)
    ep = config.parallel.expert_model_parallel_size
    cp = config.parallel.context_parallel_size
    if cp % ep:
        raise UserError(
            f"expert_model_parallel_size: got {ep}, outside training it needs a divisor of context_parallel_size {cp}: "
            "ranks that share experts must compute the same texts; change one of them"
        )
    ranks = parallel.start(config.parallel, config.model.num_layers, device, config.training.seed)
    chunks = build_chunks(config, pretrained.vocab_size, device)
    load_weights(chunks, pretrained, ranks)
    yield InferenceModel(pretrained, config, ranks, device, [chunk.eval() for chunk in chunks])
    # not in `finally`: after an error on one process the others would not reach it
    parallel.finish_stage()


def inference_config(
    pretrained: Pretrained, processes: ParallelConfig, length: int, world_size: int, *, bf16: bool
) -> Config:
    """Return the configuration of a model that reads texts of up to `length` tokens; it is valid under every layout.

    There is no dataset and no global batch, and nothing is kept for a backward pass. Angles that follow the text are
    those of texts up to the original length.
    """
    angles = length
    if follows_text(pretrained.model, pretrained.length or 0):
        angles = min(length, pretrained.model.rope_original_length or length)
    tensor_size = processes.tensor_model_parallel_size
    unit = tensor_size * processes.context_parallel_size
    model = replace(pretrained.at(angles), hidden_dropout=0.0)
    if model.make_vocab_size_divisible_by % tensor_size:
        model = replace(model, make_vocab_size_divisible_by=model.make_vocab_size_divisible_by * tensor_size)
    return Config(
        model=model,
        data=DataConfig(
            data_path=("none",),
            seq_length=-(-length // unit) * unit,
            global_batch_size=world_size * processes.pipeline_model_parallel_size,
        ),
        window=WindowConfig(window_start=1, document_mask=True),
        parallel=replace(
            processes,
            recompute_granularity=None,
            recompute_modules=(),
            offload_layer_inputs=False,
            tp_comm_overlap=False,  # its buffers fit micro-batches of one size
        ),
        training=TrainingConfig(bf16=bf16),
    )


class ChunkScorer:
    """Computes the losses of chunks in micro-batches of about `tokens` tokens, on all ranks of a loaded model."""

    def __init__(self, model: InferenceModel, tokens: int) -> None:
        self.model = model
        self.pipeline = Pipeline([in_precision(chunk, model.config) for chunk in model.chunks])
        self.group = parallel.context_group(model.config.parallel, model.ranks, model.platform)
        self.context = cp_options(model.config, self.group)
        self.division = Division.of(model.config, tokens)

    def losses(self, batches: Sequence[PackedBatch], tokens: int) -> Tensor | None:
        """Return the losses of all `tokens` of the rows, float32, 0 if not scored; None except on the last stage."""
        device = self.model.platform.device
        on_device = [batch.to(device) for batch in batches]
        losses = self.pipeline.forward_only(on_device)
        if not self.model.ranks.last_stage:
            return None
        return gather_losses(self.group, on_device, losses, tokens, device)
