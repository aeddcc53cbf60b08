"""Convert a Hugging Face folder to a run folder and back, tensor by tensor from one table (names.py).

    MODEL/config.json                  RUN/config.yaml
    MODEL/*.safetensors       <-->     RUN/checkpoints/iter_0000000/
    MODEL/tokenizer.json ...           RUN/hugging_face/tokenizer.json ..., config.json

Memory holds one tensor of the checkpoint at a time, and during an export the tensors of one file. No values are
computed: conversion is bit-exact in both directions. The output gets its name when it is complete: a killed
save_pretrained of transformers 5.23 leaves a mixture of two models, which from_pretrained loads without a warning.
"""

import glob
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.checkpoint.folders import folder_name, older, point, with_offer
from megatron_ext.checkpoint.hf.config import comparable, hugging_face_config
from megatron_ext.checkpoint.hf.folder import (
    INDEX,
    SINGLE,
    HuggingFaceTensors,
    has_tokenizer,
    read_config,
    read_model_config,
    save_tensors,
    stack,
    stacked_name,
)
from megatron_ext.checkpoint.manifest import Manifest, code_identity
from megatron_ext.checkpoint.parameters import Cut, Parameter, Place, full_shape, fuse_into, parameters_of, unfuse
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.checkpoint.tensors import DTYPES, Shard, Stored, write, write_index
from megatron_ext.config import CheckpointConfig, Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.config.arguments import dump_yaml, from_dict, to_dict
from megatron_ext.data.indexed import read_metadata
from megatron_ext.data.text.auto_tokenizer import match_training
from megatron_ext.data.text.chat import ADDITIONAL, TEMPLATE_FILE
from megatron_ext.data.text.tokenizer import HF_CONFIG, HF_FILE, Tokenizer, read_beside
from megatron_ext.errors import UserError, echo
from megatron_ext.files.atomic import atomic_folder
from megatron_ext.files.reading import JsonObject, read_object

logger = logging.getLogger(__name__)
_NO_WEIGHTS = ("optimizer.", "random_states.")
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.model.v*", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", f"{ADDITIONAL}/*.jinja", "generation_config.json"),
)
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
Places = list[tuple[Parameter, Place]]


def hf_to_megatron(source: Path, output: Path, *, divisible_by: int = 128) -> None:
    """Write a run folder for `--init-from` and `--config OUTPUT/config.yaml`, usable with every parallel layout.

    The embedding is padded to a multiple of `divisible_by`.

    Raises:
        UserError: the model is not supported exactly, the folder is damaged, or `output` exists or is inside it.
    """
    began = time.perf_counter()
    check_output(output, source)
    model = replace(read_model_config(source), make_vocab_size_divisible_by=divisible_by)
    entries = read_config(source)
    for name in ("router_aux_loss_coef", "aux_loss_alpha"):  # computed in another way there
        if model.num_experts and entries.get(name):
            logger.warning("config.json has %s %s; choose --moe-aux-loss-coeff", name, echo(entries[name]))
    tensors = HuggingFaceTensors(source)
    vocab_size = model.vocab_size
    assert vocab_size is not None
    tensors.check(model, vocab_size)
    shards = [shard for row in parameters_of(model) for shard in _fused(row, model, vocab_size, tensors)]
    config = Config(
        model=model,
        data=DataConfig(
            seq_length=entries.get("max_position_embeddings") or DataConfig.seq_length,
            tokenizer_model=str(output.absolute() / "hugging_face") if has_tokenizer(source) else None,
        ),
        training=TrainingConfig(bf16=shards[0].dtype is torch.bfloat16),
    )
    write_run(output, config, shards, began, source)


@dataclass(frozen=True)
class Progress:
    """Completed steps of a run, the rows that they consumed, and Adam's count of its updates, 0 without its state."""

    step: int = 0
    consumed_samples: int = 0
    updates: int = 0


def write_run(
    output: Path,
    config: Config,
    shards: Sequence[Shard],
    began: float,
    hugging_face: Path | None = None,
    progress: Progress = Progress(),
) -> None:
    """Write a run folder with these weights, and with the tokenizer and config.json of a Hugging Face folder.

    With Adam's state its configuration continues this run, otherwise it begins another one with these weights.
    """
    with atomic_folder(output.absolute()) as folder:
        checkpoint = folder / "checkpoints" / folder_name(progress.step)
        checkpoint.mkdir(parents=True)
        if hugging_face is not None:
            copy_files(hugging_face, folder / "hugging_face", "config.json")
        run = str(output.absolute())
        start = CheckpointConfig(init_from=run)
        if progress.updates:
            start = CheckpointConfig(load=run, save=run)
        (folder / "config.yaml").write_text(dump_yaml(replace(config, checkpoint=start)))
        Manifest(
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            layout={},  # no run's, so that random states start anew
            config=to_dict(config),
            optimizer={"step": progress.updates} if progress.updates else {},  # only weights
            code=code_identity(),
            files=write_index(checkpoint, [write(checkpoint, 0, shards)]),
            seconds=time.perf_counter() - began,
        ).write(checkpoint)
        point(checkpoint)


def check_output(output: Path, source: Path) -> None:
    if output.exists() or output.is_symlink():
        raise UserError(f"output: {output} exists; remove it or choose another folder")
    if output.resolve().is_relative_to(source.resolve()):
        raise UserError(f"output: {output} is inside the input {source}; choose a folder outside it")


def stored_shape(parameter: Parameter, model: ModelConfig, vocab_size: int) -> tuple[int, ...]:
    shapes = [full_shape(name, model, vocab_size) for name in parameter.hugging_face]
    rows = sum(shape[0] for shape in shapes)
    if parameter.cut is Cut.VOCABULARY:
        rows = model.padded_vocab_size(vocab_size)
    return (rows, *shapes[0][1:])


def _fused(parameter: Parameter, model: ModelConfig, vocab_size: int, source: HuggingFaceTensors) -> Iterator[Shard]:
    """Yield the checkpoint tensors of a row of the table; their data is assembled when written."""
    shape = stored_shape(parameter, model, vocab_size)
    offset = (0,) * len(shape)
    names = [name for place in parameter.places(model) for name in parameter.names(place)]
    dtypes = {source.described(name)[1] for name in names}
    if len(dtypes) > 1:
        types = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UserError(f"checkpoint: {names[0]} in {source.folder} and its like have types {types}; use one type")
    (dtype,) = dtypes

    def fuse(place: Place) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        tensors = [source.open(name) for name in parameter.names(place)]
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
        UserError: transformers does not support the model exactly, the checkpoint is damaged, or `output` exists, is
            inside `source` or cannot be written.
    """
    check_output(output, source)
    run, places, stored = open_run(source)
    assert run.checkpoint is not None
    assert run.length is not None
    tokenizer_source = tokenizer_folder(tokenizer or run.tokenizer)
    parameter, place = places[0]
    dtype = DTYPES[stored.tensors[parameter.checkpoint(place)].dtype]
    with atomic_folder(output.absolute()) as folder:
        write_config(folder, run.model, run.length, dtype, tokenizer_source)
        if tokenizer_source is not None:
            copy_files(tokenizer_source, folder)
            match_training(folder)
        _add_text_ends(folder, from_dict(run.checkpoint.manifest.config).data)
        _write_tensors(folder, _exported(run, places, stored), max_shard_bytes)


def _exported(run: Pretrained, places: Places, stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of an export; gpt-oss's experts are stacked."""

    def parts() -> Iterator[tuple[str, Tensor]]:
        for parameter, place in places:
            whole = stored.read(parameter.checkpoint(place))
            yield from zip(parameter.names(place), unfuse(parameter, whole, run.model, run.vocab_size), strict=True)

    if not run.model.traits.stacked_experts:
        yield from parts()
        return
    for name, group in groupby(parts(), lambda part: stacked_name(part[0])):
        tensors = [tensor for _, tensor in group]
        if name.endswith(("_proj", "_proj_bias")):
            tensors = [stack(name, tensors)]
        yield name, tensors.pop()  # no reference stays while the next parts are read


def _write_tensors(folder: Path, named_tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
    """Write tensors to files of at most `max_bytes`, or of one larger tensor, and an index if there are several."""
    files: list[list[str]] = []  # the names in each
    tensors: dict[str, Tensor] = {}  # of the next file
    size = total = 0

    def write_file() -> None:
        save_tensors(tensors, folder / f"{len(files)}.partial")
        files.append(list(tensors))
        tensors.clear()

    for name, tensor in named_tensors:
        if tensors and size + tensor.nbytes > max_bytes:
            write_file()
            size = 0
        tensors[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    write_file()
    if len(files) == 1:
        (folder / "0.partial").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{number}.partial").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def open_run(source: Path) -> tuple[Pretrained, Places, Stored]:
    """Return the checkpoint of a run or checkpoint folder, its parameters in Hugging Face's order, and its tensors.

    Raises:
        UserError: the checkpoint is damaged, or does not hold the tensors of its configuration.
    """
    run = Pretrained.find_checkpoint(source)
    model = run.model
    assert run.checkpoint is not None
    manifest = run.checkpoint.manifest
    stored = Stored(run.folder)

    def order(parameter_at: tuple[Parameter, Place]) -> int:
        parameter, place = parameter_at
        if place:
            return place[0]
        if "embed" in parameter.megatron[0]:  # the embedding first, then the layers, then the rest
            return -1
        return model.num_layers

    places = [(parameter, place) for parameter in parameters_of(model) for place in parameter.places(model)]
    places.sort(key=order)
    needed = {row.checkpoint(place): stored_shape(row, model, run.vocab_size) for row, place in places}
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items() if not name.startswith(_NO_WEIGHTS)}
    for name in sorted(needed.keys() | shapes.keys()):
        shape = shapes.get(name)
        if shape != needed.get(name):
            raise UserError(
                f"checkpoint: {name} in {run.folder} has shape {shape}, its configuration needs {needed.get(name)}"
            )
    try:
        manifest.check_files(run.folder, manifest.files, content=True)
    except UserError as error:
        raise with_offer(error, next(older(run.folder), None)) from None
    return run, places, stored


def _add_text_ends(folder: Path, data: DataConfig) -> None:
    """Add to an export's `eos_token_id` the tokens that end documents and the assistant's turns in its run's data."""
    metadata: list[JsonObject] = []
    if data.mixture or data.data_path:
        metadata = [read_metadata(part.prefix) for part in data.parts]
    text_ends = [about[name] for name in ("eod_id", "turn_end") for about in metadata if about.get(name) is not None]
    has_template = (folder / TEMPLATE_FILE).exists() or "chat_template" in read_beside(folder / HF_FILE, HF_CONFIG)
    if has_template and any("turn_end" not in about and about.get("chat_template", "unknown") for about in metadata):
        logger.warning(
            "eos_token_id: the metadata of the run's data sets is missing or old; if they are chats, add the token "
            "that ends the assistant's turns to the export's config.json and generation_config.json"
        )
    if not text_ends:
        return
    ends: list[int] = []
    for name in ("config.json", "generation_config.json"):
        entries = read_object(folder / name, "is no JSON object; correct or remove it")
        if entries is None:
            continue
        listed = entries.get("eos_token_id")
        if isinstance(listed, list):
            ends = listed
        elif listed is not None:
            ends = [listed]
        if set(text_ends) <= set(ends):
            continue
        ends = list(dict.fromkeys([*ends, *text_ends]))
        entries["eos_token_id"] = ends
        (folder / name).write_text(json.dumps(entries, indent=2) + "\n")


def copy_files(source: Path, target: Path, *more: str) -> None:
    """Copy a folder's tokenizer and generation files, and the files in `more`, byte for byte.

    Raises:
        UserError: a link that leads out of the folder, or nowhere.
    """
    for pattern in (*_FILES, *more):
        for name in sorted(glob.glob(pattern, root_dir=source)):  # Path.glob omits broken links
            if not (source / name).is_dir():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(_content(source, name), target / name)


def _content(folder: Path, name: str) -> Path:
    """Return the regular file that a name refers to.

    A copy may be published, so a link must not copy a file from elsewhere. Its target must be inside the folder, or in
    the blobs of Hugging Face's cache:

        models--org--name/snapshots/REVISION/generation_config.json -> ../../blobs/SHA
    """
    content = (folder / name).resolve()
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parents[1] / "blobs")
    if not content.is_file() or not any(content.is_relative_to(place) for place in allowed):
        raise UserError(f"checkpoint: {folder / name} is a link to {content}; put a copy in its place, or remove it")
    return content


def tokenizer_folder(name: str | None) -> Path | None:
    """Return the folder of an export's tokenizer; None for an export without one, if `name` is "none".

    Raises:
        UserError: `name` is neither a folder with a tokenizer that transformers can load nor a file in one.
    """
    if name == "none":
        return None
    path = Path(name or "none")
    folder = path if path.is_dir() else path.parent
    if not path.exists() or not has_tokenizer(folder):
        raise UserError(
            f"tokenizer: got {name}, needs a folder with tokenizer.json or a SentencePiece .model for transformers; "
            "give --tokenizer FOLDER, or --tokenizer none to export without"
        )
    return folder


def write_config(folder: Path, model: ModelConfig, length: int, dtype: torch.dtype, tokenizer: Path | None) -> None:
    """Write config.json of a model with `vocab_size`, trained on rows of `length` tokens, with weights of `dtype`.

    If the tokenizer's folder has a config.json that describes exactly this model, as for a model from Hugging Face,
    that file is copied, unless it names code (`auto_map`). Otherwise shapes and rotary options are taken from the run,
    and special tokens from that file, or else the tokenizer's tokens that begin and end documents.
    """
    name = str(dtype).removeprefix("torch.")
    special: JsonObject = dict.fromkeys(_SPECIAL)  # not transformers' defaults, which belong to other models
    if tokenizer is not None and (tokenizer / "config.json").is_file():
        beside = read_config(tokenizer)
        special = {token: beside.get(token) for token in _SPECIAL}
        described = None
        with suppress(UserError):  # the tokenizer may belong to an unsupported model
            described = comparable(read_model_config(tokenizer))
        is_same = described == comparable(model) and beside.get("dtype", beside.get("torch_dtype")) == name
        if is_same and "auto_map" not in beside and beside.get("max_position_embeddings", 0) >= length:
            shutil.copyfile(_content(tokenizer, "config.json"), folder / "config.json")
            return
    elif tokenizer is not None:
        opened = Tokenizer(tokenizer)
        with suppress(UserError):  # a tokenizer may have no such token
            special["eos_token_id"] = opened.eod_id
        with suppress(UserError):
            special["bos_token_id"] = opened.bos_id
    assert model.vocab_size is not None
    entries = hugging_face_config(model, model.vocab_size, length) | special | {"torch_dtype": name}
    (folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
