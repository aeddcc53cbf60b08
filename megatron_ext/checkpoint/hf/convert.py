"""Convert a Hugging Face folder to a run folder and back, tensor by tensor from one table (names.py).

    MODEL/config.json                  RUN/config.yaml
    MODEL/*.safetensors       <-->     RUN/checkpoints/iter_0000000/
    MODEL/tokenizer.json ...           RUN/hugging_face/tokenizer.json ..., config.json

Memory holds one tensor of the checkpoint at a time, and during an export the tensors of one file. No values are
computed: conversion is bit-exact in both directions.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.checkpoint.folders import NAME_IT, folder_name, point, with_offer
from megatron_ext.checkpoint.hf.auxiliary import carry, has_tokenizer, tokenizer_folder, write_config
from megatron_ext.checkpoint.hf.folder import DTYPES, INDEX, SINGLE, HuggingFaceTensors, read_config, read_model_config
from megatron_ext.checkpoint.hf.names import Parameter, Place, full_shape, join, parameters_of, rows_of
from megatron_ext.checkpoint.hf.output_folder import written_aside
from megatron_ext.checkpoint.manifest import FileFacts, Manifest, code_identity
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.checkpoint.tensors import Shard, Stored, write
from megatron_ext.config import CheckpointConfig, Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.config.arguments import dump_yaml, to_dict
from megatron_ext.errors import UserError

_NO_WEIGHTS = ("optimizer.", "random_states.", "fp8.")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Converted:
    """The number of tensors written, their bytes, and the number of weight files."""

    tensors: int
    bytes: int
    files: int


def hf_to_megatron(source: Path, output: Path, *, divisible_by: int = 128, overwrite: bool = False) -> Converted:
    """Write a run folder for `--init-from` and `--config OUTPUT/config.yaml`, usable with every parallel layout.

    Args:
        source: a Hugging Face model folder.
        output: the run folder to create.
        divisible_by: the embedding is padded to a multiple of this.
        overwrite: replace an existing `output`.

    Raises:
        UserError: the model is not supported exactly, the folder is damaged, or `output` cannot be written.
    """
    began = time.perf_counter()
    model = replace(read_model_config(source), make_vocab_size_divisible_by=divisible_by)
    assert model.vocab_size is not None
    tensors = HuggingFaceTensors(source)
    tensors.check(model, model.vocab_size)
    shards = [shard for parameter in parameters_of(model) for shard in _fused(parameter, model, tensors)]
    config = Config(
        model=model,
        data=DataConfig(
            seq_length=read_config(source).get("max_position_embeddings") or DataConfig.seq_length,
            tokenizer_model=str(output.absolute() / "hugging_face") if has_tokenizer(source) else None,
        ),
        training=TrainingConfig(bf16=shards[0].dtype is torch.bfloat16),
        checkpoint=CheckpointConfig(init_from=str(output.absolute())),
    )
    with written_aside(output, overwrite=overwrite) as folder:
        beside, checkpoint = folder / "hugging_face", folder / "checkpoints" / folder_name(0)
        beside.mkdir()
        checkpoint.mkdir(parents=True)
        carry(source, beside, "config.json")
        (folder / "config.yaml").write_text(dump_yaml(config))

        def complete(files: dict[str, FileFacts]) -> None:
            Manifest(
                step=0,
                consumed_samples=0,
                layout={"tensor": 1, "pipeline": 1, "context": 1, "data": 1, "device": "cpu"},
                config=to_dict(replace(config, checkpoint=CheckpointConfig())),
                optimizer={},  # only weights
                code=code_identity(),
                files=files,
                seconds=time.perf_counter() - began,
            ).write(checkpoint)

        write(checkpoint, shards, complete)
        point(checkpoint.parent, 0)
    return Converted(len(shards), sum(math.prod(shard.shape) * shard.dtype.itemsize for shard in shards), 1)


def _fused(parameter: Parameter, model: ModelConfig, source: HuggingFaceTensors) -> Iterator[Shard]:
    """Yield the checkpoint tensors of a row of the table; their data is assembled when written."""
    assert model.vocab_size is not None
    names = [name for place in parameter.places(model) for name in parameter.names(place)]
    dtypes = {source.described(name)[1] for name in names}
    if len(dtypes) > 1:
        types = " and ".join(sorted(DTYPES[dtype] for dtype in dtypes))
        raise UserError(f"checkpoint: {names[0]} in {source.folder} and its like have types {types}; use one type")
    (dtype,) = dtypes
    rows, columns = rows_of(parameter, model, model.vocab_size), source.described(names[0])[0][1:]
    shape = (sum(run.last - run.first for run in rows), *columns)

    def fuse(names: Sequence[str]) -> Tensor:
        parts = [source.read(name) for name in names]
        padding = torch.zeros((shape[0] - sum(map(len, parts)), *columns), dtype=dtype)
        return torch.cat([padding if run.source is None else parts[run.source][run.first : run.last] for run in rows])

    for place in parameter.places(model):
        make = partial(fuse, parameter.names(place))
        yield Shard(parameter.checkpoint(place), shape, (0,) * len(shape), shape, dtype, make, made=True)


def megatron_to_hf(
    source: Path,
    output: Path,
    *,
    max_shard_bytes: int,
    tokenizer: str | None = None,
    overwrite: bool = False,
    checksums: bool = True,
) -> Converted:
    """Write the Hugging Face folder of a checkpoint of any layout, in a single process without a process group.

    Args:
        source: a run folder (its newest checkpoint) or a checkpoint folder.
        output: the model folder to create.
        max_shard_bytes: size limit of a safetensors file, which is held in memory.
        tokenizer: a folder, "none", or None for the run's own.
        overwrite: replace an existing `output`.
        checksums: first read every file and compare its checksum with the manifest.

    Raises:
        UserError: transformers does not support the model exactly, the checkpoint is damaged, or `output` cannot be
            written.
    """
    run = Pretrained.find_checkpoint(source)
    assert run.checkpoint is not None
    assert run.length is not None
    model, manifest = run.model, run.checkpoint.manifest
    beside = tokenizer_folder(tokenizer, run.tokenizer)
    stored = Stored(run.folder)
    ordered = list(_ordered(model))
    _check_tensors(stored, ordered, model)
    dtype = stored.tensors[ordered[0][0].checkpoint(())].dtype
    counts, sizes = {}, {}
    for parameter, place in ordered:
        for name in parameter.names(place):
            counts[name] = math.prod(full_shape(name, model, model.vocab_size or 0))
            sizes[name] = counts[name] * stored.tensors[parameter.checkpoint(place)].dtype.itemsize
    files = split(sizes, max_shard_bytes)
    with written_aside(output, overwrite=overwrite) as folder:
        if checksums:
            try:
                manifest.check_content(run.folder, manifest.files)
            except UserError as error:
                raise with_offer(error, run.folder, NAME_IT) from None
        write_config(folder, model, run.length, dtype, beside)
        if beside is not None:
            carry(beside, folder)
        tensors = _separated(stored, ordered, model)
        for file, names in files.items():
            save_file({name: next(tensors) for name in names}, folder / file, metadata={"format": "pt"})
        if len(files) > 1:
            index = {
                "metadata": {"total_parameters": sum(counts.values()), "total_size": sum(sizes.values())},
                "weight_map": {name: file for file, names in files.items() for name in names},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return Converted(len(sizes), sum(sizes.values()), len(files))


def _ordered(model: ModelConfig) -> Iterator[tuple[Parameter, Place]]:
    """Yield every tensor of a checkpoint in Hugging Face's order: the embedding, the layers, the rest."""
    table = parameters_of(model)
    alone: list[tuple[Parameter, Place]] = [(parameter, ()) for parameter in table if not parameter.stacked]
    layers = [(parameter, place) for parameter in table if parameter.stacked for place in parameter.places(model)]
    yield from (*alone[:1], *sorted(layers, key=lambda one: one[1][0]), *alone[1:])


def _check_tensors(stored: Stored, ordered: list[tuple[Parameter, Place]], model: ModelConfig) -> None:
    """Raise UserError unless a checkpoint has exactly the model's tensors, with their shapes."""
    assert model.vocab_size is not None
    wanted = {}
    for parameter, place in ordered:
        rows = sum(run.last - run.first for run in rows_of(parameter, model, model.vocab_size))
        wanted[parameter.checkpoint(place)] = (
            rows,
            *full_shape(parameter.names(place)[0], model, model.vocab_size)[1:],
        )
    held = {name: tensor.shape for name, tensor in stored.tensors.items() if not name.startswith(_NO_WEIGHTS)}
    for name in sorted(wanted.keys() | held.keys()):
        if name not in wanted:
            raise UserError(f"checkpoint: {stored.folder} has {name}, which no Hugging Face parameter stands for")
        if held.get(name) != wanted[name]:
            raise UserError(
                f"checkpoint: {name} in {stored.folder} is {held.get(name)}, its configuration needs {wanted[name]}"
            )
    for name in wanted:
        if (dtype := stored.tensors[name].dtype) not in DTYPES:
            raise UserError(f"checkpoint: {name} in {stored.folder} has type {dtype}, needs one of 16 to 64 bits")


def _separated(stored: Stored, ordered: list[tuple[Parameter, Place]], model: ModelConfig) -> Iterator[Tensor]:
    """Yield the Hugging Face tensors, each read on demand."""
    assert model.vocab_size is not None
    for parameter, place in ordered:
        for tensor in join(parameter, [stored.read(parameter.checkpoint(place))], model, model.vocab_size):
            yield tensor.contiguous()


def split(sizes: dict[str, int], most: int) -> dict[str, list[str]]:
    """Distribute tensors over files, in order; a tensor of more than `most` bytes gets its own file."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def parse_size(text: str) -> int:
    """Parse a number of bytes: "2GB", "500MB", "8KB" or a plain number.

    Raises:
        UserError: another text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", text.strip().upper())
    size = int(float(match.group(1)) * _UNITS[match.group(2) or "B"]) if match else 0
    if size < 1:
        raise UserError(f"max_shard_size: got {text!r}, needs a size such as 2GB or 500MB")
    return size
