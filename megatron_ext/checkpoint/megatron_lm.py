"""Convert a checkpoint of Megatron-LM to a run folder and back: the same tensors, bit for bit, under other names.

    CHECKPOINT/latest_checkpointed_iteration.txt         RUN/config.yaml
    CHECKPOINT/iter_0000040/common.pt                    RUN/checkpoints/iter_0000000/
                            .metadata, *.distcp   <-->    (with the optimizer's state: iter_0000040)

Megatron-Core's format torch_dist is the format of torch.distributed.checkpoint: tensors are whole, of any layout. The
layers' tensors may be stacked along a new first axis, the tensors of a layer's experts along the next. The format's
index and common.pt are pickles; here they are read without executing anything. Memory holds one tensor of one layer
or expert at a time.
"""

import io
import json
import logging
import math
import pickle
import re
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
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
from megatron_ext.checkpoint.hf.convert import Progress, check_output, open_run, stored_shape, write_run
from megatron_ext.checkpoint.manifest import check_inside, readable
from megatron_ext.checkpoint.parameters import Parameter, Place, parameters_of
from megatron_ext.checkpoint.tensors import DTYPES, Shard, Stored
from megatron_ext.config import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.config.arguments import to_dict
from megatron_ext.config.checks import mistakes
from megatron_ext.config.from_megatron_lm import mscale, translate
from megatron_ext.config.megatron_lm import ARGUMENTS, DEFAULTS
from megatron_ext.config.schema import FIELDS, flag, validate
from megatron_ext.errors import UserError, echo
from megatron_ext.files.atomic import atomic_folder
from megatron_ext.files.reading import typed

logger = logging.getLogger(__name__)
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_FORMAT |= {"common_backend": "torch", "common_backend_version": 1}
# arguments for which the block llama needs another value than Megatron-LM's default
_FIXED = {name: argument.needed for name, argument in ARGUMENTS.items() if argument.needed != argument.default}
_SAME = [  # options of the model under the same name
    name
    for name, argument in ARGUMENTS.items()
    if argument.has_same_name and FIELDS[name].section == "model" and name not in ("vocab_size", "rope_scaling_factor")
]
# options that Megatron-LM's --use-checkpoint-args does not read from a checkpoint
_UNREAD = (
    *("norm_epsilon", "qk_layernorm", "no_rope_freq", "window_size", "window_attn_skip_freq", "use_rope_scaling"),
    *("rope_scaling_factor", "rotary_seq_len_interpolation_factor", "moe_router_num_groups", "moe_router_group_topk"),
    *("multi_latent_attention", "softmax_type"),
)
_UNREAD_OF_LATENT_ATTENTION = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rotary_scaling_factor", "mscale", "mscale_all_dim"),
)
_BALANCING = ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_router_bias_update_rate")
_NO_WEIGHTS = ("optimizer", "chained_", "rng_state", "rerun_state")
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


class _Opaque:
    """Stands for an object of any class in a pickle; only attributes are kept."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Opaque":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    extend = add = append


class _Unpickler(pickle.Unpickler):
    """Execute nothing: only the names in `_KNOWN` are resolved, any other becomes `_Opaque`.

    A tensor of one element in `archive` becomes its number, any other tensor None.
    """

    def __init__(self, content: bytes, archive: zipfile.ZipFile | None = None, folder: str = "") -> None:
        super().__init__(io.BytesIO(content))
        self._archive = archive
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN.get((module, name), _Opaque)

    def persistent_load(self, pid: Any) -> float | None:
        """Return the only number of a tensor's memory."""
        _, dtype, key, _, count = pid
        if self._archive is None or count != 1 or not isinstance(dtype, torch.dtype):
            return None
        content = self._archive.read(f"{self._folder}data/{key}")
        return torch.frombuffer(bytearray(content), dtype=dtype).item()


def _number(storage: float | None, *_: Any) -> float | None:
    return storage


# all that a pickle may name; anything else becomes `_Opaque`
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _number,
    # common.pt may hold one number in one of these storages: torch's Adam keeps its step as a tensor
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "Size"): torch.Size,
    (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
}
_KNOWN |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
for _name, _value in vars(dcp).items():  # the index's data classes, not what their module imports
    if isinstance(_value, type) and _value.__module__ == dcp.__name__:
        _KNOWN[dcp.__name__, _name] = _value


def _unpickle(content: bytes) -> Any:
    """Return what torch.save wrote, without executing anything."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return _Unpickler(archive.read(name), archive, name.removesuffix("data.pkl")).load()


class _Source(DefaultLoadPlanner):
    """Reads a checkpoint's tensors, each by its key and its index along the leading axes.

    Attributes:
        tensors: the metadata of each tensor.
        args: the command line of Megatron-LM by name.
        common: everything that is not a tensor.
    """

    def __init__(self, path: Path, iteration: int | None) -> None:
        super().__init__()
        self.folder = folder = _locate(path, iteration)
        try:
            with readable(folder / ".metadata"):
                index = _Unpickler((folder / ".metadata").read_bytes()).load()
            for info in index.storage_data.values():
                check_inside(info.relative_path, folder / ".metadata", "input")
            self.common = _read_common(folder, index)
            self.args: dict[str, Any] = vars(self.common["args"])
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


def _read_common(folder: Path, index: Any) -> dict[str, Any]:
    """Return what common.pt holds; newer versions of Megatron-Core save it as an entry of the index, a list of one."""
    common: dict[str, Any]
    for entry, info in index.storage_data.items():
        if entry.fqn.startswith("common_state/"):
            path = folder / info.relative_path
            with readable(path), path.open("rb") as file:
                file.seek(info.offset)
                common = _unpickle(file.read(info.length))[0]
            return common
    with readable(folder / "common.pt"):
        common = _unpickle((folder / "common.pt").read_bytes())
    return common


def _locate(path: Path, iteration: int | None) -> Path:
    """Return the checkpoint in a folder of Megatron-LM's --save, or the folder itself if it is one."""
    folder = path
    if iteration is not None:
        folder = path / folder_name(iteration)
    elif (path / POINTER).is_file():
        with readable(path / POINTER):
            step = (path / POINTER).read_text("utf-8").strip()
        folder = path / "release"
        if step.isdecimal():
            folder = path / folder_name(int(step))
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
    names = list(reversed(row.megatron))
    if row.of_experts:
        names = [row.megatron[0]]
    # Megatron's own layers save the norm before a router, too, under the name that it has if it is fused
    names += [name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_") for name in names if "pre_mlp" in name]
    for name in names:
        for stacked in ("01", "1", "0", ""):
            key = name.replace("local_experts.", "experts.")
            at = []
            for number, where in zip("01", place, strict=False):
                if number in stacked:
                    key = key.replace(f"{{{number}}}.", "")
                    at.append(where)
                else:
                    key = key.replace(f"{{{number}}}.", f"{where}.")
            yield key, tuple(at)


def model_config(args: dict[str, Any], vocab_size: int, accepted: Sequence[str] = ()) -> ModelConfig:
    """Return the model that Megatron-LM builds from its arguments, with `vocab_size` rows of the embedding.

    Raises:
        UserError: an argument that our model does not support, or one that is unknown and not in `accepted`; the
            message names it.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not args.get(name):
            raise UserError(f"input: the checkpoint's args have no {name}, needs the args of Megatron-LM")
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
    for mistake in mistakes(Config(model=model, data=DataConfig(data_path=("none",))), 1, training=False):
        raise UserError(f"input: the checkpoint has values with which it cannot run here: {mistake}")
    return model


def training_config(args: dict[str, Any], bf16: bool) -> TrainingConfig:
    """Return how a run of Megatron-LM balanced its experts; log what else of its training has no place here."""
    translation = translate(args)
    for name, line in translation.training.items():
        if name in _BALANCING or ARGUMENTS[name].group == "training":  # others are of its data and its layout
            logger.warning("training differs from the checkpoint's training: %s", line)
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
    args["window_size"] = None
    if model.local_window:
        args["window_size"] = (model.local_window - 1, 0)
    args["use_rope_scaling"] = model.rope_scaling == "llama3"
    if model.rope_scaling == "llama3":
        args["rope_scaling_factor"] = model.rope_scaling_factor
    if model.rope_scaling == "linear":
        args["rotary_seq_len_interpolation_factor"] = model.rope_scaling_factor
    if model.multi_latent_attention:
        args |= {"group_query_attention": False, "kv_channels": None, "qk_layernorm": True}
        if model.rope_scaling == "yarn":
            args["rotary_scaling_factor"] = model.rope_scaling_factor
            args["mscale_all_dim"] = model.rope_mscale_all_dim
            args["mscale"] = mscale(model)
    assert model.vocab_size is not None
    args["padded_vocab_size"] = model.padded_vocab_size(model.vocab_size)
    built = vars(comparable(model_config(args, model.vocab_size)))
    for name, value in vars(comparable(model)).items():
        if value != built[name]:
            raise UserError(f"{name}: got {value!r}, which a checkpoint of Megatron-LM cannot have here")
    return args


def continued_config(args: dict[str, Any], config: Config) -> Config:
    """Return a configuration with the data, the batches, the optimizer and the schedule of the arguments.

    Logs what else of the training has no place here.

    Raises:
        UserError: a value is invalid here; the message names the option.
    """
    translation = translate(args)
    for name, line in translation.training.items():
        if name != "load":
            logger.warning("training differs from the checkpoint's training: %s", line)
    sections = to_dict(config)
    for name, value in translation.options.items():
        if FIELDS[name].section in ("data", "training", "optimizer"):
            sections[FIELDS[name].section][name] = value
    return validate(sections, "input: the checkpoint's args: ")


def _entries(state: Any, names: Collection[str]) -> Iterator[Any]:
    """Yield the entries with these names in nested dictionaries and lists, except None."""
    if isinstance(state, dict):
        yield from (value for name, value in state.items() if name in names and value is not None)
        state = list(state.values())
    if isinstance(state, list | tuple):
        for part in state:
            yield from _entries(part, names)


def _progress(stored: _Source) -> Progress:
    """Return the progress of the run that saved a checkpoint with Adam's state.

    Raises:
        UserError: it has none, or one whose tensors do not have the shapes of the weights.
    """
    state = stored.common.get("optimizer")
    optimizer = stored.args.get("optimizer", "adam")
    has = f"input: {stored.folder} has"
    remedy = "leave --with-optimizer out"
    if optimizer != "adam":
        raise UserError(f"{has} the optimizer {echo(optimizer)}, needs adam; {remedy}")
    if not any("optimizer.state.exp_avg." in name for name in stored.tensors):
        kind = next(_entries(state, ["param_state_sharding_type"]), "none")
        needs = f"fully_reshardable (save it with {_RESHARDABLE}) or the plain optimizer's"
        raise UserError(f"{has} an optimizer's state in the format {echo(kind)}, needs {needs}; {remedy}")
    counts = {
        "iteration": {stored.common.get("iteration")},
        "consumed_train_samples": {stored.args.get("consumed_train_samples")},
        "step": set(_entries(state, ["step", "common_step"])),
    }
    for name, values in counts.items():
        if len(values) != 1 or not all(isinstance(value, int | float) and 0 < value < 2**63 for value in values):
            raise UserError(
                f"{has} {name} {echo(sorted(map(str, values)))}, needs one number of its progress; {remedy}"
            )
    step, consumed, updates = (int(values.pop()) for values in counts.values())
    return Progress(step, consumed, updates)


def _shard(
    stored: _Source, key: str, at: Place, shape: tuple[int, ...], name: str, dtypes: Collection[torch.dtype]
) -> Shard:
    """Return a tensor, or the part of it at an index of its leading axes, under its name in our checkpoints."""
    tensor = stored.tensors[key]
    dtype = tensor.properties.dtype
    if tuple(tensor.size[len(at) :]) != shape or dtype not in dtypes:
        got = f"{list(tensor.size)} {dtype}"
        raise UserError(f"input: {key} in {stored.folder} has {got}, its args need {list(shape)} per layer")
    return Shard(name, shape, (0,) * len(shape), shape, dtype, partial(stored.read, key, at, shape))


def _weights(stored: _Source, model: ModelConfig, vocab_size: int) -> tuple[list[Shard], dict[str, tuple[str, Place]]]:
    """Return all weights, and the keys and indices of the trained ones, by name.

    Raises:
        UserError: a weight is missing, or there is one that the model does not have.
    """
    shards = list[Shard]()
    used = set[str]()
    places = dict[str, tuple[str, Place]]()
    for row in parameters_of(model):
        shape = stored_shape(row, model, vocab_size)
        for place in row.places(model):
            stored_at = [(key, at) for key, at in _places_in(row, place) if key in stored.tensors]
            if not stored_at:
                raise UserError(f"input: {stored.folder} has no {row.checkpoint(place)}, needs all weights of its args")
            key, at = stored_at[0]
            used.update(key for key, _ in stored_at)
            shards.append(_shard(stored, key, at, shape, row.checkpoint(place), DTYPES.values()))
            if row.trained:
                places[shards[-1].name] = key, at
    for key in sorted(stored.tensors.keys() - used):
        if not key.startswith(_NO_WEIGHTS):
            raise UserError(f"input: {stored.folder} has {key}, which this package does not support")
    return shards, places


def _adam_states(stored: _Source, places: dict[str, tuple[str, Place]], weights: Sequence[Shard]) -> Iterator[Shard]:
    """Yield Adam's state of weights, whose keys and indices `places` has by name.

    Raises:
        UserError: the state of a weight is missing or not in float32, or the weight itself is in float16.
    """
    # parts of an optimizer may number their keys; fully_reshardable has another name for the master weight
    plain = {re.sub(r"^chained_\d+\.", "", name).replace(".param.", ".fp32_param."): name for name in stored.tensors}
    for weight in weights:
        key, at = places[weight.name]
        if weight.dtype is torch.float16:
            raise UserError(f"input: {key} in {stored.folder} is in float16, needs bfloat16 or float32 to go on here")
        names = ["exp_avg", "exp_avg_sq"]
        if weight.dtype is torch.bfloat16:
            names.append("fp32_param")
        for name in names:
            state = plain.get(f"optimizer.state.{name}.{key}")
            if state is None:
                raise UserError(
                    f"input: {stored.folder} has no optimizer.state.{name}.{key}, needs all of Adam's state"
                )
            grid = tuple(stored.tensors[state].size[len(at) :])
            is_flat = len(grid) > len(weight.sizes) and math.prod(grid) == math.prod(weight.sizes)
            sizes = weight.sizes
            if is_flat:
                sizes = grid
            shard = _shard(stored, state, at, sizes, f"optimizer.state.{name}.{weight.name}", [torch.float32])
            if is_flat:
                data = partial(_from_blocks, shard.data, weight.sizes)
                shard = replace(shard, shape=weight.shape, offset=weight.offset, sizes=weight.sizes, data=data)
            yield shard


def _from_blocks(blocks: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of which a grid of equal blocks is stored, each flattened, as in fully_sharded_model_space.

    A matrix has blocks [rows of blocks, columns of blocks, elements of a block].
    """
    flat = blocks()
    grid = flat.shape[:-1]
    block = [length // count for length, count in zip(shape, grid, strict=True)]
    axes = range(2 * len(shape))
    order = [axis for pair in zip(axes[: len(shape)], axes[len(shape) :], strict=True) for axis in pair]
    return flat.view(*grid, *block).permute(order).reshape(shape)


def flags(args: dict[str, Any]) -> list[str]:
    """Return the words of Megatron-LM's command line that load a checkpoint with these arguments."""
    words = ["--finetune", "--use-checkpoint-args"]
    names = list(_UNREAD)
    if args.get("multi_latent_attention"):
        names += _UNREAD_OF_LATENT_ATTENTION
    for name in names:
        value = args.get(name)
        if value == DEFAULTS[name] or value is None:
            continue
        words.append(flag(name))
        if isinstance(value, tuple | list):
            words.append(",".join(map(str, value)))
        elif isinstance(value, float):
            words.append(format(value, "g"))
        elif value is not True:
            words.append(str(value))
    return words


def megatron_lm_to_megatron(
    source: Path,
    output: Path,
    *,
    iteration: int | None = None,
    accepted: Sequence[str] = (),
    with_optimizer: bool = False,
) -> None:
    """Write a run folder for `--init-from` from a checkpoint of Megatron-LM, or the newest one in a folder.

    Args:
        source: the checkpoint, or a folder of Megatron-LM's --save.
        output: the run folder.
        iteration: of a folder with several checkpoints.
        accepted: arguments that this version does not know and that do not change the model.
        with_optimizer: write a run for `--load` that continues the one of Megatron-LM: with Adam's state, at its step.

    Raises:
        UserError: the model or the format is not supported, the checkpoint is damaged, or `output` exists.
    """
    began = time.perf_counter()
    check_output(output, source)
    stored = _Source(source, iteration)
    embedding = stored.tensors.get("embedding.word_embeddings.weight")
    if embedding is None:
        raise UserError(f"input: {stored.folder} has no embedding.word_embeddings.weight, needs a GPT model's weights")
    vocab_size = embedding.size[0]
    model = model_config(stored.args, vocab_size, accepted)
    progress = Progress()
    if with_optimizer:
        progress = _progress(stored)
    shards, places = _weights(stored, model, vocab_size)
    data = DataConfig(seq_length=stored.args.get("max_position_embeddings") or DataConfig.seq_length)
    bf16 = shards[0].dtype is torch.bfloat16
    if with_optimizer:
        config = continued_config(stored.args, Config(model=model, data=data, training=TrainingConfig(bf16=bf16)))
        shards += list(_adam_states(stored, places, [shard for shard in shards if shard.name in places]))
    else:
        config = Config(model=model, data=data, training=training_config(stored.args, bf16))
    write_run(output, config, shards, began, progress=progress)


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


def _add_weight(target: _Target, model: ModelConfig, stored: Stored, row: Parameter, place: Place) -> None:
    """Add a weight to a checkpoint of Megatron-LM, under the keys at which its layers look for it."""
    name = row.checkpoint(place)
    weight = stored.tensors[name]
    stacked_axes = len(place)
    if model.moe_layer_freq:  # layers differ and are not stacked
        stacked_axes = max(stacked_axes - 1, 0)
    keys = [(key, at) for key, at in _places_in(row, place) if len(at) == stacked_axes]
    # a norm before latents or a router is looked for under either name, other norms under that of a fused one
    if not (model.multi_latent_attention or "pre_mlp" in keys[0][0]):
        keys = keys[:1]
    for key, at in dict.fromkeys(keys):
        stacked = (model.num_layers, model.num_experts or 0)[len(place) - len(at) : len(place)]
        offset = torch.Size((*at, *(0 for _ in weight.shape)))
        sizes = torch.Size((*(1 for _ in at), *weight.shape))
        properties = dcp.TensorProperties(dtype=DTYPES[weight.dtype])
        whole = torch.Size((*stacked, *weight.shape))
        described = TensorWriteData(dcp.ChunkStorageMetadata(offset, sizes), properties, whole)
        data = partial(lambda name, shape: stored.read(name).view(shape), name, sizes)
        target.add(dcp.MetadataIndex(key, offset), data, WriteItemType.SHARD, described)
        if ".linear_" in key and key.endswith(".weight"):  # a layer may also look for extra state: save an empty one
            number = ".".join(map(str, at or (0,)))
            count = ".".join(map(str, stacked or (1,)))
            state = dcp.MetadataIndex(f"{key.removesuffix('weight')}_extra_state/shard_{number}_{count}")
            target.add(state, _nothing, WriteItemType.BYTE_IO, None)


def megatron_to_megatron_lm(source: Path, output: Path) -> list[str]:
    """Write a checkpoint, with weights alone, that Megatron-LM loads; return what its command line needs.

    Raises:
        UserError: Megatron-LM's flags cannot describe the model, the checkpoint is damaged, or `output` exists.
    """
    check_output(output, source)
    run, places, stored = open_run(source)
    step = run.checkpoint.manifest.step  # type: ignore[union-attr]
    args = arguments(run.model) | {"seq_length": run.length, "max_position_embeddings": run.length, "iteration": step}
    target = _Target()
    for row, place in places:
        _add_weight(target, run.model, stored, row, place)
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
    words = ["--load", str(output), *flags(args)]
    row, place = places[0]
    if stored.tensors[row.checkpoint(place)].dtype == "BF16":
        words.append("--bf16")
    return words
