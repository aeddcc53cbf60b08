"""Hugging Face model folders as transformers writes them, and what is refused of them, by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors, is_hugging_face, read_model_config
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError
from tests.checkpoint.models import write_model

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "mistral": MistralConfig}
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}


def written(folder: Path, content: Any) -> Path:
    """A folder with this config.json: an object, a text or bytes."""
    folder.mkdir(exist_ok=True)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "config.json").write_bytes(data)
    return folder


def shapes(model: ModelConfig) -> dict[str, Any]:
    """What decides the computation; a head's size counts, not whether it was given."""
    unlike = ("model_preset", "init_method_std", "make_vocab_size_divisible_by")
    return {k: v for k, v in vars(model).items() if k not in unlike} | {"kv_channels": model.head_size}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_old_file_reads_the_same(tmp_path: Path, family: str) -> None:
    """As transformers 4 wrote it: rope_theta beside, no head_dim, no rope_parameters; Qwen2's window, not in use."""
    content = FAMILIES[family](**SIZES).to_dict()
    new = read_model_config(written(tmp_path / "new", content))
    for name in ("rope_parameters", "head_dim", "layer_types"):
        content.pop(name, None)
    content |= {"rope_theta": 300.0, "rope_scaling": None}
    content |= {"sliding_window": 16} if family == "qwen2" else {}
    old = written(tmp_path / "old", content)
    assert shapes(read_model_config(old)) == shapes(new)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("changed", [{"num_attention_heads": None}, {"hidden_size": "32"}, {"rms_norm_eps": None}])
def test_values_of_another_type_are_one_line(tmp_path: Path, changed: dict[str, Any]) -> None:
    content = LlamaConfig(**SIZES).to_dict() | changed
    assert next(iter(changed)) in refusal(lambda: read_model_config(written(tmp_path, content)))


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    assert not is_hugging_face(tmp_path)
    assert "config.json" in refusal(lambda: read_model_config(tmp_path))


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def with_index(folder: Path, **files: str) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert "holds no model.safetensors; convert" in refusal(lambda: HuggingFaceTensors(tmp_path))
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    with_index(tmp_path, a="1.safetensors", b="2.safetensors")
    assert "lacks 2.safetensors" in refusal(lambda: HuggingFaceTensors(tmp_path))
    tensors = HuggingFaceTensors(with_index(tmp_path, a="1.safetensors"))
    assert tensors.names == {"a"}
    assert "has no tensor b" in refusal(lambda: tensors.open("b"))


@pytest.mark.parametrize("name", ["../private.safetensors", "{}/private.safetensors", "a/../../private.safetensors", 3])
def test_an_index_names_no_file_elsewhere(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "private.safetensors")
    named = name.format(tmp_path) if isinstance(name, str) else name
    message = refusal(lambda: HuggingFaceTensors(with_index(folder, a=named)))
    assert f"{folder / INDEX} names '{named}', which is outside its folder, needs files in {folder};" in message


@pytest.mark.parametrize("file", [SINGLE, "1.safetensors"])
@pytest.mark.parametrize("end", [3, -1])
def test_a_torn_file_is_one_line(tmp_path: Path, file: str, end: int) -> None:
    save_file({"a": torch.ones(2)}, with_index(tmp_path, a="1.safetensors") / file)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:end])
    assert f"{file} is damaged" in refusal(lambda: HuggingFaceTensors(tmp_path))


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_maps_no_tensors(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    assert f"{INDEX} is damaged" in refusal(lambda: HuggingFaceTensors(tmp_path))


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("a", "c", "names 2.safetensors for b, which that file lacks"),
        ("ab", "c", "names 2.safetensors for b, which that file lacks"),
        ("ab", "b", "b is in 1.safetensors and in 2.safetensors"),
    ],
)
def test_an_index_fits_its_files(tmp_path: Path, first: str, second: str, text: str) -> None:
    for number, names in enumerate((first, second), start=1):
        save_file({name: torch.ones(2) for name in names}, tmp_path / f"{number}.safetensors")
    assert text in refusal(lambda: HuggingFaceTensors(with_index(tmp_path, a="1.safetensors", b="2.safetensors")))


@pytest.mark.parametrize("case", ["sharded", "whole beside shards", "short index", "other file"])
def test_the_files_are_those_that_transformers_loads(tmp_path: Path, case: str) -> None:
    """`model.safetensors` before an index; of its files all tensors, also those that it does not list; no other."""
    model = write_model(tmp_path / "model", "llama", shard="20KB", std=0.1)
    if case == "whole beside shards":
        shutil.copy(write_model(tmp_path / "new", "llama") / SINGLE, model)
    elif case == "short index":
        index = json.loads((model / INDEX).read_text())
        one_of_each = {file: name for name, file in index["weight_map"].items()}
        index["weight_map"] = {name: file for file, name in one_of_each.items()}
        (model / INDEX).write_text(json.dumps(index))
    elif case == "other file":
        save_file({"model.norm.weight": torch.zeros(32)}, model / "other.safetensors")
    wanted = AutoModelForCausalLM.from_pretrained(model).state_dict()
    tensors = HuggingFaceTensors(model)
    assert tensors.names == wanted.keys()
    assert all(torch.equal(tensors.open(name)[:], wanted[name]) for name in wanted)


@pytest.mark.parametrize("complete", [True, False])
def test_an_adapter_is_refused(tmp_path: Path, complete: bool) -> None:
    """Also one beside its model, which transformers applies only if another package is installed."""
    if complete:
        written(tmp_path, LlamaConfig(**SIZES).to_dict())
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    assert "adapter_config.json; merge the adapter" in refusal(lambda: read_model_config(tmp_path))
    assert "adapter_config.json; merge the adapter" in refusal(lambda: Pretrained.find(tmp_path))


def test_a_distributed_checkpoint_is_refused(tmp_path: Path) -> None:
    """Which transformers loads even beside model.safetensors."""
    for name in (SINGLE, "shard-00001-model-00001-of-00001.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    assert "holds a distributed checkpoint" in refusal(lambda: HuggingFaceTensors(tmp_path))


@pytest.mark.parametrize("suffix", ["qweight", "weight_packed", "weight"])
def test_quantized_tensors_have_their_own_remedy(tmp_path: Path, suffix: str) -> None:
    """Also if the entry in config.json was removed."""
    model = write_model(tmp_path / "model", "llama")
    tensors = load_file(model / SINGLE)
    tensors[f"model.layers.0.self_attn.q_proj.{suffix}"] = torch.zeros(32, 32, dtype=torch.int32)
    save_file(tensors, model / SINGLE, {"format": "pt"})
    config = read_model_config(model)
    message = refusal(lambda: HuggingFaceTensors(model).check(config, 300))
    assert "has type I32" in message
    assert message.endswith("use the model before its quantization")
