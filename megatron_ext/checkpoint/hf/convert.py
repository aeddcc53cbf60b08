"""Convert a Hugging Face folder to a run folder and back, tensor by tensor from one table (names.py).

    MODEL/config.json                  RUN/config.yaml
    MODEL/*.safetensors       <-->     RUN/checkpoints/iter_0000000/
    MODEL/tokenizer.json ...           RUN/hugging_face/tokenizer.json ..., config.json

Memory holds one tensor of the checkpoint at a time, and during an export the tensors of one file. No values are
computed: conversion is bit-exact in both directions.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.checkpoint.folders import folder_name, older, point, with_offer
from megatron_ext.checkpoint.hf.auxiliary import copy_files, has_tokenizer, tokenizer_folder, write_config
from megatron_ext.checkpoint.hf.folder import (
    INDEX,
    SINGLE,
    HuggingFaceTensors,
    read_model_config,
    trained_length,
)
from megatron_ext.checkpoint.hf.names import (
    Cut,
    Parameter,
    Place,
    full_shape,
    fuse_into,
    parameters_of,
    rows_of,
    unfuse,
)
from megatron_ext.checkpoint.hf.stacked import is_stacked, name_in_files, stack
from megatron_ext.checkpoint.manifest import Manifest, code_identity
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.checkpoint.tensors import DTYPES, Shard, Stored, write, write_index
from megatron_ext.config import CheckpointConfig, Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.config.arguments import dump_yaml, to_dict
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_folder

_NO_WEIGHTS = ("optimizer.", "random_states.")


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `output` at the end, or removed after an exception.

    transformers' save_pretrained and safetensors write into the folder directly: if killed while replacing a model of
    the same shapes, they leave a mixture of both, which from_pretrained loads without a warning (transformers 5.23).
    """
    if output.exists() or output.is_symlink():
        raise UserError(f"output: {output} exists; remove it or choose another folder")
    with atomic_folder(output.absolute()) as folder:
        yield folder


def hf_to_megatron(source: Path, output: Path, *, divisible_by: int = 128) -> None:
    """Write a run folder for `--init-from` and `--config OUTPUT/config.yaml`, usable with every parallel layout.

    The embedding is padded to a multiple of `divisible_by`.

    Raises:
        UserError: the model is not supported exactly, the folder is damaged, or `output` exists.
    """
    began = time.perf_counter()
    model = replace(read_model_config(source), make_vocab_size_divisible_by=divisible_by)
    tensors = HuggingFaceTensors(source)
    vocab_size = model.vocab_size
    assert vocab_size is not None
    tensors.check(model, vocab_size)
    shards = [shard for row in parameters_of(model) for shard in _fused(row, model, vocab_size, tensors)]
    config = Config(
        model=model,
        data=DataConfig(
            seq_length=trained_length(source) or DataConfig.seq_length,
            tokenizer_model=str(output.absolute() / "hugging_face") if has_tokenizer(source) else None,
        ),
        training=TrainingConfig(bf16=shards[0].dtype is torch.bfloat16),
        checkpoint=CheckpointConfig(init_from=str(output.absolute())),
    )
    with _new_folder(output) as folder:
        checkpoint = folder / "checkpoints" / folder_name(0)
        checkpoint.mkdir(parents=True)
        copy_files(source, folder / "hugging_face", "config.json")
        (folder / "config.yaml").write_text(dump_yaml(config))
        Manifest(
            step=0,
            consumed_samples=0,
            layout={"tensor": 1, "pipeline": 1, "context": 1, "data": 1, "device": "cpu"},
            config=to_dict(replace(config, checkpoint=CheckpointConfig())),
            optimizer={},  # only weights
            code=code_identity(),
            files=write_index(checkpoint, [write(checkpoint, 0, shards)]),
            seconds=time.perf_counter() - began,
        ).write(checkpoint)
        point(checkpoint.parent, 0)


def _stored_shape(parameter: Parameter, model: ModelConfig, vocab_size: int) -> tuple[int, ...]:
    rows = sum(run.last - run.first for run in rows_of(parameter, model, vocab_size))
    if parameter.cut is Cut.VOCABULARY:
        rows = model.padded_vocab_size(vocab_size)
    return (rows, *full_shape(parameter.hugging_face[0], model, vocab_size)[1:])


def _fused(parameter: Parameter, model: ModelConfig, vocab_size: int, source: HuggingFaceTensors) -> Iterator[Shard]:
    """Yield the checkpoint tensors of a row of the table; their data is assembled when written."""
    shape = _stored_shape(parameter, model, vocab_size)
    offset = (0,) * len(shape)
    names = [name for place in parameter.places(model) for name in parameter.names(place)]
    dtypes = {source.described(name)[1] for name in names}
    if len(dtypes) > 1:
        types = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UserError(f"checkpoint: {names[0]} in {source.folder} and its like have types {types}; use one type")
    (dtype,) = dtypes

    def fuse(place: Place) -> Tensor:
        whole, tensors = torch.empty(shape, dtype=dtype), [source.open(name) for name in parameter.names(place)]
        fuse_into(whole, offset, parameter, tensors, model, vocab_size)
        return whole

    for place in parameter.places(model):
        yield Shard(parameter.checkpoint(place), shape, offset, shape, dtype, partial(fuse, place))


def megatron_to_hf(source: Path, output: Path, *, max_shard_bytes: int, tokenizer: str | None = None) -> None:
    """Write the Hugging Face folder of a checkpoint of any layout, in a single process without a process group.

    Args:
        source: a run folder (its newest checkpoint) or a checkpoint folder.
        output: the model folder.
        max_shard_bytes: size limit of a safetensors file, which is held in memory.
        tokenizer: a folder, "none", or None for the run's own.

    Raises:
        UserError: transformers does not support the model exactly, the checkpoint is damaged, or `output` exists.
    """
    run = Pretrained.find_checkpoint(source)
    model, vocab_size = run.model, run.model.vocab_size
    assert run.checkpoint is not None
    assert run.length is not None
    assert vocab_size is not None
    manifest = run.checkpoint.manifest
    tokens = tokenizer_folder(tokenizer or run.tokenizer)
    stored = Stored(run.folder)
    # in Hugging Face's order: the embedding, the layers, the rest
    places = [(parameter, place) for parameter in parameters_of(model) for place in parameter.places(model)]
    places.sort(key=lambda one: one[1][0] if one[1] else -1 if "embed" in one[0].megatron[0] else model.num_layers)
    needed = {row.checkpoint(place): _stored_shape(row, model, vocab_size) for row, place in places}
    found = {name: tensor.shape for name, tensor in stored.tensors.items() if not name.startswith(_NO_WEIGHTS)}
    unlike = sorted(dict(needed.items() ^ found.items()))
    if unlike:
        shapes = f"has shape {found.get(unlike[0])}, its configuration needs {needed.get(unlike[0])}"
        raise UserError(f"checkpoint: {unlike[0]} in {run.folder} {shapes}")
    dtypes = {
        name: DTYPES[stored.tensors[row.checkpoint(place)].dtype] for row, place in places for name in row.names(place)
    }
    stacks, sizes = model.block == "gpt_oss", Counter[str]()
    for name, dtype in dtypes.items():
        sizes[name_in_files(name, stacks)] += math.prod(full_shape(name, model, vocab_size)) * dtype.itemsize
    files = split(sizes, max_shard_bytes)
    with _new_folder(output) as folder:
        try:
            manifest.check_files(run.folder, manifest.files, content=True)
        except UserError as error:
            raise with_offer(error, next(older(run.folder), None)) from None
        write_config(folder, model, run.length, next(iter(dtypes.values())), tokens)
        if tokens is not None:
            copy_files(tokens, folder)

        def exported() -> Iterator[tuple[str, Tensor]]:
            for row, place in places:
                whole = stored.read(row.checkpoint(place))
                yield from zip(row.names(place), unfuse(row, whole, model, vocab_size), strict=True)

        tensors = (
            stack(name, [tensor for _, tensor in same]) if is_stacked(name) else next(same)[1]
            for name, same in groupby(exported(), lambda named: name_in_files(named[0], stacks))
        )
        for file, names in files.items():
            save_file({name: next(tensors) for name in names}, folder / file, metadata={"format": "pt"})
        if len(files) > 1:
            weight_map = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def split(sizes: dict[str, int], limit: int) -> dict[str, list[str]]:
    """Distribute tensors over files, in order; a tensor of more than `limit` bytes gets its own file."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}
