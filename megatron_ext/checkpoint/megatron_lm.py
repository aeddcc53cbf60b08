"""Convert a checkpoint of Megatron-LM to a run folder and back: the same tensors, bit for bit, under other names.

    CHECKPOINT/latest_checkpointed_iteration.txt         RUN/config.yaml
    CHECKPOINT/iter_0000040/common.pt                    RUN/checkpoints/iter_0000000/
                            .metadata, *.distcp   <-->

Megatron-Core's format torch_dist is that of torch.distributed.checkpoint: tensors are whole, of any layout. Those of
all layers may be stacked along a new first axis, those of a layer's experts along the next. Its index and common.pt
are pickles; here they are read without executing anything. Memory holds one tensor of one layer or expert at a time.
"""

import io
import json
import logging
import math
import pickle
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ext.checkpoint.folders import POINTER, folder_name
from megatron_ext.checkpoint.hf.config import comparable
from megatron_ext.checkpoint.hf.convert import check_output, open_run, stored_shape, write_run
from megatron_ext.checkpoint.hf.names import Parameter, Place, parameters_of
from megatron_ext.checkpoint.manifest import check_inside, readable
from megatron_ext.checkpoint.tensors import DTYPES, Shard
from megatron_ext.config import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.config.checks import mistakes
from megatron_ext.config.from_megatron_lm import translate
from megatron_ext.config.megatron_lm import ARGUMENTS
from megatron_ext.config.schema import FIELDS
from megatron_ext.errors import UserError, echo
from megatron_ext.files.atomic import atomic_folder
from megatron_ext.files.reading import typed

logger = logging.getLogger(__name__)
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_FORMAT |= {"common_backend": "torch", "common_backend_version": 1}
# what the block llama has
_FIXED = {name: argument.needed for name, argument in ARGUMENTS.items() if argument.needed != argument.default}
_SAME = [  # options of the model under the same name
    name
    for name, argument in ARGUMENTS.items()
    if argument.has_same_name and FIELDS[name].section == "model" and name not in ("vocab_size", "rope_scaling_factor")
]
_BALANCING = ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_router_bias_update_rate")
_NO_WEIGHTS = ("optimizer", "chained_", "rng_state", "rerun_state")


class _Opaque:
    """Stands for an object of any class in a pickle; only attributes are kept."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Opaque":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    extend = add = append


class _Unpickler(pickle.Unpickler):
    """Execute nothing: only torch's dtypes and the index's data classes are known, all else becomes `_Opaque`."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return torch.Size
        found = vars(dcp).get(name) if module == dcp.__name__ else None
        if isinstance(found, type) and found.__module__ == module:
            return found
        return _StorageInfo if (module, name) == (_StorageInfo.__module__, "_StorageInfo") else _Opaque

    def persistent_load(self, pid: Any) -> None:
        """Skip a tensor of common.pt."""


class _Source(DefaultLoadPlanner):
    """Reads a checkpoint's tensors, each by its key and its index along the leading axes.

    Attributes:
        tensors: the metadata of each tensor.
        args: the command line of Megatron-LM by name.
    """

    def __init__(self, path: Path, iteration: int | None) -> None:
        super().__init__()
        self.folder = folder = _locate(path, iteration)
        try:
            with readable(folder / ".metadata"), (folder / ".metadata").open("rb") as file:
                index = _Unpickler(file).load()
            for info in index.storage_data.values():
                check_inside(info.relative_path, folder / ".metadata", "input")
            # newer versions save what common.pt held as an entry of the index, a list of one
            entry = [info for at, info in index.storage_data.items() if at.fqn.startswith("common_state/")]
            path = folder / (entry[0].relative_path if entry else "common.pt")
            with readable(path), path.open("rb") as file:
                file.seek(entry[0].offset if entry else 0)
                content = io.BytesIO(file.read(entry[0].length if entry else -1))
            with zipfile.ZipFile(content) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
                common = _Unpickler(io.BytesIO(archive.read(name))).load()
                common = common[0] if entry else common
            self.args: dict[str, Any] = vars(common["args"])
            stored = index.state_dict_metadata.items()
            self.tensors = {name: tensor for name, tensor in stored if isinstance(tensor, dcp.TensorStorageMetadata)}
        except UserError:
            raise
        except KeyError:
            raise UserError(f"input: {folder} has no args, needs a checkpoint saved by Megatron-LM") from None
        except Exception as error:  # a damaged pickle may raise any
            raise UserError(f"input: {folder} is damaged ({echo(error)}); take another checkpoint") from None
        self.reader = FileSystemReader(folder)
        self.reader.set_up_storage_reader(index, is_coordinator=True)
        self._whole = torch.empty(0)

    def lookup_tensor(self, index: dcp.MetadataIndex) -> Tensor:
        return self._whole

    def read(self, key: str, at: Place, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors[key]
        self._whole = torch.empty((1,) * len(at) + shape, dtype=tensor.properties.dtype)
        part = dcp.ChunkStorageMetadata(torch.Size((*at, *(0 for _ in shape))), self._whole.shape)
        items = create_read_items_for_chunk_list(key, tensor, [part])
        if sum(math.prod(item.lengths) for item in items) != self._whole.numel():
            raise UserError(f"input: {self.folder} lacks part of {key}; take another checkpoint")
        try:
            self.reader.read_data(LoadPlan(items), self)
        except Exception as error:
            raise UserError(f"input: {key} in {self.folder} cannot be read ({echo(error)})") from None
        return self._whole.view(shape)


def _locate(path: Path, iteration: int | None) -> Path:
    """Return the checkpoint in a folder of Megatron-LM's --save, or the folder itself if it is one."""
    folder = path
    if iteration is not None or (path / POINTER).is_file():
        with readable(path / POINTER):
            step = str(iteration) if iteration is not None else (path / POINTER).read_text("utf-8").strip()
        folder = path / (f"iter_{int(step):07d}" if step.isdecimal() else "release")
    if not folder.is_dir():
        raise UserError(f"input: {folder} does not exist; check the path")
    if folder.name.startswith("mp_rank_"):
        folder = folder.parent
    try:
        kind = json.loads((folder / "metadata.json").read_bytes())["sharded_backend"]
    except (OSError, ValueError, LookupError, TypeError):
        kind = "none"
    if kind == "none" and any(folder.glob("mp_rank_*")):
        kind = "torch, the legacy one"
    elif kind == "none" and (folder / ".metadata").is_file():
        kind = "fsdp_dtensor or torch_dcp"
    if kind != _FORMAT["sharded_backend"]:
        needs = "torch_dist (--ckpt-format torch_dist, or --ckpt-convert-format torch_dist)"
        raise UserError(f"input: {folder} has format {echo(kind)}, needs {needs}")
    return folder


def _places_in(row: Parameter, place: Place) -> Iterator[tuple[str, Place]]:
    """Yield the keys that a parameter may have, each with its index along the leading axes; stacked ones first."""
    names = list(row.megatron[:1] if row.of_experts else row.megatron[::-1])
    # Megatron's own layers save the norm before a router, too, under the name that it has if it is fused
    names += [name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_") for name in names if "pre_mlp" in name]
    for name in names:
        for stacked in ("01", "1", "0", ""):
            key, at = name.replace("local_experts.", "experts."), []
            for number, where in zip("01", place, strict=False):
                key = key.replace(f"{{{number}}}.", "" if number in stacked else f"{where}.")
                at += [where] if number in stacked else []
            yield key, tuple(at)


def model_config(args: dict[str, Any], vocab_size: int, accepted: Sequence[str] = ()) -> ModelConfig:
    """Return the model that Megatron-LM builds from its arguments, with `vocab_size` rows of the embedding.

    Raises:
        UserError: an argument that our model does not support, or one that is unknown and not in `accepted`; the
            message names it.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not args.get(name):
            raise UserError(f"input: the checkpoint's args have no {name}, needs those of Megatron-LM")
    translation = translate(args)
    for line in translation.model.values():
        raise UserError(f"input: the checkpoint's args have {line}; convert it by Megatron-Bridge")
    for name, line in translation.unknown.items():
        if name not in accepted:
            remedy = f"add --accept {name} if it does not change what the model computes"
            raise UserError(f"input: the checkpoint's args have {line}; {remedy}")
    options = {name: value for name, value in translation.options.items() if FIELDS[name].section == "model"}
    options |= {"vocab_size": vocab_size, "make_vocab_size_divisible_by": math.gcd(vocab_size, 128)}
    model = typed(options, ModelConfig, "input: the checkpoint's args")
    if mistake := next(mistakes(Config(model=model, data=DataConfig(data_path=("none",))), 1, training=False), None):
        raise UserError(f"input: the checkpoint has values with which it cannot run here: {mistake}")
    return model


def training_config(args: dict[str, Any], bf16: bool) -> TrainingConfig:
    """Return how a run of Megatron-LM balanced its experts; log what else of its training has no place here."""
    translation = translate(args)
    for name, line in translation.training.items():
        if name in _BALANCING or ARGUMENTS[name].group == "training":  # others are of its data and its layout
            logger.warning("training differs from that of the checkpoint: %s", line)
    carried = {name: value for name, value in translation.options.items() if name in _BALANCING}
    return typed(carried | {"bf16": bf16}, TrainingConfig, "input: the checkpoint's args")


def arguments(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments with which Megatron-LM builds this model.

    Raises:
        UserError: it cannot; the message names the option.
    """
    args = _FIXED | {name: getattr(model, name) for name in _SAME} | {"kv_channels": model.head_size}
    args |= {"layernorm_epsilon": model.norm_epsilon, "norm_epsilon": model.norm_epsilon}  # since 0.16, and before
    args |= {"group_query_attention": True, "num_query_groups": model.num_query_groups}
    args["moe_layer_freq"] = list(model.moe_layer_freq) or 1
    args["window_size"] = (model.local_window - 1, 0) if model.local_window else None
    args["use_rope_scaling"] = model.rope_scaling == "llama3"
    if model.rope_scaling == "llama3":
        args["rope_scaling_factor"] = model.rope_scaling_factor
    if model.rope_scaling == "linear":
        args["rotary_seq_len_interpolation_factor"] = model.rope_scaling_factor
    assert model.vocab_size is not None
    args["padded_vocab_size"] = model.padded_vocab_size(model.vocab_size)
    wanted, theirs = vars(comparable(model)), vars(comparable(model_config(args, model.vocab_size)))
    if unlike := [name for name in wanted if wanted[name] != theirs[name]]:
        raise UserError(f"{unlike[0]}: got {wanted[unlike[0]]!r}, which a checkpoint of Megatron-LM cannot have here")
    return args


def megatron_lm_to_megatron(
    source: Path, output: Path, *, iteration: int | None = None, accepted: Sequence[str] = ()
) -> None:
    """Write a run folder for `--init-from` from a checkpoint of Megatron-LM, or the newest one in a folder.

    `accepted` are arguments that this version does not know and that do not change the model.

    Raises:
        UserError: the model or the format is not supported, the checkpoint is damaged, or `output` exists.
    """
    began = time.perf_counter()
    check_output(output, source)
    stored = _Source(source, iteration)
    if (embedding := stored.tensors.get("embedding.word_embeddings.weight")) is None:
        raise UserError(f"input: {stored.folder} has no embedding.word_embeddings.weight, needs a GPT model's weights")
    vocab_size = embedding.size[0]
    model = model_config(stored.args, vocab_size, accepted)
    shards, used = list[Shard](), set[str]()
    for row in parameters_of(model):
        shape = stored_shape(row, model, vocab_size)
        for place in row.places(model):
            found = [(key, at) for key, at in _places_in(row, place) if key in stored.tensors]
            if not found:
                raise UserError(f"input: {stored.folder} has no {row.checkpoint(place)}, needs all weights of its args")
            (key, at), tensor = found[0], stored.tensors[found[0][0]]
            if tuple(tensor.size[len(at) :]) != shape or tensor.properties.dtype not in DTYPES.values():
                got = f"{list(tensor.size)} {tensor.properties.dtype}"
                raise UserError(f"input: {key} in {stored.folder} has {got}, its args need {list(shape)} per layer")
            used.update(key for key, _ in found)
            read = partial(stored.read, key, at, shape)
            shards.append(Shard(row.checkpoint(place), shape, (0,) * len(shape), shape, tensor.properties.dtype, read))
    if more := sorted(key for key in stored.tensors.keys() - used if not key.startswith(_NO_WEIGHTS)):
        raise UserError(f"input: {stored.folder} has {more[0]}, which this package does not support")
    data = DataConfig(seq_length=stored.args.get("max_position_embeddings") or DataConfig.seq_length)
    training = training_config(stored.args, bf16=shards[0].dtype is torch.bfloat16)
    write_run(output, Config(model=model, data=data, training=training), shards, began)


class _Target(DefaultSavePlanner):
    """Reads each tensor when it is written."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.items: list[WriteItem] = []
        self.data: dict[dcp.MetadataIndex, Any] = {}

    def add(self, index: dcp.MetadataIndex, data: Any, kind: WriteItemType, described: TensorWriteData | None) -> None:
        self.items.append(WriteItem(index, kind, tensor_data=described))
        self.data[index] = data

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.data[write_item.index]()


def _nothing() -> io.BytesIO:
    content = io.BytesIO()
    torch.save([None], content)  # a list with one object for each process that has this part
    return content


def megatron_to_megatron_lm(source: Path, output: Path) -> None:
    """Write a checkpoint, with weights alone, that Megatron-LM loads with --finetune.

    Raises:
        UserError: Megatron-LM's flags cannot describe the model, the checkpoint is damaged, or `output` exists.
    """
    check_output(output, source)
    run, places, stored = open_run(source)
    model, step = run.model, run.checkpoint.manifest.step  # type: ignore[union-attr]
    args = arguments(model) | {"seq_length": run.length, "max_position_embeddings": run.length, "iteration": step}
    target = _Target()
    for row, place in places:
        found = stored.tensors[row.checkpoint(place)]
        single = bool(model.moe_layer_freq)
        sizes = (model.num_layers, model.num_experts or 0)
        keys = [(key, at) for key, at in _places_in(row, place) if len(at) == max(len(place) - single, 0)]
        for key, at in dict.fromkeys(keys if "pre_mlp" in keys[0][0] else keys[:1]):
            whole = torch.Size((*sizes[len(place) - len(at) : len(place)], *found.shape))
            part = torch.Size((*at, *(0 for _ in found.shape))), torch.Size((*(1 for _ in at), *found.shape))
            properties = dcp.TensorProperties(dtype=DTYPES[found.dtype])
            described = TensorWriteData(dcp.ChunkStorageMetadata(*part), properties, whole)
            data = partial(lambda name, shape: stored.read(name).view(shape), row.checkpoint(place), part[1])
            target.add(dcp.MetadataIndex(key, part[0]), data, WriteItemType.SHARD, described)
            if ".linear_" in key and key.endswith(".weight"):  # of which layers may keep more than weights: nothing
                number, count = (".".join(map(str, axes)) for axes in (at or (0,), whole[: len(at)] or (1,)))
                state = dcp.MetadataIndex(f"{key.removesuffix('weight')}_extra_state/shard_{number}_{count}")
                target.add(state, _nothing, WriteItemType.BYTE_IO, None)
    with atomic_folder(output.absolute()) as folder:
        checkpoint = folder / folder_name(step)
        checkpoint.mkdir()
        writer = FileSystemWriter(checkpoint, sync_files=False)
        writer.set_up_storage_writer(True)
        plans, index = target.create_global_plan([SavePlan(target.items)])
        (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])
        writer.finish(index, [writer.write_data(plan, target).wait()])
        torch.save({"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": step}, checkpoint / "common.pt")
        (checkpoint / "metadata.json").write_text(json.dumps(_FORMAT))
        (folder / POINTER).write_text(str(step))
