"""Hugging Face folder -> run folder, and back, tensor by tensor from one table (names.py).

    MODEL/config.json                  RUN/config.yaml
    MODEL/*.safetensors       <-->     RUN/checkpoints/iter_0000000/
    MODEL/tokenizer.json ...           RUN/hugging_face/tokenizer.json ..., config.json

A block of rows is in memory at a time, so the size of the model does not matter. Neither direction computes
anything: a value comes out with the bits that it went in with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.arguments import dump_yaml, to_dict
from megatron_ext.checkpoint.companions import carry, has_tokenizer, tokenizer_folder, write_config
from megatron_ext.checkpoint.folders import NAME_IT, folder_name, point, with_offer
from megatron_ext.checkpoint.hf_folder import HuggingFaceTensors, read_config, read_model_config
from megatron_ext.checkpoint.manifest import Manifest, code_identity, facts_of
from megatron_ext.checkpoint.names import Parameter, Rows, full_shape, parameters_of, rows_of
from megatron_ext.checkpoint.output_folder import written_aside
from megatron_ext.checkpoint.runs import checkpoint_in, read_run
from megatron_ext.checkpoint.safetensors_writer import DTYPES, TensorPlan, split, write_file, write_index
from megatron_ext.checkpoint.torch_dist import TorchDistTensors
from megatron_ext.checkpoint.torch_dist_writer import Layer, write_checkpoint
from megatron_ext.config import CheckpointConfig, Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.errors import UserError

_NO_WEIGHTS = ("optimizer.", "random_states")


@dataclass(frozen=True)
class Converted:
    """What was written: how many tensors, of how many bytes, in how many files of weights."""

    tensors: int
    bytes: int
    files: int


def hf_to_megatron(source: Path, output: Path, *, divisible_by: int = 128, overwrite: bool = False) -> Converted:
    """Write a run folder that `--init-from` and `--config OUTPUT/config.yaml` take, for every layout of processes.

    Args:
        source: a Hugging Face model folder.
        output: the run folder to be.
        divisible_by: the embedding is padded up to a multiple of this.
        overwrite: replace an `output` that is there.

    Raises:
        UserError: a model that ours does not compute exactly, a damaged folder, an `output` in the way.
    """
    began = time.perf_counter()
    model = replace(read_model_config(source), make_vocab_size_divisible_by=divisible_by)
    assert model.vocab_size is not None
    tensors = HuggingFaceTensors(source)
    tensors.check(model, model.vocab_size)
    layers = [layer for parameter in parameters_of(model) for layer in _layers(parameter, model, tensors)]
    bf16 = layers[0].dtype is torch.bfloat16
    config = _run_config(source, output, model, bf16=bf16)
    with written_aside(output, overwrite=overwrite) as folder:
        beside = folder / "hugging_face"
        beside.mkdir()
        carry(source, beside, "config.json")
        (folder / "config.yaml").write_text(dump_yaml(config))
        checkpoint = folder / "checkpoints" / folder_name(0)
        checkpoint.mkdir(parents=True)
        write_checkpoint(checkpoint, layers)
        _manifest(config, time.perf_counter() - began, checkpoint).write(checkpoint)
        point(checkpoint.parent, 0)
    return Converted(len(layers), sum(math.prod(one.shape) * one.dtype.itemsize for one in layers), 1)


def _run_config(source: Path, output: Path, model: ModelConfig, *, bf16: bool) -> Config:
    length = read_config(source).get("max_position_embeddings") or DataConfig.seq_length
    tokenizer = str(output.absolute() / "hugging_face") if has_tokenizer(source) else None
    return Config(
        model=model,
        data=DataConfig(seq_length=length, tokenizer_model=tokenizer),
        training=TrainingConfig(bf16=bf16),
        checkpoint=CheckpointConfig(init_from=str(output.absolute())),
    )


def _manifest(config: Config, seconds: float, folder: Path) -> Manifest:
    """Of weights alone: no optimizer has counted a step."""
    return Manifest(
        step=0,
        consumed_samples=0,
        layout={"tensor": 1, "pipeline": 1, "context": 1, "data": 1, "device": "cpu"},
        config=to_dict(replace(config, checkpoint=CheckpointConfig())),
        optimizer={},
        code=code_identity(),
        files={path.name: facts_of(path) for path in sorted(folder.iterdir())},
        seconds=seconds,
    )


def _layers(parameter: Parameter, model: ModelConfig, source: HuggingFaceTensors) -> Iterator[Layer]:
    """The checkpoint's tensors of a row of the table, one per layer."""
    assert model.vocab_size is not None
    rows = rows_of(parameter, model, model.vocab_size)
    count = sum(one.last - one.first for one in rows)
    found: set[torch.dtype] = set()
    for number in range(model.num_layers if parameter.stacked else 1):
        names = [name.format(i=number) for name in parameter.hugging_face]
        described = [source.described(name) for name in names]
        found |= {dtype for _, dtype in described}
        if len(found) > 1:
            kinds = " and ".join(sorted(DTYPES[dtype] for dtype in found))
            raise UserError(f"checkpoint: {names[0]} in {source.folder} and its like have types {kinds}; use one type")
        shape = (count, *described[0][0][1:])
        place = (number, model.num_layers) if parameter.stacked else None
        read = partial(_gather, source, names, rows, shape[1:], described[0][1])
        yield Layer(parameter.checkpoint, shape, described[0][1], place, read)


def _gather(
    source: HuggingFaceTensors,
    names: list[str],
    rows: list[Rows],
    columns: tuple[int, ...],
    dtype: torch.dtype,
    first: int,
    last: int,
) -> Tensor:
    """Rows `first` to `last` of a Megatron tensor, from the rows of Hugging Face tensors that it consists of."""
    block = torch.zeros((last - first, *columns), dtype=dtype)
    top = 0
    for one in rows:
        a, b = max(first, top), min(last, top + one.last - one.first)
        if a < b and one.source is not None:
            shift = one.first - top
            block[a - first : b - first] = source.rows(names[one.source], a + shift, b + shift)
        top += one.last - one.first
    return block


def megatron_to_hf(
    source: Path,
    output: Path,
    *,
    max_shard_bytes: int,
    tokenizer: str | None = None,
    overwrite: bool = False,
    checksums: bool = True,
) -> Converted:
    """Write the Hugging Face folder of a checkpoint of any layout; no process group, one process.

    Args:
        source: a run folder (its newest checkpoint) or a checkpoint folder.
        output: the model folder to be.
        max_shard_bytes: of one safetensors file.
        tokenizer: a folder, "none", or None for the run's own.
        overwrite: replace an `output` that is there.
        checksums: read every file once more beforehand, and compare it with the manifest.

    Raises:
        UserError: a model that transformers does not compute exactly, a damaged checkpoint, an `output` in the way.
    """
    run = read_run(checkpoint_in(source))
    beside = tokenizer_folder(tokenizer, run.config)
    model = run.model
    tensors = TorchDistTensors(run.folder)
    _check_tensors(tensors, model)
    planned = list(_planned(tensors, model))
    files = split([plan for plan, _ in planned], max_shard_bytes)
    blocks = {plan.name: blocks for plan, blocks in planned}
    with written_aside(output, overwrite=overwrite) as folder:
        if checksums:
            manifest = Manifest.read(run.folder)
            try:
                manifest.check_content(run.folder, manifest.files)
            except UserError as error:
                raise with_offer(error, run.folder, NAME_IT) from None
        write_config(folder, model, run.config, planned[0][0].dtype, beside)
        if beside is not None:
            carry(beside, folder)
        for file, shard in files.items():
            write_file(folder / file, shard, ((plan, blocks[plan.name]) for plan in shard))
        write_index(folder, files)
    return Converted(len(planned), sum(plan.bytes for plan, _ in planned), len(files))


def _check_tensors(tensors: TorchDistTensors, model: ModelConfig) -> None:
    """Exactly the model's tensors, in their shapes."""
    assert model.vocab_size is not None
    wanted = {}
    for parameter in parameters_of(model):
        rows = sum(one.last - one.first for one in rows_of(parameter, model, model.vocab_size))
        columns = full_shape(parameter.hugging_face[0].format(i=0), model, model.vocab_size)[1:]
        layers = (model.num_layers,) if parameter.stacked else ()
        wanted[parameter.checkpoint] = (*layers, rows, *columns)
    found = {name: one.shape for name, one in tensors.tensors.items() if not name.startswith(_NO_WEIGHTS)}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in wanted:
            raise UserError(f"checkpoint: {tensors.folder} has {name}, which no Hugging Face parameter stands for")
        if found.get(name) != wanted[name]:
            raise UserError(
                f"checkpoint: {name} in {tensors.folder} is {found.get(name)}, its configuration needs {wanted[name]}"
            )
    for name in wanted:
        dtype = tensors.tensors[name].dtype
        if dtype not in DTYPES:
            raise UserError(f"checkpoint: {name} in {tensors.folder} has type {dtype}, needs one of 16 to 64 bits")


def _planned(tensors: TorchDistTensors, model: ModelConfig) -> Iterator[tuple[TensorPlan, Iterator[Tensor]]]:
    """Every Hugging Face tensor, layer by layer, and where its rows come from."""
    assert model.vocab_size is not None
    table = parameters_of(model)
    first = [one for one in table if not one.stacked and one.checkpoint.startswith("embedding.")]
    last = [one for one in table if not one.stacked and one not in first]
    layers = [(one, number) for number in range(model.num_layers) for one in table if one.stacked]
    for parameter, layer in [*((one, None) for one in first), *layers, *((one, None) for one in last)]:
        rows = rows_of(parameter, model, model.vocab_size)
        dtype = tensors.tensors[parameter.checkpoint].dtype
        for part, pattern in enumerate(parameter.hugging_face):
            name = pattern.format(i=layer)
            plan = TensorPlan(name, full_shape(name, model, model.vocab_size), dtype)
            yield plan, _scatter(tensors, parameter, layer, rows, part)


def _scatter(
    tensors: TorchDistTensors, parameter: Parameter, layer: int | None, rows: list[Rows], part: int
) -> Iterator[Tensor]:
    """The rows of one Hugging Face tensor, top to bottom, out of the Megatron tensor that holds them."""
    top = 0
    for one in rows:
        bottom = top + one.last - one.first
        if one.source == part:
            yield from tensors.rows(parameter.checkpoint, layer, top, bottom)
        top = bottom
