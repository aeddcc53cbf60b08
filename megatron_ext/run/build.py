"""Build a run: open the inputs -> join the processes -> build the model; then describe it."""

import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.checkpoint.parameters import count_active_parameters, count_parameters
from megatron_ext.config import Config
from megatron_ext.config.checks import WARNINGS, broken
from megatron_ext.data.rows.blend import BlendedRows, LaidSequences
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.text.tokenizer import Tokenizer, ids_without_rows
from megatron_ext.engine import environment, parallel
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.optimizer import gradient_sharing
from megatron_ext.engine.platform import Platform
from megatron_ext.engine.platform import choose as choose_platform
from megatron_ext.engine.state import agree, load_weights
from megatron_ext.engine.transformer import fusions_here
from megatron_ext.engine.weights import initialise, mark_parts
from megatron_ext.planning.step_time import read_speeds
from megatron_ext.run.callbacks import RunInfo
from megatron_ext.run.inputs import Inputs, describe_weights, open_inputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Built:
    """One process's part of a run; the model's matrices are 0 if a checkpoint has them."""

    platform: Platform
    ranks: parallel.Ranks
    inputs: Inputs
    chunks: Sequence[PackedGPT]


def build(config: Config) -> Built:
    """Open the inputs of a run, join the processes and build the model.

    Raises:
        UserError: data, tokenizer or checkpoint that the configuration cannot use.
        RuntimeError: the processes have found different checkpoints.
    """
    platform = choose_platform(config.parallel.device)
    inputs = open_inputs(config)
    ranks = parallel.start(config.parallel, config.model.num_layers, platform, config.training.seed)
    agree(inputs.checkpoint)
    parallel.start_tensor_overlap(config, ranks)
    chunks = build_chunks(config, inputs.vocab_size, platform)
    mark_parts(chunks, config.model, ranks)
    if inputs.pretrained is not None:
        load_weights(chunks, inputs.pretrained, ranks)
    elif inputs.checkpoint is None:
        initialise(chunks, config.model, inputs.vocab_size, config.training.seed, ranks)
    return Built(platform, ranks, inputs, chunks)


def describe_run(config: Config, built: Built) -> RunInfo:
    """Describe the run for its history, and log its setup and warnings on rank 0. Collective."""
    ranks = built.ranks
    inputs = built.inputs
    machine = environment.look(config, built.platform)
    differences = environment.differences(machine)
    parameters = count_parameters(config.model, inputs.vocab_size)
    if ranks.world == 0:
        for line in [*_read(config, inputs), *machine.summary(), *differences, *_setup(config, built, parameters)]:
            logger.info("%s", line)
        for line in [*broken(WARNINGS, config), *_repeated_texts(config, inputs)]:
            logger.warning("warning: %s", line)
    facts: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "host": machine.host,
        "devices": machine.devices,
        "processes": ranks.world_size,
        "layout": ranks.layout,
        "parameters": parameters,
        "versions": {name: version for name, version in machine.versions.items() if version is not None},
    }
    mixture = inputs.train
    if isinstance(mixture, BlendedRows):
        facts["sources"] = {
            label: {"share": share, "row_tokens": dataset.row_tokens}
            for label, share, dataset in zip(mixture.labels, mixture.shares, mixture.datasets, strict=True)
        }
    peak_flops = _peak_flops(config, built.platform, ranks.world_size)
    return RunInfo(count_active_parameters(config.model, inputs.vocab_size), peak_flops, facts)


def _read(config: Config, inputs: Inputs) -> list[str]:
    """Describe the initial weights, and the token ids that the model does not have."""
    lines: list[str] = []
    if inputs.pretrained is not None:
        lines += describe_weights(inputs.pretrained, config.model)
    if config.data.tokenizer_model:
        lines += ids_without_rows(Tokenizer(config.data.tokenizer_model), inputs.vocab_size)
    return lines


def _setup(config: Config, built: Built, parameters: int) -> list[str]:
    """Describe the device, the layout, the batches and the window schedule."""
    platform = built.platform
    ranks = built.ranks
    data = config.data
    schedule = config.window_schedule()
    fused = ", ".join(name for name, is_fused in fusions_here(platform, config).items() if is_fused)
    return [
        f"device {platform.device.type}, {platform.communication}; fused: {fused or 'nothing'}",
        f"{parameters:,} parameters on {ranks.world_size} processes: {ranks.layout}, {gradient_sharing(config)}",
        f"{data.global_batch_size * data.seq_length:,} tokens per step: {data.global_batch_size} rows of "
        f"{data.seq_length:,}, {config.microbatches(ranks.world_size)} micro-batches per rank",
        f"window: {schedule.kind.value}, {schedule.window_at(0):,} at step 0, {schedule.end:,} from step "
        f"{schedule.expansion_steps:,} of {config.training.train_iters:,} on",
    ]


def _repeated_texts(config: Config, inputs: Inputs) -> list[str]:
    """Return a warning for each data set that is shorter than a row."""
    datasets = [inputs.train]
    if isinstance(inputs.train, BlendedRows):
        datasets = [*inputs.train.datasets]
    warnings = []
    for part, rows in zip(config.data.parts, datasets, strict=True):
        if isinstance(rows, LaidSequences):
            rows = rows.sequences
        if isinstance(rows, RowDataset) and rows.tokens_per_epoch < rows.row_length:
            text = f"{part.prefix} has {rows.tokens_per_epoch:,} tokens, which each row of {rows.row_length:,}"
            warnings.append(f"data_path: {text} repeats; give more text")
    return warnings


def _peak_flops(config: Config, platform: Platform, processes: int) -> float | None:
    """Return the FLOP/s of all GPUs together, in the dtype of the matrix products; None if they are unknown."""
    if platform.device.type != "cuda" or not config.training.bf16:
        return None
    gpu = read_speeds().of_device(torch.cuda.get_device_name())
    if gpu is None:
        return None
    return gpu.peak_flops(fp8=config.training.fp8_format is not None) * processes
