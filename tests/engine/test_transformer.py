"""Options of Megatron: which operations are fused and compute the same as our layers; options of Transformer Engine."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import megatron.core.models.common.embeddings.rope_utils as megatron_rope
import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from torch import Tensor

from megatron_ext import rope
from megatron_ext.batch import pack
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig
from megatron_ext.config.arguments import parse
from megatron_ext.config.options import PRESETS
from megatron_ext.data.row import TokenRow
from megatron_ext.engine import parallel
from megatron_ext.engine import transformer as choice
from megatron_ext.engine.model import PackedAttention
from megatron_ext.engine.platform import Platform
from megatron_ext.engine.transformer import fusions_here, rotation_limit, transformer_config
from megatron_ext.masks import MaskOptions
from tests.conftest import refused
from tests.engine.fake_modules import fake
from tests.one_process import build_models, one_process

NAMES = ("bias_activation_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
CPU = Platform(torch.device("cpu"), "gloo", transformer_engine=False)


@pytest.mark.parametrize(
    ("installed", "block", "fused"),
    [
        ([], "llama", (False, False, False)),
        (["triton", "fused_weight_gradient_mlp_cuda"], "llama", (True, False, True)),
        (["triton", "te"], "olmo3", (True, True, True)),
        (["triton", "te"], "phi", (False, False, True)),
    ],
)
def test_everything_that_is_available_is_fused(monkeypatch: pytest.MonkeyPatch, installed, block: str, fused) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: object() if name in installed else None)
    config = Config(model=ModelConfig(block=block))  # type: ignore[arg-type]
    on_cuda = Platform(torch.device("cuda"), "nccl", transformer_engine="te" in installed)
    assert fusions_here(on_cuda, config) == dict(zip(NAMES, fused, strict=True))
    assert fusions_here(CPU, config) == dict.fromkeys(NAMES, False)


def test_the_kernels_index_limit() -> None:
    config = Config(model=ModelConfig(**PRESETS["Llama-3-8B"]))  # rows of 6,144 numbers
    assert rotation_limit(config) == 349_525
    assert rotation_limit(replace(config, parallel=ParallelConfig(tensor_model_parallel_size=2))) == 699_050


def test_the_fused_rotation_gets_an_angle_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron passes our tokens and angles unchanged to Transformer Engine's kernel for "sbhd"."""
    kernel_calls: list[tuple[Tensor, Tensor, Any]] = []

    def kernel(query: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
        kernel_calls.append((query, angles, interleaved))
        return query

    monkeypatch.setattr(megatron_rope, "fused_apply_rotary_pos_emb", kernel)
    model = ModelConfig(hidden_size=32, num_attention_heads=4)
    transformer = transformer_config(Config(model=model), CPU)
    positions_t = torch.tensor([0, 1, 2, 0, 1, 0])  # three segments
    frequencies = rope.Frequencies(model, 8).at(None, positions_t.device)
    angles = rope.angles(positions_t, frequencies)[:, None, None, :]
    query_t1NH = torch.randn(6, 1, 4, 8)
    rotated = apply_rotary_pos_emb(query_t1NH, angles, config=transformer, cu_seqlens=None, cp_group=object())  # type: ignore[arg-type]
    transformer.apply_rope_fusion = True
    apply_rotary_pos_emb(query_t1NH, angles, config=transformer, cu_seqlens=None, cp_group=object())  # type: ignore[arg-type]
    ((query, passed, interleaved),) = kernel_calls
    assert (query is query_t1NH, passed is angles, interleaved) == (True, True, False)
    assert (angles.dtype, angles.shape) == (torch.float32, (6, 1, 1, 8))
    half = torch.cat([-query_t1NH[..., 4:], query_t1NH[..., :4]], dim=-1)  # what the kernel computes of them
    torch.testing.assert_close(rotated, query_t1NH * angles.cos() + half * angles.sin())


def test_a_micro_batch_too_long_for_the_kernel_is_rotated_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of an evaluation or of chunks may be longer than the run's rows."""
    lengths: list[int] = []

    def kernel(query: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
        lengths.append(len(query))
        return query

    monkeypatch.setattr(megatron_rope, "fused_apply_rotary_pos_emb", kernel)
    config = Config(model=ModelConfig(num_layers=2, vocab_size=50), data=DataConfig(seq_length=8))
    width = (config.model.num_attention_heads + 2 * config.model.num_query_groups) * config.model.head_size
    monkeypatch.setattr(choice, "COUNTED", 8 * width + 1)
    monkeypatch.setattr(choice, "fusions_here", lambda *unused: dict(zip(NAMES, (False, True, False), strict=True)))
    with one_process():
        (chunk,) = build_models(config)
        for length in (8, 9, 8):
            row = TokenRow(np.ones(length + 1, dtype=np.int64), np.array([length]), np.ones(length, dtype=np.bool_))
            chunk(pack([row], length, MaskOptions(document_mask=True, num_layers=2)))
    assert lengths == [8] * 8  # queries and keys of two layers, twice


def test_options_with_and_without_transformer_engine_are_refused() -> None:
    for name in ("tp_comm_overlap", "use_precision_aware_optimizer"):
        message = refused(transformer_config, parse([f"--{name.replace('_', '-')}"]), CPU)
        assert message.startswith(f"{name}: got true, needs CUDA with Transformer Engine; install it or ")
    offloaded = parse(["--use-precision-aware-optimizer", "--optimizer-cpu-offload"])
    assert refused(transformer_config, offloaded, CPU) == "optimizer_cpu_offload: got true, needs CUDA; leave it out"
    gpu = Platform(torch.device("cuda", 0), "nccl", transformer_engine=True)
    assert refused(transformer_config, parse(["--compile"]), gpu).startswith("compile: got true with Transformer ")


@pytest.mark.parametrize(("fp8", "mode"), [("", "NONE"), ("--fp8-format hybrid", "FP8")])
def test_the_overlaps_buffers_hold_a_micro_batch(monkeypatch: pytest.MonkeyPatch, fp8: str, mode: str) -> None:
    calls: list[Any] = []
    ranks: Any = SimpleNamespace(tensor_size=8)
    package = {
        "destroy_ub": lambda: calls.append("destroyed"),
        "initialize_ub": lambda **options: calls.append(options),
    }
    modes = SimpleNamespace(NONE="NONE", FP8="FP8")
    fake(monkeypatch, "transformer_engine.pytorch.module", UserBufferQuantizationMode=modes)
    fake(monkeypatch, "transformer_engine.pytorch", **package)
    flags = "--hidden-size 64 --seq-length 512 --micro-batch-size 2 --context-parallel-size 4"
    parallel.start_tensor_overlap(parse(flags.split()), ranks)
    assert calls == []  # not asked for
    parallel.start_tensor_overlap(parse(f"{flags} --tp-comm-overlap {fp8}".split()), ranks)
    wanted = {"shape": [2 * 512 // 4, 64], "tp_size": 8, "quantization_modes": [mode], "bootstrap_backend": "nccl"}
    assert calls == ["destroyed", wanted]  # a stage's before this one


def test_layers_without_rope_have_no_yarn_factor() -> None:
    """YaRN multiplies rotated queries and keys: squared in the scores of those layers, absent from the others."""
    yarn = "--rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 64"
    model = parse(f"--num-layers 4 --no-rope-freq 2 {yarn}".split()).model
    transformer = transformer_config(Config(model=model), CPU)
    factor = rope.attention_factor(model) ** 2
    assert factor > 1
    rotated = [model.has_rope(number) for number in range(1, 5)]
    assert sorted(set(rotated)) == [False, True]
    assert transformer.no_rope_freq == [int(not has_rope) for has_rope in rotated]
    factors = [PackedAttention(transformer, number).scale / transformer.softmax_scale for number in range(1, 5)]
    assert factors == pytest.approx([factor if has_rope else 1.0 for has_rope in rotated])
