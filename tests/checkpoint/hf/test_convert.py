"""Conversion both ways: bit-exact, unsupported models are refused by name, an output is complete or absent."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import scan_cache_dir
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatron_ext.checkpoint.hf.config import comparable
from megatron_ext.checkpoint.hf.convert import hf_to_megatron, megatron_to_hf, write_config
from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors, read_model_config
from megatron_ext.checkpoint.manifest import Manifest
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ModelConfig
from megatron_ext.data.preprocess.pipeline import PreprocessOptions, preprocess
from megatron_ext.data.text.tokenizer import Tokenizer, train_bpe
from tests.chats import END, PLAIN, conversations, put_chats, put_tokenizer
from tests.checkpoint.models import ARCHITECTURES, SIZES, write_model
from tests.conftest import refused
from tests.launcher import ROOT, wait_until

GB = 10**9


def back(run: Path, output: Path, max_shard_bytes: int = GB, tokenizer: str | None = "none") -> None:
    megatron_to_hf(run, output, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer)


def assert_same_tensors(first_folder: Path, second_folder: Path) -> None:
    a, b = HuggingFaceTensors(first_folder), HuggingFaceTensors(second_folder)
    assert a.names == b.names
    for name in a.names:
        assert a.described(name) == b.described(name)
        assert torch.equal(a.open(name)[:].view(torch.uint8), b.open(name)[:].view(torch.uint8)), name


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        values: torch.Tensor = model(torch.arange(40)[None] % model.config.vocab_size).logits
    return values


def test_a_real_model_comes_back_bit_for_bit(stories_model: Path, tmp_path: Path) -> None:
    """Tensors, in one file and in several, configuration and all auxiliary files; and no code."""
    names = [
        "generation_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
    ]
    model = Path(shutil.copytree(stories_model, tmp_path / "model"))
    for name in names:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    (model / "modeling_custom.py").touch()
    hf_to_megatron(model, tmp_path / "run")
    for size in (GB, 300_000):
        output = tmp_path / str(size)
        back(tmp_path / "run", output, size, tokenizer=None)
        assert len(list(output.glob("*.safetensors"))) == (1 if size == GB else 4)
        assert_same_tensors(model, output)
        auxiliary_files = [
            str(path.relative_to(output)) for path in output.rglob("*.*") if "safetensors" not in path.name
        ]
        assert sorted(auxiliary_files) == sorted([*names, "config.json", "tokenizer.json", "tokenizer_config.json"])
        assert all((output / name).read_bytes() == (model / name).read_bytes() for name in auxiliary_files)
        assert all(file.stat().st_size < size + 10_000 for file in output.glob("*.safetensors"))
    assert torch.equal(logits(stories_model), logits(output))


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", torch.float32), *((name, torch.bfloat16) for name in ARCHITECTURES)], ids=str
)
def test_every_architecture_comes_back(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    """Its tensors bit for bit; its configuration both as a file that is carried and as one that we write."""
    model = write_model(tmp_path / "model", architecture, dtype, shard="40KB")
    (model / "tokenizer.json").write_text("{}")  # so that the folder counts as one with a tokenizer
    hf_to_megatron(model, tmp_path / "run", divisible_by=64)
    back(tmp_path / "run", tmp_path / "carried", tokenizer=None)
    back(tmp_path / "run", tmp_path / "written", 30_000)
    for name in ("carried", "written"):
        assert_same_tensors(model, tmp_path / name)
    assert (tmp_path / "carried/config.json").read_bytes() == (model / "config.json").read_bytes()
    assert comparable(read_model_config(tmp_path / "written")) == comparable(read_model_config(model))
    assert torch.equal(logits(tmp_path / "written"), logits(model))
    loaded = AutoConfig.from_pretrained(tmp_path / "written")
    assert loaded.dtype == dtype
    assert loaded.max_position_embeddings == SIZES["max_position_embeddings"]


def with_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({name: tensor} if tensor is not None else {}), folder / "model.safetensors", {"format": "pt"})


def test_a_tied_model_may_store_its_output_matrix(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama-tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    with_tensor(folder, "lm_head.weight", embedding.clone())
    hf_to_megatron(folder, tmp_path / "run")
    with_tensor(folder, "lm_head.weight", embedding + 1)
    assert "other than model.embed_tokens.weight" in refused(hf_to_megatron, folder, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("model.layers.4.mlp.gate_proj.weight", torch.ones(72, 32), "has model.layers.4.mlp.gate_proj.weight, which"),
        ("model.layers.0.mlp.up_proj.weight", None, "no tensor model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(71, 32), "is [71, 32], its config needs [72, 32]"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(72, 32).half(), "have types float16 and float32"),
    ],
)
def test_tensors_without_a_place(tmp_path: Path, name: str, tensor: torch.Tensor | None, text: str) -> None:
    folder = write_model(tmp_path / "model", "llama")
    with_tensor(folder, name, tensor)
    assert text in refused(hf_to_megatron, folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tensors_that_do_not_compute_the_model_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Angles that older files keep, and layers that predict further tokens."""
    plain = write_model(tmp_path / "plain", "deepseek_v3-dense")
    folder = write_model(tmp_path / "model", "deepseek_v3-dense", num_nextn_predict_layers=1)
    with_tensor(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))
    with_tensor(folder, "model.layers.4.eh_proj.weight", torch.ones(32, 64))
    hf_to_megatron(folder, tmp_path / "run")
    assert "num_nextn_predict_layers 1; these layers, 1 tensors, are left out" in caplog.text
    back(tmp_path / "run", tmp_path / "written")
    assert_same_tensors(plain, tmp_path / "written")
    with_tensor(plain, "model.layers.4.eh_proj.weight", torch.ones(32, 64))
    assert "has model.layers.4.eh_proj.weight, which" in refused(hf_to_megatron, plain, tmp_path / "other")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Tensors and configuration that do not belong together."""
    folders = {}
    for name in ("llama", "llama-tied", "qwen2"):
        hf_to_megatron(write_model(tmp_path / f"{name}-model", name), tmp_path / name)
        folders[name] = Pretrained.find(tmp_path / name).folder
    for tensors_of, config_of, text in (
        ("llama", "llama-tied", "needs None"),
        ("llama-tied", "llama", "has shape None"),
        ("qwen2", "llama-tied", "linear_qkv.bias in"),
    ):
        mixed = Path(shutil.copytree(folders[tensors_of], tmp_path / f"{tensors_of}-mixed"))
        replace(Manifest.read(mixed), config=Manifest.read(folders[config_of]).config).write(mixed)
        assert text in refused(back, mixed, tmp_path / "export")


def test_an_output_or_a_tokenizer_that_cannot_be_written(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    run = tmp_path / "run"
    link = tmp_path / "link"
    link.symlink_to(model)
    for output in (model, link):
        assert f"{output} exists" in refused(hf_to_megatron, model, output)
    hf_to_megatron(model, run)
    for tokenizer in (None, "somewhere/else", "bytes"):
        assert "--tokenizer none" in refused(back, run, tmp_path / "export", tokenizer=tokenizer)


def test_a_config_that_names_code_is_not_carried(tmp_path: Path) -> None:
    """Moonlight's configuration is an example: its .py files are not copied."""
    model = write_model(tmp_path / "model", "deepseek_v3-dense")
    export = tmp_path / "export"
    (model / "tokenizer.json").write_text("{}")
    entries = json.loads((model / "config.json").read_text()) | {"auto_map": {"AutoConfig": "configuration.C"}}
    (model / "config.json").write_text(json.dumps(entries))
    hf_to_megatron(model, tmp_path / "run")
    back(tmp_path / "run", export, tokenizer=None)
    assert "auto_map" not in json.loads((export / "config.json").read_text())
    assert comparable(read_model_config(export)) == comparable(read_model_config(model))


def test_a_coefficient_of_balancing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf_to_megatron(write_model(tmp_path / "model", "mixtral", router_aux_loss_coef=0.02), tmp_path / "run")
    assert "router_aux_loss_coef 0.02; choose --moe-aux-loss-coeff" in caplog.text


def test_an_export_has_the_ids_of_training_in_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own classes read no more than the vocabulary and the merges; for Qwen2 it takes no other class."""
    texts = [f"def function_{i}(value):\n    return value + {i}12\n\n  It's 2024! don't" for i in range(200)]
    probes = ("It's 2024", "a\n\n  b", "cafe\u0301", " indented")
    for architecture, described in (("llama", True), ("qwen3", False), ("qwen2", True)):
        model = write_model(tmp_path / architecture, architecture)
        train_bpe(texts, 300, model)
        if not described:
            (model / "tokenizer_config.json").unlink()
        hf_to_megatron(model, tmp_path / f"{architecture}-run")
        caplog.clear()
        back(tmp_path / f"{architecture}-run", tmp_path / f"{architecture}-back", tokenizer=None)
        theirs = AutoTokenizer.from_pretrained(tmp_path / f"{architecture}-back")
        ours = Tokenizer(model)
        is_same = all(theirs.encode(text, add_special_tokens=False) == ours.encode(text) for text in probes)
        assert is_same is ("not the ids of training" not in caplog.text)
        assert is_same is (architecture != "qwen2")


def test_an_export_of_a_run_on_chats_ends_with_a_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The base model's own ends of text end it as well."""
    model = write_model(tmp_path / "model", "llama", eos_token_id=2)
    run = tmp_path / "run"
    chats = tmp_path / "chats"
    put_tokenizer(model, PLAIN)
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 3], "max_new_tokens": 50}')
    file = put_chats(tmp_path / "chats.jsonl", conversations(3))
    preprocess(PreprocessOptions([str(file)], str(chats), str(model), messages_field="messages"))
    (tmp_path / "texts.json").write_text('{"turn_end": null}')
    (tmp_path / "ends.json").write_text('{"turn_end": null, "eod_id": 5}')
    hf_to_megatron(model, run)
    folder = Pretrained.find(run).folder
    end = Tokenizer(model).encode_spelled(END)[0][0]
    config = Manifest.read(folder).config
    for data, ends, warned in (
        ("chats", ([2, end], [2, 3, end]), False),
        ("texts", (2, [2, 3]), False),
        ("ends", ([2, 5], [2, 3, 5]), False),
        ("moved", (2, [2, 3]), True),
    ):
        trained = config | {"data": config["data"] | {"data_path": [str(tmp_path / data)]}}
        replace(Manifest.read(folder), config=trained).write(folder)
        output = tmp_path / f"after-{data}"
        back(run, output, tokenizer=None)
        generation = GenerationConfig.from_pretrained(output)
        assert (AutoConfig.from_pretrained(output).eos_token_id, generation.eos_token_id) == ends
        assert generation.max_new_tokens == 50
        assert ("metadata of the run's data sets is missing" in caplog.text) is warned


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "additional_chat_templates/a.jinja"])
def test_a_link_out_of_the_folder_is_not_copied(tmp_path: Path, name: str) -> None:
    model = put_tokenizer(write_model(tmp_path / "model", "llama"), None)
    (model / "additional_chat_templates").mkdir()
    private = tmp_path / "private"
    link = model / name
    shutil.move(link, private) if link.is_file() else private.write_text("{}")
    link.symlink_to(private)
    message = refused(hf_to_megatron, model, tmp_path / "run")
    assert message.startswith(f"checkpoint: {link} is a link to {private}; put a copy")
    assert not (tmp_path / "run").exists()
    inside = model / "additional_chat_templates" / "content"  # nothing that is carried by its own name
    shutil.copyfile(private, inside)
    link.unlink()
    link.symlink_to(inside)
    hf_to_megatron(model, tmp_path / "run")
    copied = tmp_path / "run" / "hugging_face" / name
    assert copied.read_bytes() == private.read_bytes()
    assert not copied.is_symlink()


def test_a_snapshot_of_the_cache_is_converted(tmp_path: Path) -> None:
    """Every file a link into `blobs`; a folder of that name elsewhere, or a link for it, is not the cache's."""
    model = put_tokenizer(write_model(tmp_path / "model", "llama"), None)
    (model / "generation_config.json").write_text("{}")
    repository = tmp_path / "hub" / "models--a--b"
    commit = "0123456789" * 4
    snapshot = repository / "snapshots" / commit
    blobs = repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file in model.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blobs / blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
    assert not scan_cache_dir(tmp_path / "hub").warnings
    (tmp_path / "short").symlink_to(snapshot)
    for number, source in enumerate((snapshot, tmp_path / "short")):
        hf_to_megatron(source, tmp_path / f"run{number}")
        copied = tmp_path / f"run{number}" / "hugging_face" / "generation_config.json"
        assert copied.read_text() == "{}"
        assert not copied.is_symlink()
    blobs.rename(tmp_path / "blobs")
    blobs.symlink_to(tmp_path / "blobs")
    assert "is a link to " in refused(hf_to_megatron, snapshot, tmp_path / "run2")


BIG = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 30, "vocab_size": 8192}
LARGEST = 8192 * 512 * 4
GROWTH = """
import sys
from pathlib import Path
from megatron_ext.checkpoint.hf.convert import hf_to_megatron, megatron_to_hf, write_config
small, source, output = map(Path, sys.argv[2:])
def peak():  # of this program: ru_maxrss would include the process that started it
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
def convert(source, output):
    if sys.argv[1] == "in":
        hf_to_megatron(source, output)
    else:
        megatron_to_hf(source, output, max_shard_bytes=10**8, tokenizer="none")
convert(small, output.with_name(output.name + "-small"))  # what it imports and sets up
before = peak()
convert(source, output)
print(peak() - before)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 490 MB of which the largest tensor is 17 MB."""
    return write_model(tmp_path_factory.mktemp("big") / "model", "llama", **BIG)


def run(*words: object) -> subprocess.Popen[str]:
    """GROWTH, with malloc as for tensors of 32 MB or more, whose memory it returns when they are freed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    return subprocess.Popen([sys.executable, "-c", GROWTH, *map(str, words)], env=environment, **pipes)


@pytest.mark.slow
def test_memory_is_a_tensor_or_a_file_not_a_model(big: Path, tmp_path: Path) -> None:
    """Peak memory grows by some times the largest tensor, of an export also by one file of 100 MB."""
    size = sum(file.stat().st_size for file in big.glob("*.safetensors"))
    small = write_model(tmp_path / "small", "llama")
    for way, begin, source, output, allowed in (
        ("in", small, big, "run", 3 * LARGEST + 2**25),
        ("out", tmp_path / "run-small", tmp_path / "run", "export", 10**8 + 3 * LARGEST + 2**25),
    ):
        assert size > 2 * allowed
        process = run(way, begin, source, tmp_path / output)
        message, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        growth = int(message)
        assert growth < allowed, f"{way}: {growth:,} bytes"
    assert_same_tensors(big, tmp_path / "export")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in", "out"])
def test_a_killed_conversion_leaves_nothing_that_looks_like_a_model(big: Path, tmp_path: Path, way: str) -> None:
    small = tmp_path / "small"
    source = big
    output = tmp_path / "output"
    write_model(small, "llama")
    if way == "out":
        hf_to_megatron(big, source := tmp_path / "run")
        hf_to_megatron(small, small := tmp_path / "small-run")
    process = run(way, small, source, output)

    def half_written() -> bool:
        return sum(file.stat().st_size for file in tmp_path.glob("output.*.partial/**/*") if file.is_file()) > 2**24

    assert wait_until(lambda: half_written() or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()[1]
    process.kill()
    process.communicate()
    assert not output.exists()
    if way == "in":
        hf_to_megatron(small, output)
    else:
        back(small, output)
    assert output.exists()


def test_an_export_names_the_tokens_that_begin_and_end_documents(tmp_path: Path) -> None:
    folder = put_tokenizer(tmp_path, None)
    tokenizer = Tokenizer(folder)
    write_config(tmp_path, ModelConfig(vocab_size=tokenizer.vocab_size), 64, torch.float32, folder)
    entries = json.loads((tmp_path / "config.json").read_text())
    assert (entries["bos_token_id"], entries["eos_token_id"]) == (tokenizer.bos_id, tokenizer.eod_id)
    assert tokenizer.bos_id != tokenizer.eod_id
