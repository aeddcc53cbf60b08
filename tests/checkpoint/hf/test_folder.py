"""Hugging Face model folders as transformers writes them, and what is refused of them, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from megatron_ext.checkpoint.hf.config import hugging_face_config
from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors, is_hugging_face, read_model_config, trained_length
from megatron_ext.checkpoint.hf.names import all_names, full_shape
from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError

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
OURS = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    ffn_hidden_size=72,
    num_layers=3,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    norm_epsilon=1e-4,
    rotary_base=300.0,
)


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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("config", "unlike"),
    [
        (LlamaConfig(**SIZES), {}),
        (LlamaConfig(**SIZES, head_dim=12), {"kv_channels": 12}),
        (LlamaConfig(**SIZES | {"num_key_value_heads": None}), {"num_query_groups": 4}),
        (Qwen2Config(**SIZES), {"add_qkv_bias": True}),
        (Qwen2Config(**SIZES, sliding_window=16, max_window_layers=1), {"add_qkv_bias": True}),  # not in use
        (MistralConfig(**SIZES, sliding_window=16), {"local_window": 16}),
        (MistralConfig(**SIZES, sliding_window=None), {}),
    ],
    ids=["llama", "llama-head", "llama-mha", "qwen2", "qwen2-window", "mistral-window", "mistral"],
)
def test_shapes_are_read(tmp_path: Path, config: PreTrainedConfig, unlike: dict[str, Any], tied: bool) -> None:
    config.tie_word_embeddings = tied
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    assert is_hugging_face(folder)
    wanted = shapes(OURS) | unlike | {"untie_embeddings_and_output_weights": not tied}
    assert shapes(read_model_config(folder)) == wanted


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


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_theta": 9.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}, "rope_parameters": {"rope_theta": 7.0}},
        {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 7.0, "factor": 2.0}},
    ],
    ids=str,
)
def test_rotary_options_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Old style, new style and both: the same base and the same scaling."""
    content = {k: v for k, v in LlamaConfig(**SIZES).to_dict().items() if k != "rope_parameters"}
    folder = written(tmp_path / "model", content | rope)
    theirs = AutoConfig.from_pretrained(folder).rope_parameters
    ours = read_model_config(folder)
    assert ours.rotary_base == theirs["rope_theta"]
    assert ours.rope_scaling.replace("none", "default") == theirs["rope_type"]
    assert ours.rope_scaling_factor == theirs.get("factor", 1.0)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("checkpoint: ")
    return text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'"llama"',
        b'{"model_type": "llama"}',
    ],
)
def test_a_damaged_configuration_is_one_line(tmp_path: Path, content: bytes) -> None:
    assert "config.json" in refusal(lambda: read_model_config(written(tmp_path, content)))


@pytest.mark.parametrize("changed", [{"num_attention_heads": None}, {"hidden_size": "32"}, {"rms_norm_eps": None}])
def test_values_of_another_type_are_one_line(tmp_path: Path, changed: dict[str, Any]) -> None:
    content = LlamaConfig(**SIZES).to_dict() | changed
    assert next(iter(changed)) in refusal(lambda: read_model_config(written(tmp_path, content)))


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    assert not is_hugging_face(tmp_path)
    assert "config.json" in refusal(lambda: read_model_config(tmp_path))


@given(
    heads=st.sampled_from([(4, 2), (4, 4), (6, 1)]),
    kv_channels=st.none() | st.integers(1, 9).map(lambda half: 2 * half),
    layers=st.integers(1, 4),
    vocab_size=st.integers(1, 999),
    base=st.floats(1, 1e8),
    epsilon=st.floats(1e-9, 1e-2),
    switches=st.tuples(st.booleans(), st.booleans()),
)
@settings(deadline=None)
def test_what_we_write_we_read(
    tmp_path_factory: pytest.TempPathFactory,
    heads: tuple[int, int],
    kv_channels: int | None,
    layers: int,
    vocab_size: int,
    base: float,
    epsilon: float,
    switches: tuple[bool, bool],
) -> None:
    model = ModelConfig(
        num_layers=layers,
        hidden_size=heads[0] * 8,
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        kv_channels=kv_channels,
        vocab_size=vocab_size,
        rotary_base=base,
        norm_epsilon=epsilon,
        untie_embeddings_and_output_weights=switches[0],
        add_qkv_bias=switches[1],
    )
    folder = written(tmp_path_factory.getbasetemp() / "ours", hugging_face_config(model, vocab_size, 512))
    assert shapes(read_model_config(folder)) == shapes(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shard", "tied"), [("1GB", False), ("8KB", True)])
def test_every_tensor_is_read_in_our_shape(tmp_path: Path, family: str, tied: bool, shard: str) -> None:
    """One file, and several with an index; a tied model has no output matrix."""
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**SIZES, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard == "8KB"
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "8KB")
    ours, tensors = read_model_config(tmp_path), HuggingFaceTensors(tmp_path)
    assert sorted(tensors) == sorted(all_names(ours))
    for name in tensors:
        assert name in tensors
        assert torch.equal(tensors.read(name), model.state_dict()[name])
        assert tuple(tensors.read(name).shape) == full_shape(name, ours, 61)
    assert ("lm_head.weight" in tensors) == (not tied)


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
    assert list(tensors) == ["a"]
    assert "has no tensor b" in refusal(lambda: tensors.read("b"))


@pytest.mark.parametrize("name", ["../private.safetensors", "{}/private.safetensors", "a/../../private.safetensors", 3])
def test_an_index_names_no_file_elsewhere(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "private.safetensors")
    named = name.format(tmp_path) if isinstance(name, str) else name
    message = refusal(lambda: HuggingFaceTensors(with_index(folder, a=named)))
    assert f"{folder / INDEX} names '{named}', which is outside its folder, needs files in {folder};" in message


def test_weights_may_be_links_and_lie_in_folders_inside(tmp_path: Path) -> None:
    """As in a snapshot of Hugging Face's cache; the link is not the file's word."""
    folder = tmp_path / "snapshots" / "0123"
    (folder / "part").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "4567")
    (folder / "part" / SINGLE).symlink_to("../../../blobs/4567")
    (folder / SINGLE).symlink_to("../../blobs/4567")
    assert HuggingFaceTensors(folder).read("a").tolist() == [1, 1]
    assert HuggingFaceTensors(with_index(folder, a=f"part/{SINGLE}")).read("a").tolist() == [1, 1]


@pytest.mark.parametrize(("file", "content"), [(SINGLE, b"abc"), (SINGLE, None), (INDEX, b"{}"), (INDEX, b"{")])
def test_a_torn_file_is_one_line(tmp_path: Path, file: str, content: bytes | None) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    (tmp_path / file).write_bytes((tmp_path / SINGLE).read_bytes()[:-1] if content is None else content)
    assert file in refusal(lambda: HuggingFaceTensors(tmp_path))


def test_the_length_it_was_trained_at(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, max_position_embeddings=777).to_dict()
    assert trained_length(written(tmp_path, config)) == 777
    config.pop("max_position_embeddings")
    assert trained_length(written(tmp_path, config)) is None
