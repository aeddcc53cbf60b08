"""Convert a Hugging Face folder to a run folder and back, tensor by tensor from one table (names.py).

    MODEL/config.json                  RUN/config.yaml
    MODEL/*.safetensors       <-->     RUN/checkpoints/iter_0000000/
    MODEL/tokenizer.json ...           RUN/hugging_face/tokenizer.json ..., config.json

A block of rows is in memory at a time, so the size of the model does not matter. Neither direction computes
anything: a value comes out with the bits that it went in with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.checkpoint.folders import NAME_IT, folder_name, point, with_offer
from megatron_ext.checkpoint.formats.safetensors_writer import DTYPES, TensorPlan, split, write_file, write_index
from megatron_ext.checkpoint.formats.torch_dist import TorchDistTensors
from megatron_ext.checkpoint.formats.torch_dist_writer import Layer, write_checkpoint
from megatron_ext.checkpoint.hf.companions import carry, has_tokenizer, tokenizer_folder, write_config
from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors, read_config, read_model_config
from megatron_ext.checkpoint.hf.names import Parameter, Place, Rows, full_shape, parameters_of, rows_of
from megatron_ext.checkpoint.hf.output_folder import written_aside
from megatron_ext.checkpoint.manifest import Manifest, code_identity, facts_of
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import CheckpointConfig, Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.config.arguments import dump_yaml, to_dict
from megatron_ext.errors import UserError

_NO_WEIGHTS = ("optimizer.", "random_states")


@dataclass(frozen=True)
class Converted:
    """Tells what was written: how many tensors, of how many bytes, in how many files of weights."""

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
    config = Config(
        model=model,
        data=DataConfig(
            seq_length=read_config(source).get("max_position_embeddings") or DataConfig.seq_length,
            tokenizer_model=str(output.absolute() / "hugging_face") if has_tokenizer(source) else None,
        ),
        training=TrainingConfig(bf16=bf16),
        checkpoint=CheckpointConfig(init_from=str(output.absolute())),
    )
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
    return Converted(len(layers), sum(math.prod(layer.shape) * layer.dtype.itemsize for layer in layers), 1)


def _manifest(config: Config, seconds: float, folder: Path) -> Manifest:
    """Describe weights alone: no optimizer has counted a step."""
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
    """Yield the checkpoint's tensors of a row of the table, one per layer, or per expert of each."""
    assert model.vocab_size is not None
    rows = rows_of(parameter, model, model.vocab_size)
    count = sum(run.last - run.first for run in rows)
    dtypes: set[torch.dtype] = set()
    stack = parameter.stack(model)
    for place in parameter.places(model):
        names = parameter.names(place)
        described = [source.described(name) for name in names]
        dtypes |= {dtype for _, dtype in described}
        if len(dtypes) > 1:  # a checkpoint stacks them: one type for all
            words = " and ".join(sorted(DTYPES[dtype] for dtype in dtypes))
            raise UserError(f"checkpoint: {names[0]} in {source.folder} and its like have types {words}; use one type")
        shape = (count, *described[0][0][1:])
        read = partial(_gather, source, names, rows, shape[1:], described[0][1])
        yield Layer(parameter.checkpoint, shape, described[0][1], place, stack, read)


def _gather(
    source: HuggingFaceTensors,
    names: Sequence[str],
    rows: list[Rows],
    columns: tuple[int, ...],
    dtype: torch.dtype,
    first: int,
    last: int,
) -> Tensor:
    """Read rows `first` to `last` of a Megatron tensor, from the rows of Hugging Face tensors that it consists of."""
    block = torch.zeros((last - first, *columns), dtype=dtype)  # what no source fills is the vocabulary's padding
    top = 0
    for run in rows:
        a, b = max(first, top), min(last, top + run.last - run.first)
        if a < b and run.source is not None:
            shift = run.first - top
            block[a - first : b - first] = source.rows(names[run.source], a + shift, b + shift)
        top += run.last - run.first
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
    run = Pretrained.find_checkpoint(source)
    assert run.checkpoint is not None
    assert run.length is not None
    model, manifest = run.model, run.checkpoint.manifest
    beside = tokenizer_folder(tokenizer, run.tokenizer)
    tensors = TorchDistTensors(run.folder)
    _check_tensors(tensors, model)
    planned = list(_planned(tensors, model))
    files = split([plan for plan, _ in planned], max_shard_bytes)
    blocks = {plan.name: blocks for plan, blocks in planned}
    with written_aside(output, overwrite=overwrite) as folder:
        if checksums:
            try:
                manifest.check_content(run.folder, manifest.files)
            except UserError as error:
                raise with_offer(error, run.folder, NAME_IT) from None
        write_config(folder, model, run.length, planned[0][0].dtype, beside)
        if beside is not None:
            carry(beside, folder)
        for file, shard in files.items():
            write_file(folder / file, shard, ((plan, blocks[plan.name]) for plan in shard))
        write_index(folder, files)
    return Converted(len(planned), sum(plan.bytes for plan, _ in planned), len(files))


def _check_tensors(tensors: TorchDistTensors, model: ModelConfig) -> None:
    """Refuse a checkpoint that does not hold exactly the model's tensors, in their shapes."""
    assert model.vocab_size is not None
    wanted = {}
    for parameter in parameters_of(model):
        rows = sum(run.last - run.first for run in rows_of(parameter, model, model.vocab_size))
        columns = full_shape(parameter.hugging_face[0], model, model.vocab_size)[1:]
        wanted[parameter.checkpoint] = (*parameter.stack(model), rows, *columns)
    held = {name: tensor.shape for name, tensor in tensors.tensors.items() if not name.startswith(_NO_WEIGHTS)}
    for name in sorted(wanted.keys() | held.keys()):
        if name not in wanted:
            raise UserError(f"checkpoint: {tensors.folder} has {name}, which no Hugging Face parameter stands for")
        if held.get(name) != wanted[name]:
            raise UserError(
                f"checkpoint: {name} in {tensors.folder} is {held.get(name)}, its configuration needs {wanted[name]}"
            )
    for name in wanted:
        dtype = tensors.tensors[name].dtype
        if dtype not in DTYPES:
            raise UserError(f"checkpoint: {name} in {tensors.folder} has type {dtype}, needs one of 16 to 64 bits")


def _planned(tensors: TorchDistTensors, model: ModelConfig) -> Iterator[tuple[TensorPlan, Iterator[Tensor]]]:
    """Yield every Hugging Face tensor, layer by layer, and its rows, which are read when they are asked for."""
    assert model.vocab_size is not None
    table = parameters_of(model)
    alone: list[tuple[Parameter, Place]] = [(parameter, ()) for parameter in table if not parameter.stacked]
    stacked = [(parameter, place) for parameter in table if parameter.stacked for place in parameter.places(model)]
    layers = sorted(stacked, key=lambda one: one[1][0])  # whose rows stay in the table's order
    for parameter, place in [*alone[:1], *layers, *alone[1:]]:  # the embedding first, as Hugging Face has it
        rows = rows_of(parameter, model, model.vocab_size)
        dtype = tensors.tensors[parameter.checkpoint].dtype
        for part, name in enumerate(parameter.names(place)):
            plan = TensorPlan(name, full_shape(name, model, model.vocab_size), dtype)
            yield plan, _scatter(tensors, parameter.checkpoint, place, rows, part)


def _scatter(tensors: TorchDistTensors, name: str, place: Place, rows: list[Rows], part: int) -> Iterator[Tensor]:
    """Yield the rows of the `part`-th Hugging Face tensor, top to bottom, out of the Megatron tensor around them."""
    top = 0
    for run in rows:
        bottom = top + run.last - run.first
        if run.source == part:
            yield from tensors.rows(name, place, top, bottom)
        top = bottom
