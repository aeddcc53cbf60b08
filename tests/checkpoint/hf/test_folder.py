"""Hugging Face model folders as transformers writes them, and what is refused of them, by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from megatron_ext.checkpoint.hf.config import comparable
from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors, read_model_config
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.errors import echo
from tests.checkpoint.models import SIZES, write_model
from tests.conftest import refused


def written(folder: Path, content: dict[str, Any]) -> Path:
    """A folder with this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config, MistralConfig])
def test_an_old_file_reads_the_same(tmp_path: Path, family: type[PreTrainedConfig]) -> None:
    """transformers 4 wrote rope_theta beside, no head_dim, no rope_parameters, and Qwen2's window, not in use."""
    content = family(**SIZES).to_dict()
    new = read_model_config(written(tmp_path / "new", content))
    for name in ("rope_parameters", "head_dim", "layer_types"):
        content.pop(name, None)
    content |= {"rope_theta": 1000.0, "rope_scaling": None}
    content |= {"sliding_window": 16} if family is Qwen2Config else {}
    assert comparable(read_model_config(written(tmp_path / "old", content))) == comparable(new)


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def with_index(folder: Path, **files: str) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert "holds no model.safetensors; convert" in refused(HuggingFaceTensors, tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    for missing_file in ("2.safetensors", "2" * 5000):  # longer than a file system allows
        with_index(tmp_path, a="1.safetensors", b=missing_file)
        assert f"lacks {echo(missing_file)}" in refused(HuggingFaceTensors, tmp_path)
    tensors = HuggingFaceTensors(with_index(tmp_path, a="1.safetensors"))
    assert tensors.names == {"a"}
    assert "has no tensor b" in refused(tensors.open, "b")


@pytest.mark.parametrize("name", ["../private.safetensors", "{}/private.safetensors", "a/../../private.safetensors", 3])
def test_an_index_names_no_file_elsewhere(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "private.safetensors")
    named = name.format(tmp_path) if isinstance(name, str) else name
    message = refused(HuggingFaceTensors, with_index(folder, a=named))
    assert f"{folder / INDEX} names '{named}', which is outside its folder, needs files in {folder};" in message


def test_torn_files_are_named(tmp_path: Path) -> None:
    for content in ("{", "{}", "[]", '{"weight_map": []}', '{"weight_map": {}}'):
        (tmp_path / INDEX).write_text(content)
        assert f"{INDEX} is damaged" in refused(HuggingFaceTensors, tmp_path)
    for file in ("1.safetensors", SINGLE):
        save_file({"a": torch.ones(2)}, with_index(tmp_path, a="1.safetensors") / file)
        whole = (tmp_path / file).read_bytes()
        for torn in (whole[:3], whole[:-1]):
            (tmp_path / file).write_bytes(torn)
            assert f"{file} cannot be read" in refused(HuggingFaceTensors, tmp_path)
        (tmp_path / file).unlink()
        (tmp_path / file).symlink_to("/proc/self/status")  # the library raises an OSError without a number
        assert f"{file} cannot be read" in refused(HuggingFaceTensors, tmp_path)
        (tmp_path / file).unlink()


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("ab", "c", "names 2.safetensors for b, which that file lacks"),
        ("ab", "b", "b is in 1.safetensors and in 2.safetensors"),
    ],
)
def test_an_index_fits_its_files(tmp_path: Path, first: str, second: str, text: str) -> None:
    for number, names in enumerate((first, second), start=1):
        save_file({name: torch.ones(2) for name in names}, tmp_path / f"{number}.safetensors")
    assert text in refused(HuggingFaceTensors, with_index(tmp_path, a="1.safetensors", b="2.safetensors"))


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


def test_adapters_and_distributed_checkpoints_are_refused(tmp_path: Path) -> None:
    """They are refused beside a model too: transformers may apply the one, and loads the other."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    for _ in range(2):
        for read in (read_model_config, Pretrained.find):
            assert "adapter_config.json; merge the adapter" in refused(read, tmp_path)
        written(tmp_path, LlamaConfig(**SIZES).to_dict())
    for name in (SINGLE, "shard-00001-model-00001-of-00001.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    assert "holds a distributed checkpoint" in refused(HuggingFaceTensors, tmp_path)


@pytest.mark.parametrize("suffix", ["qweight", "weight_packed", "weight"])
def test_quantized_tensors_have_their_own_remedy(tmp_path: Path, suffix: str) -> None:
    """The tensors are recognised even if the entry in config.json was removed."""
    model = write_model(tmp_path / "model", "llama")
    tensors = load_file(model / SINGLE)
    tensors[f"model.layers.0.self_attn.q_proj.{suffix}"] = torch.zeros(32, 32, dtype=torch.int32)
    save_file(tensors, model / SINGLE, {"format": "pt"})
    message = refused(HuggingFaceTensors(model).check, read_model_config(model), 300)
    assert "has type I32" in message
    assert message.endswith("use the model before its quantization")
